"""Proves on real engines that a resumed answer is the undisturbed one, and that whoever leaves frees every block."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from common.sampling import SamplingParams
from router.pipeline.generation import Generation, GenerationRequest
from tests.support.checkpoints import make_random_checkpoint
from tests.support.fake_cluster import cancelled_at_turn
from tests.support.in_process_cluster import LocalCluster, local_cluster
from tests.support.interruptions import fails_at
from tests.support.redis_process import RedisServer

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = [3 + 7 * index % 250 for index in range(70)]
SEEDED = SamplingParams(
    max_tokens=20, min_tokens=12, temperature=0.9, top_p=0.95, seed=11, repetition_penalty=1.2, presence_penalty=0.5,
    frequency_penalty=0.5, ignore_eos=True,
)  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> AsyncIterator[LocalCluster]:
    model: Path = make_random_checkpoint(tmp_path_factory.mktemp("model"))
    async with local_cluster(model, redis_server.url) as cluster:
        yield cluster


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def all_free(cluster: LocalCluster) -> AsyncIterator[None]:
    yield
    await cluster.assert_all_free()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("role", "step"), [("prefill", 1), ("prefill", 2), ("decode", 1), ("decode", 8)])
async def test_an_answer_survives_a_failed_step(cluster: LocalCluster, role: str, step: int, n: int) -> None:
    whole = await cluster.answer(PROMPT, SEEDED, n=n, cache_salt="whole")
    cluster.forget_prefixes("prefill")
    cluster.forget_prefixes("decode")
    [service] = cluster.prefill if role == "prefill" else cluster.decode
    with fails_at(service, step) as steps:
        answered = await cluster.answer(PROMPT, SEEDED, n=n, cache_salt="whole")
    assert steps() >= step
    assert answered.tokens == whole.tokens
    assert answered.texts == whole.texts
    assert answered.reasons == ["length"] * n
    assert answered.report.completion_tokens == 20 * n
    assert answered.report.attempts == (2 if role == "prefill" else 1 + n)


async def test_an_answer_survives_a_broken_stream(cluster: LocalCluster) -> None:
    whole = await cluster.answer(PROMPT, SEEDED, n=2, cache_salt="whole")
    [service] = cluster.decode
    generation = Generation(GenerationRequest("broken", tuple(PROMPT), SEEDED, n=2, cache_salt="whole"))
    tokens: list[list[int]] = [[], []]
    async with aclosing(cluster.pipeline.generate(generation)) as deltas:
        count = 0
        async for delta in deltas:
            tokens[delta.index] += [token.token_id for token in delta.tokens]
            count += 1
            if count == 12:
                [attempt] = service._attempts.values()
                attempt.session.outgoing.put_nowait(None)
    assert tokens == whole.tokens
    assert generation.report.attempts == 3


async def test_whoever_leaves_in_any_turn_frees_every_block(cluster: LocalCluster) -> None:
    """Every third turn of the event loop, from a request's start to its end; leases would last much longer."""
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)

    async def read(number: int) -> None:
        request = GenerationRequest(f"leaving-{number}", tuple(PROMPT), params, n=2, cache_salt=str(number))
        async with aclosing(cluster.pipeline.generate(Generation(request))) as deltas:
            async for _ in deltas:
                pass

    turn, ended = 0, False
    while not ended:
        ended = await cancelled_at_turn(read(turn), turn)
        turn += 3
        await cluster.assert_all_free()
    assert turn > 9
