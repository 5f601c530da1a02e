"""Proves on real engines what a hand-over moves and what not: answers that end early, forks, memory that is short.

Tokens are those of a full recompute throughout.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import pytest_asyncio

from common.block_hash import BLOCK_SIZE
from common.sampling import SamplingParams
from kvtransfer.claim import Claim, PullStats
from router.fleet.room import Room
from tests.support.checkpoints import make_random_checkpoint
from tests.support.in_process_cluster import LocalCluster, local_cluster
from tests.support.interruptions import cut_before
from tests.support.recompute import Recompute, prompt
from tests.support.redis_process import RedisServer
from tests.support.redis_tools import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
EOS = 2
CHUNK = 64
PROMPT = prompt(70)
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=8, temperature=1.5, seed=21, ignore_eos=True, repetition_penalty=1.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path, redis_server: RedisServer) -> AsyncIterator[LocalCluster]:
    """Each pool has 64 blocks, and the longest sequence takes 16 of them."""
    async with local_cluster(model, redis_server.url, prefill_tokens=CHUNK) as cluster:
        yield cluster


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def all_free(cluster: LocalCluster) -> AsyncIterator[None]:
    cluster.forget_prefixes("prefill")
    cluster.forget_prefixes("decode")
    yield
    await cluster.assert_all_free()


@pytest.fixture
def recompute(model: Path) -> Recompute:
    return Recompute.of(model, "float32")


@pytest.fixture
def letters(cluster: LocalCluster) -> SamplingParams:
    """Answers of letters only, each a token."""
    ids = [token_id for letter in ascii_lowercase for token_id in cluster.pipeline._text.encode(letter)]
    return replace(SEEDED, logit_bias=tuple((token_id, 100.0) for token_id in ids))


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """The pairs of blocks of every pull."""
    seen: list[list[tuple[int, int]]] = []
    pull = Claim.pull

    async def counted(claim: Claim, pairs: Sequence[tuple[int, int]]) -> PullStats:
        seen.append(list(pairs))
        return await pull(claim, pairs)

    monkeypatch.setattr(Claim, "pull", counted)
    return seen


def until(tokens: list[int], last: int) -> list[int]:
    """The tokens up to the first such one."""
    return tokens[: tokens.index(last) + 1] if last in tokens else tokens


# Answers that end with token 0.


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("end", ["length", "eos", "stop token", "stop string"])
async def test_an_answer_that_token_0_finishes_moves_nothing_and_holds_nothing(
    cluster: LocalCluster, letters: SamplingParams, pulls: list[Any], end: str, n: int
) -> None:
    """Leases last half a minute: what is free in a moment was released."""
    leases = cluster.prefill[0].leases
    granted, released, expired = leases.num_granted, leases.num_released, leases.num_expired
    params: SamplingParams = {
        "length": replace(SEEDED, max_tokens=1),
        "eos": replace(SEEDED, ignore_eos=False, logit_bias=((EOS, 100.0),)),
        "stop token": replace(SEEDED, logit_bias=((77, 100.0),), stop_token_ids=(77,)),
        "stop string": letters,
    }[end]
    stop = tuple(ascii_lowercase) if end == "stop string" else ()
    answered = await cluster.answer(PROMPT, params, n=n, stop=stop)
    assert [len(tokens) for tokens in answered.tokens] == [1] * n
    assert answered.reasons == ["length" if end == "length" else "stop"] * n
    if end != "length":
        assert answered.texts == [""] * n
    assert (answered.report.decode_worker, answered.report.attempts, pulls) == ("", 1, [])
    await cluster.assert_all_free()
    assert leases.num_granted - granted == leases.num_released - released == (1 if stop else 0)
    assert leases.num_expired == expired


# n answers: one prefill, one transfer.


async def test_forks_that_end_at_token_0_leave_the_transfer_to_the_others(
    cluster: LocalCluster, recompute: Recompute, pulls: list[Any]
) -> None:
    whole = [recompute(PROMPT, SEEDED, fork) for fork in range(5)]
    last = whole[1][0]
    wanted = [until(tokens, last) for tokens in whole]
    assert [len(tokens) for tokens in wanted].count(1) in range(1, 5)
    answered = await cluster.answer(PROMPT, replace(SEEDED, stop_token_ids=(last,)), n=5)
    assert answered.tokens == wanted
    assert answered.reasons == ["stop" if tokens[-1] == last else "length" for tokens in wanted]
    assert answered.report.attempts == 1
    assert [len(pairs) for pairs in pulls] == [-(-len(PROMPT) // BLOCK_SIZE)]


@pytest.mark.parametrize("cuts", [(), (3,), (6,)], ids=str)
async def test_a_stop_string_in_one_fork_leaves_the_others(
    cluster: LocalCluster, letters: SamplingParams, recompute: Recompute, pulls: list[Any], cuts: tuple[int, ...]
) -> None:
    """And does not come back when the others resume."""
    whole = [recompute(PROMPT, letters, fork) for fork in range(3)]
    texts = [cluster.pipeline._text.detokenizer(True).push(tokens) for tokens in whole]
    stop = texts[1][1:3]
    assert stop not in texts[0] + "." + texts[2]
    with cut_before(cluster.decode[0], *cuts) as left:
        answered = await cluster.answer(PROMPT, letters, n=3, stop=(stop,))
    assert left == []
    assert answered.texts == [texts[0], texts[1][:1], texts[2]]
    assert answered.tokens == [whole[0], whole[1][:3], whole[2]]
    assert answered.reasons == ["length", "stop", "length"]
    assert answered.report.attempts == (3 if cuts else 1)
    if not cuts:
        assert len(pulls) == 1


# What the decode worker has already.


@pytest.mark.parametrize("length", [5 * BLOCK_SIZE, 5 * BLOCK_SIZE + 1])
@pytest.mark.parametrize("known", range(6))
async def test_blocks_that_decode_has_are_not_moved(
    cluster: LocalCluster, recompute: Recompute, pulls: list[Any], length: int, known: int
) -> None:
    ids = prompt(length)
    if known:
        await cluster.answer(ids[: known * BLOCK_SIZE], replace(GREEDY, max_tokens=2))
    cluster.forget_prefixes("prefill")
    pulls.clear()
    answered = await cluster.answer(ids, GREEDY)
    assert answered.tokens == [recompute(ids, GREEDY)]
    missing = -(-length // BLOCK_SIZE) - known
    assert [len(pairs) for pairs in pulls] == [missing]
    assert answered.report.handover_bytes == missing * cluster.local[1].worker.built.layout.block_bytes
    assert (answered.report.cached_tokens, answered.report.decode_cached_tokens) == (0, known * BLOCK_SIZE)


# Memory that is short.


@contextmanager
def preempted(service: Any, step: int, forget: Callable[[], None]) -> Iterator[list[int]]:
    """All that runs is preempted before the engine's step of this number; `forget` then empties the prefix cache.

    Yields the numbers of computed tokens that were lost.
    """
    scheduler, count = service.engine._scheduler, 0
    real = scheduler.schedule
    lost: list[int] = []

    def schedule() -> Any:
        nonlocal count
        count += bool(scheduler.running or scheduler.waiting)
        if count == step and not lost:
            for sequence in reversed(list(scheduler.running)):
                lost.append(sequence.num_computed_tokens)
                scheduler._preempt(sequence)
            forget()
        return real()

    scheduler.schedule = schedule
    try:
        yield lost
    finally:
        del scheduler.schedule


@pytest.mark.parametrize("forgetful", [False, True])
@pytest.mark.parametrize(
    ("role", "step"), [("prefill", 2), ("prefill", 3), ("prefill", 4), ("decode", 1), ("decode", 2), ("decode", 6)]
)
async def test_preemption_on_the_way_changes_no_token(
    cluster: LocalCluster, recompute: Recompute, role: str, step: int, forgetful: bool
) -> None:
    """A prompt of four chunks: on prefill before the last one too, on decode with blocks that were brought there."""
    ids = prompt(3 * CHUNK + 10)
    [service] = cluster.prefill if role == "prefill" else cluster.decode

    def forget() -> None:
        if forgetful:
            cluster.forget_prefixes(role)

    with preempted(service, step, forget) as lost:
        answered = await cluster.answer(ids, SEEDED, n=2)
    assert answered.tokens == [recompute(ids, SEEDED, fork) for fork in range(2)]
    assert answered.report.attempts == 1
    assert lost == [(step - 1) * CHUNK] if role == "prefill" else len(lost) in (1, 2)
    assert all(lost)


async def test_a_last_chunk_without_room_waits_for_leases_to_end(cluster: LocalCluster, recompute: Recompute) -> None:
    """Half of the prompt is computed when the pool is full of what others hold."""
    ids = prompt(CHUNK + 40)
    engine = cluster.prefill[0].engine
    needed = -(-len(ids) // BLOCK_SIZE)
    with engine._lock:
        pool = engine._scheduler.pool
        held = pool.allocate(pool.num_free - needed + 1)
    running = asyncio.create_task(cluster.answer(ids, GREEDY))
    await eventually(lambda: engine._scheduler._stuck is not None)
    assert engine._scheduler.running[0].num_computed_tokens == CHUNK
    assert not running.done()
    engine.free_blocks(held)
    answered = await running
    assert answered.tokens == [recompute(ids, GREEDY)]
    assert answered.report.attempts == 1


async def test_preemption_while_other_kv_is_on_its_way(
    cluster: LocalCluster, recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five run, which take 70 of 64 blocks in the end; others' pulls wait until one of them is preempted.

    No router that counts what it sends would let so many in; several routers could.
    """
    many, preempting, count = asyncio.Event(), asyncio.Event(), 0
    pull = Claim.pull
    prompts = [prompt(100, seed) for seed in range(7)]
    long = replace(GREEDY, max_tokens=120)
    scheduler = cluster.decode[0].engine._scheduler

    async def late(claim: Claim, pairs: Sequence[tuple[int, int]]) -> PullStats:
        nonlocal count
        count += 1
        if count == 6:
            many.set()
        await (many if count <= 5 else preempting).wait()
        return await pull(claim, pairs)

    monkeypatch.setattr(Claim, "pull", late)
    monkeypatch.setattr(cluster.pipeline._gate, "_capacity", lambda: Room(100, 1000))
    before = scheduler.num_preemptions
    running = [asyncio.create_task(cluster.answer(ids, long)) for ids in prompts]
    await eventually(lambda: scheduler.num_preemptions > before)
    preempting.set()
    answers = await asyncio.gather(*running)
    assert [answered.tokens for answered in answers] == [[recompute(ids, long)] for ids in prompts]
    assert all(answered.report.attempts == 1 for answered in answers)
