"""A decode worker admits what it can confirm, answers in order, and keeps nothing of whatever ends otherwise."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from common.block_hash import BLOCK_SIZE
from common.rpc.convert import finish_reason_from_proto
from common.rpc.pb import kv_pb2, prefill_pb2
from common.sampling import SamplingParams
from decode_svc.service import DecodeService
from kvtransfer.lease import LeaseTable
from kvtransfer.transports.shm import ShmReader
from prefill_svc.service import PrefillService
from tests.support.checkpoints import make_random_checkpoint
from tests.support.in_process_cluster import LocalCluster, LocalWorker, local_cluster
from tests.support.kv_fakes import ManualClock
from tests.support.redis_process import RedisServer
from tests.support.redis_tools import eventually
from tests.support.worker_stream import GREEDY, QUICK_HEARTBEAT, WorkerStream, held_step, stream_to

pytestmark = pytest.mark.asyncio(loop_scope="module")
PLACES = 16  # sequences running at once
CONTEXT = 256
LONG = replace(GREEDY, max_tokens=100)
EOS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path, redis_server: RedisServer) -> AsyncIterator[LocalCluster]:
    """Both pools have 64 blocks; a decode step may take on all prompts at once."""
    sizes = {"max_num_seqs": PLACES, "max_model_len": CONTEXT, "decode_tokens": 1024}
    async with local_cluster(model, redis_server.url, deadlines=QUICK_HEARTBEAT, **sizes) as cluster:
        yield cluster


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def all_free(cluster: LocalCluster) -> AsyncIterator[None]:
    cluster.forget_prefixes("prefill")
    cluster.forget_prefixes("decode")
    yield
    await cluster.assert_all_free()


@pytest.fixture
def one(cluster: LocalCluster) -> LocalWorker:
    return cluster.local[1]


@pytest.fixture
def service(one: LocalWorker) -> DecodeService:
    return one.service


@pytest.fixture
def leases(cluster: LocalCluster) -> LeaseTable:
    holder: PrefillService = cluster.prefill[0]
    return holder.leases


@pytest.fixture
def clock(leases: LeaseTable) -> Iterator[ManualClock]:
    """The clock of the leases, which a test may move."""
    clock, real = ManualClock(), leases._clock
    leases._clock = clock
    yield clock
    leases.expire(clock())
    leases._clock = real


@pytest_asyncio.fixture(loop_scope="module")
async def stream(one: LocalWorker) -> AsyncIterator[WorkerStream]:
    async with stream_to(one) as stream:
        yield stream


@pytest_asyncio.fixture(loop_scope="module")
async def prefill(cluster: LocalCluster) -> AsyncIterator[WorkerStream]:
    async with stream_to(cluster.local[0]) as stream:
        yield stream


class PullGate:
    """Pulls copy at once or, with `before`, when they may, and return when they may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, before: bool) -> None:
        self.entered, self.go = asyncio.Event(), asyncio.Event()
        self.pairs: list[tuple[int, int]] = []
        real = ShmReader.pull

        async def pull(
            reader: ShmReader, ticket: Any, pairs: Sequence[tuple[int, int]], pool: Any, progress: Any
        ) -> None:
            self.pairs += pairs
            if not before:
                await real(reader, ticket, pairs, pool, progress)
            self.entered.set()
            await self.go.wait()
            if before:
                await real(reader, ticket, pairs, pool, progress)

        monkeypatch.setattr(ShmReader, "pull", pull)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 250, (1024,), generator=generator)[:length].tolist()


async def prefilled(
    prefill: WorkerStream, ids: Sequence[int], request: str = "r", **fields: Any
) -> prefill_pb2.FirstTokens:
    await prefill.submit(ids, request=request, **fields)
    first: prefill_pb2.FirstTokens = await prefill.event("first_tokens", request)
    assert first.HasField("handle")
    return first


async def go_on(
    stream: WorkerStream, ids: Sequence[int], first: prefill_pb2.FirstTokens, request: str = "r", **fields: Any
) -> None:
    """Submits the forks that are not finished, with the handle."""
    forks = [(token.fork, [token.token_id]) for token in first.tokens if not token.finish_reason]
    await stream.submit(ids, request=request, **({"forks": forks, "handle": first.handle} | fields))


async def take_all_places(stream: WorkerStream) -> None:
    """A submission that runs in every place; while its step is held nobody else gets one."""
    forks = [(index, ()) for index in range(PLACES)]
    await stream.submit([9], request="all places", forks=forks, params=replace(GREEDY, max_tokens=2))


# What comes, and in which order.


@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 5 * BLOCK_SIZE])
async def test_events_come_in_order_and_tokens_are_numbered_without_gaps(
    one: LocalWorker, prefill: WorkerStream, stream: WorkerStream, length: int
) -> None:
    first = await prefilled(prefill, prompt(length))
    await go_on(stream, prompt(length), first)
    tokens = (await stream.answer())[0]
    kinds = [kind for kind, _ in stream.of()]
    assert kinds == ["accepted", "admitted", *["tokens"] * (GREEDY.max_tokens - 1)]
    assert [token.index for token in tokens] == list(range(1, GREEDY.max_tokens))
    assert [finish_reason_from_proto(token) for token in tokens] == [None] * (len(tokens) - 1) + ["length"]
    admitted = await stream.event("admitted")
    blocks = -(-length // BLOCK_SIZE)
    assert (admitted.transport, admitted.bytes) == ("shm", blocks * one.worker.built.layout.block_bytes)
    assert (admitted.cached_tokens, admitted.queue_s >= 0, admitted.handover_s >= 0) == (0, True, True)


async def test_without_a_handle_the_worker_computes_the_prompt_and_says_what_it_had(stream: WorkerStream) -> None:
    for request, cached in (("a", 0), ("b", 2 * BLOCK_SIZE)):
        await stream.submit(prompt(3 * BLOCK_SIZE), request=request)
        tokens = (await stream.answer(request))[0]
        assert [token.index for token in tokens] == list(range(GREEDY.max_tokens))
        assert [kind for kind, _ in stream.of(request)] == ["accepted", *["tokens"] * GREEDY.max_tokens]
        message = await stream.event("tokens", request)
        assert (message.cached_tokens, message.prefill_s > 0) == (cached, True)


async def test_a_step_is_one_message_to_each_router(one: LocalWorker, service: DecodeService) -> None:
    async with stream_to(one, router_id="A") as a, stream_to(one, router_id="B") as b:
        with held_step(service.engine) as step:
            await a.submit([5], request="first", params=replace(GREEDY, max_tokens=1))
            await eventually(step.computing.is_set)
            for stream, requests in ((a, "xyz"), (b, "xy")):
                for request in requests:
                    await stream.submit(prompt(20), request=request, forks=[(0, ()), (1, ())])
                    await stream.event("accepted", request)
            step.go.set()
            for stream, requests in ((a, "xyz"), (b, "xy")):
                for request in requests:
                    await stream.answer(request, forks=[0, 1])
        for stream, requests in ((a, "xyz"), (b, "xy")):
            steps = [message for kind, message in stream.events if kind == "step"]
            together = [message for message in steps if message.sequences[0].key.request_id != "first"]
            assert len(together) == GREEDY.max_tokens == len(step.batches) - 1
            for index, message in enumerate(together):
                assert [one.key.request_id for one in message.sequences] == list(requests)
                tokens = [(token.fork, token.index) for one in message.sequences for token in one.tokens]
                assert tokens == [(0, index), (1, index)] * len(requests)


@pytest.mark.parametrize(
    ("known", "length"),
    [(0, 40), (BLOCK_SIZE - 1, 40), (BLOCK_SIZE, 40), (2 * BLOCK_SIZE, 40), (40, 40), (48, 48), (48, 49), (80, 48)],
)
async def test_a_local_prefix_hit_pulls_only_what_is_missing(
    one: LocalWorker, prefill: WorkerStream, stream: WorkerStream, known: int, length: int
) -> None:
    if known:
        await stream.submit(prompt(known), request="before")
        await stream.answer("before")
    first = await prefilled(prefill, prompt(length))
    await go_on(stream, prompt(length), first)
    admitted = await stream.event("admitted")
    hits = min(known, length) // BLOCK_SIZE
    assert admitted.cached_tokens == hits * BLOCK_SIZE
    assert admitted.bytes == (-(-length // BLOCK_SIZE) - hits) * one.worker.built.layout.block_bytes
    split = (await stream.answer())[0]
    await stream.submit(prompt(length), request="unsplit", cache_salt="unsplit")
    unsplit = (await stream.answer("unsplit"))[0]
    assert [token.token_id for token in unsplit[1:]] == [token.token_id for token in split]


@pytest.mark.parametrize("done", [1, BLOCK_SIZE - 3, BLOCK_SIZE - 2])
async def test_forks_of_different_output_resume_together_without_a_handle(stream: WorkerStream, done: int) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=5, ignore_eos=True, presence_penalty=0.5)
    await stream.submit(prompt(19), request="whole", forks=[(0, ()), (4, ())], params=params)
    whole = {fork: [t.token_id for t in ts] for fork, ts in (await stream.answer("whole", forks=[0, 4])).items()}
    assert whole[0] != whole[4]
    await stream.submit(prompt(19), forks=[(0, whole[0][:done]), (4, whole[4][: done + 1])], params=params)
    answer = await stream.answer(forks=[0, 4])
    assert [token.token_id for token in answer[0]] == whole[0][done:]
    assert [token.token_id for token in answer[4]] == whole[4][done + 1 :]
    assert [token.index for token in answer[0]] == list(range(done, 20))


async def test_two_routers_with_equal_request_ids_get_their_own_answers(
    one: LocalWorker, prefill: WorkerStream, stream: WorkerStream
) -> None:
    async with stream_to(one, router_id="B") as other:
        first = await prefilled(prefill, prompt(20))
        await go_on(stream, prompt(20), first)
        await other.submit(prompt(20))
        await other.abort(attempt=2)
        ours, theirs = (await stream.answer())[0], (await other.answer())[0]
        assert [token.token_id for token in ours] == [token.token_id for token in theirs[1:]]


# Waiting for room.


async def test_admission_is_first_come_first_served(
    service: DecodeService, prefill: WorkerStream, stream: WorkerStream
) -> None:
    """The second would fit into what is free; the first, for which the pool is too full, came before it."""
    large, small = await prefilled(prefill, prompt(100), "large"), await prefilled(prefill, prompt(5, 1), "small")
    with held_step(service.engine) as step:
        await stream.submit([5], request="runs first", params=replace(GREEDY, max_tokens=1))
        await eventually(step.computing.is_set)
        for index, length in enumerate((240, 240, 240, 150)):
            await stream.submit(prompt(length, index), request=f"runs {index}")
            await stream.event("accepted", f"runs {index}")
        step.turns.release()
        await eventually(lambda: len(step.batches) == 2)  # of these four
        await go_on(stream, prompt(100), large, "large")
        await stream.until(lambda: service.admission.num_waiting == 1)
        await go_on(stream, prompt(5, 1), small, "small")
        await stream.until(lambda: service.admission.num_waiting == 2)
        assert service.engine.load().free_blocks >= 1 + service.engine.load().running
        assert (await stream.heartbeat()).waiting == 2
    await stream.answer("large")
    await stream.answer("small")
    admitted = [message.key.request_id for kind, message in stream.events if kind == "admitted"]
    assert admitted == ["large", "small"]


async def test_who_waits_keeps_its_lease_alive(
    service: DecodeService,
    leases: LeaseTable,
    clock: ManualClock,
    prefill: WorkerStream,
    stream: WorkerStream,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For four times the length of a lease by the holder's clock."""
    monkeypatch.setattr(service._reader, "_sleep", lambda seconds: asyncio.sleep(seconds / 1000))
    first = await prefilled(prefill, prompt(20))
    with held_step(service.engine) as step:
        await take_all_places(stream)
        await eventually(step.computing.is_set)
        await go_on(stream, prompt(20), first)
        await stream.until(lambda: service.admission.num_waiting == 1)
        for _ in range(8):
            clock.offset += leases.lease_s / 2
            leases.expire(clock())
            await eventually(lambda: leases.next_expiry() > clock() + 0.9 * leases.lease_s)
    await stream.answer()
    assert (leases.num_held, (await stream.event("admitted")).bytes > 0) == (0, True)


async def test_the_load_counts_who_waits_and_what_is_reserved(
    service: DecodeService, prefill: WorkerStream, stream: WorkerStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = PullGate(monkeypatch, before=True)
    first = await prefilled(prefill, prompt(40))
    await go_on(stream, prompt(40), first)
    await asyncio.wait_for(gate.entered.wait(), 10)
    await stream.until(lambda: stream.loads[-1].reserved_blocks == 3)
    assert (stream.loads[-1].waiting, stream.loads[-1].running) == (0, 0)
    steps = stream.loads[-1].progress
    gate.go.set()
    await stream.answer()
    moved_bytes = 3 * service._reader._pool.block_bytes
    assert moved_bytes < stream.loads[-1].progress - steps < moved_bytes + 100  # bytes, and steps


# Whatever ends an attempt, wherever it is.


async def reach(
    where: str, service: DecodeService, stream: WorkerStream, monkeypatch: pytest.MonkeyPatch, stack: AsyncExitStack
) -> Any:
    """Prepares for an attempt to get stuck there; returns how to wait until it is."""
    if where in ("pulling", "copied"):
        gate = PullGate(monkeypatch, before=where == "pulling")
        stack.callback(gate.go.set)
        return gate.entered.wait
    if where == "waiting":
        step = stack.enter_context(held_step(service.engine))
        await take_all_places(stream)
        await eventually(step.computing.is_set)
        return lambda: eventually(lambda: service.admission.num_waiting == 1)
    if where == "computed":
        step = stack.enter_context(held_step(service.engine))
        return lambda: eventually(step.computing.is_set)
    return lambda: stream.event("tokens")


WHERE = ["waiting", "pulling", "copied", "computed", "answering"]


@pytest.mark.parametrize("how", ["abort", "abort of each fork", "newer attempt", "cancel", "close the channel"])
@pytest.mark.parametrize("where", WHERE)
async def test_an_attempt_that_is_given_up_leaves_nothing(
    one: LocalWorker,
    service: DecodeService,
    leases: LeaseTable,
    prefill: WorkerStream,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    how: str,
) -> None:
    """Neither here nor at the holder, whose blocks are free at once and not only when their lease ends."""
    first = await prefilled(prefill, prompt(40), forks=[(0, ()), (1, ())])
    async with stream_to(one, router_id="other") as other, stream_to(one) as stream, AsyncExitStack() as stack:
        stuck = await reach(where, service, other if where == "waiting" else stream, monkeypatch, stack)
        await go_on(stream, prompt(40), first, params=LONG)
        await asyncio.wait_for(stuck(), 10)
        if how == "abort":
            await stream.abort()
        elif how == "abort of each fork":
            await stream.abort(forks=[1])
            await stream.abort(forks=[0])
        elif how == "newer attempt":
            await stream.submit(prompt(40), attempt=2)
            await stream.event("accepted", attempt=2)
        elif how == "cancel":
            stream.call.cancel()
        else:
            await stream.channel.close()
        await eventually(lambda: "raw/r/1" not in service._attempts)
        await eventually(lambda: (service._reader.num_claims, leases.num_held) == (0, 0))
        await stack.aclose()
        if how == "newer attempt":
            await stream.answer(attempt=2)
        if how != "newer attempt" and "abort" in how:
            await stream.heartbeat()
        assert stream.of()[-1][0] in ("accepted", "admitted", "tokens")  # and no word more


@pytest.mark.parametrize("where", WHERE)
async def test_an_abort_of_one_fork_leaves_the_others(
    one: LocalWorker,
    service: DecodeService,
    prefill: WorkerStream,
    stream: WorkerStream,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    params = replace(LONG, max_tokens=30, temperature=1.0, seed=3)
    first = await prefilled(prefill, prompt(40), forks=[(i, ()) for i in range(3)], params=params)
    async with stream_to(one, router_id="other") as other, AsyncExitStack() as stack:
        stuck = await reach(where, service, other if where == "waiting" else stream, monkeypatch, stack)
        await go_on(stream, prompt(40), first, params=params)
        await asyncio.wait_for(stuck(), 10)
        await stream.abort(forks=[1])
        await stream.submit([5], request="behind it")  # what came before it has been read
        await stream.event("accepted", "behind it")
        seen = len([token for token in stream.tokens_of() if token.fork == 1])
        await stack.aclose()
        answer = await stream.answer(forks=[0, 2])
    assert [[token.index for token in answer[fork]] for fork in (0, 2)] == [list(range(1, 30))] * 2
    assert len([token for token in stream.tokens_of() if token.fork == 1]) == seen
    await stream.answer("behind it")


async def test_aborts_at_any_moment_leave_nothing(
    service: DecodeService, leases: LeaseTable, prefill: WorkerStream, stream: WorkerStream
) -> None:
    moments = random.Random(0)

    async def start_and_stop(request: str) -> None:
        ids = prompt(30, seed=moments.randrange(4))
        first = await prefilled(prefill, ids, request)
        await go_on(stream, ids, first, request, params=LONG)
        await asyncio.sleep(moments.random() * 0.03)
        await stream.abort(request)

    for turn in range(4):
        await asyncio.gather(*(start_and_stop(f"{turn} {number}") for number in range(12)))
    await eventually(lambda: service.relay_server.num_attempts == 0)
    assert "failed" not in {kind for kind, _ in stream.events}
    await eventually(lambda: leases.num_held == 0)


async def test_a_failed_forward_fails_its_batch_only(
    service: DecodeService, prefill: WorkerStream, stream: WorkerStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = PullGate(monkeypatch, before=True)
    waits = await prefilled(prefill, prompt(40), "pulling")
    await go_on(stream, prompt(40), waits, "pulling")
    await asyncio.wait_for(gate.entered.wait(), 10)
    with held_step(service.engine) as step:
        step.failure = RuntimeError("the kernel broke")
        await stream.submit(prompt(20), request="in it", forks=[(0, ()), (1, ())])
        await eventually(step.computing.is_set)
        await stream.submit(prompt(20), request="behind it")
        await stream.event("accepted", "behind it")
    assert (await stream.failure("in it"))[0] == "engine_failure"
    gate.go.set()
    await stream.answer("behind it")
    await stream.answer("pulling")


async def test_a_failed_forward_in_mid_answer_ends_the_attempt(
    service: DecodeService, prefill: WorkerStream, stream: WorkerStream
) -> None:
    first = await prefilled(prefill, prompt(40))
    await go_on(stream, prompt(40), first, params=LONG)
    await stream.event("tokens")
    with held_step(service.engine) as step:
        step.failure = RuntimeError("the kernel broke")
        await eventually(step.computing.is_set)
    assert (await stream.failure())[0] == "engine_failure"


@pytest.mark.parametrize("where", WHERE)
async def test_an_answer_that_is_not_complete_in_time_is_given_up(
    one: LocalWorker,
    service: DecodeService,
    leases: LeaseTable,
    prefill: WorkerStream,
    stream: WorkerStream,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    first = await prefilled(prefill, prompt(40))
    async with stream_to(one, router_id="other") as other, AsyncExitStack() as stack:
        if where == "answering":  # computing for longer than there is time
            where = "computed"
        await reach(where, service, other, monkeypatch, stack)
        monkeypatch.setattr(service, "_deadlines", replace(service._deadlines, request_s=0.1))
        await go_on(stream, prompt(40), first, params=LONG)
        assert (await stream.failure())[0] == "request_timeout"
        await eventually(lambda: leases.num_held == 0)


# Handles that are no good.


def handle_of(first: prefill_pb2.FirstTokens, **changes: Any) -> kv_pb2.KVHandle:
    handle = kv_pb2.KVHandle()
    handle.CopyFrom(first.handle)
    for name, value in changes.items():
        if name == "block_ids":
            handle.block_ids[:] = value
        else:
            setattr(handle, name, value)
    return handle


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"epoch": 12345}, "epoch_mismatch", "epoch"),
        ({"id": bytes(16)}, "kv_expired", ""),
        ({"id": bytes(15)}, "handover_failed", "handle.id"),
        ({"fingerprint": "another"}, "fingerprint_mismatch", "fingerprint"),
        ({"layout_id": "another"}, "fingerprint_mismatch", "layout_id"),
        ({"address": "127.0.0.1:1"}, "handover_failed", "handle.address"),
        ({"address": "nonsense"}, "handover_failed", "handle.address"),
        ({"num_tokens": 39}, "invalid_request", "handle"),
        ({"num_tokens": 41}, "invalid_request", "handle"),
        ({"num_tokens": 0}, "handover_failed", "handle.num_tokens"),
        ({"block_ids": [60, 61, 62]}, "handover_failed", "block_ids"),
        ({"block_ids": [2**31, 2**31 + 1, 2**31 + 2]}, "handover_failed", "block_ids"),
        ({"block_ids": [1, 2]}, "handover_failed", "handle.block_ids"),
        ({"lease_s": 0.0}, "handover_failed", "handle.lease_s"),
    ],
    ids=str,
)
async def test_a_wrong_handle_is_refused_and_nothing_is_read(
    service: DecodeService,
    leases: LeaseTable,
    clock: ManualClock,
    prefill: WorkerStream,
    stream: WorkerStream,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    code: str,
    field: str,
) -> None:
    gate = PullGate(monkeypatch, before=True)
    first = await prefilled(prefill, prompt(40))
    await go_on(stream, prompt(40), first, handle=handle_of(first, **changes))
    assert await stream.failure() == (code, field)
    assert (gate.pairs, service.engine.cached_hashes()) == ([], [])
    assert leases.num_held == 1
    clock.offset += leases.lease_s


async def test_the_blocks_of_another_handle_are_not_to_be_had(
    leases: LeaseTable,
    clock: ManualClock,
    prefill: WorkerStream,
    stream: WorkerStream,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A handle of one's own does not open somebody else's prompt, whatever order its blocks are given in."""
    gate = PullGate(monkeypatch, before=True)
    mine, theirs = await prefilled(prefill, prompt(40), "mine"), await prefilled(prefill, prompt(40, 1), "theirs")
    for number, blocks in enumerate((list(theirs.handle.block_ids), list(mine.handle.block_ids)[::-1])):
        await go_on(stream, prompt(40), mine, f"try {number}", handle=handle_of(mine, block_ids=blocks))
        assert await stream.failure(f"try {number}") == ("handover_failed", "block_ids")
    assert (gate.pairs, leases.num_held) == ([], 2)
    clock.offset += leases.lease_s


@pytest.mark.parametrize(
    "forks",
    [[(0, [5, 6]), (1, [7, 8])], [(0, [5, 6]), (1, [5])], [(0, [5, 6]), (1, [5, 7]), (2, [6, 7])]],
    ids=["nothing in common", "different length", "one of three"],
)
async def test_forks_that_are_not_of_the_handles_tokens_are_refused(
    leases: LeaseTable, clock: ManualClock, prefill: WorkerStream, stream: WorkerStream, forks: Any
) -> None:
    """Else one fork would run on the other's KV, and leave it in the prefix cache under its own tokens."""
    first = await prefilled(prefill, prompt(40), forks=[(0, [5])])
    await stream.submit(prompt(40), forks=forks, handle=first.handle)
    assert (await stream.failure())[0] == "invalid_request"
    assert leases.num_held == 1
    clock.offset += leases.lease_s


async def test_forks_may_differ_in_the_token_that_is_not_computed_yet(
    prefill: WorkerStream, stream: WorkerStream
) -> None:
    first = await prefilled(prefill, prompt(40), forks=[(0, [5])])
    await stream.submit(prompt(40), forks=[(0, [5, 6]), (1, [5, 7])], handle=first.handle)
    split = await stream.answer(forks=[0, 1])
    await stream.submit(prompt(40), request="whole", forks=[(0, [5, 6]), (1, [5, 7])], cache_salt="whole")
    whole = await stream.answer("whole", forks=[0, 1])
    assert [[t.token_id for t in split[f]] for f in (0, 1)] == [[t.token_id for t in whole[f]] for f in (0, 1)]


@pytest.mark.parametrize("when", ["before the claim", "between claim and pull", "between pull and release"])
async def test_a_lease_that_ends_makes_the_copy_worthless(
    service: DecodeService,
    leases: LeaseTable,
    clock: ManualClock,
    prefill: WorkerStream,
    stream: WorkerStream,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    """No block of it is found later, and the request goes on from another prefill."""
    async with AsyncExitStack() as stack:
        first = await prefilled(prefill, prompt(40))
        if when == "before the claim":
            clock.offset += leases.lease_s
        elif when == "between claim and pull":
            step = stack.enter_context(held_step(service.engine))
            await take_all_places(stream)
            await eventually(step.computing.is_set)
        else:
            gate = PullGate(monkeypatch, before=False)
        await go_on(stream, prompt(40), first)
        if when == "between claim and pull":
            await eventually(lambda: service.admission.num_waiting == 1)
            clock.offset += leases.lease_s
            step.go.set()
        elif when == "between pull and release":
            await asyncio.wait_for(gate.entered.wait(), 10)
            clock.offset += leases.lease_s
            gate.go.set()
        assert (await stream.failure())[0] == "kv_expired"
        assert service.engine.cached_hashes() == []
    again = await prefilled(prefill, prompt(40), "again")
    assert again.cached_tokens == 2 * BLOCK_SIZE
    await go_on(stream, prompt(40), again, "again")
    await stream.answer("again")


async def test_a_handle_has_one_reader(
    one: LocalWorker,
    service: DecodeService,
    prefill: WorkerStream,
    stream: WorkerStream,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = PullGate(monkeypatch, before=True)
    first = await prefilled(prefill, prompt(40))
    async with stream_to(one, router_id="other") as other:
        await go_on(stream, prompt(40), first)
        await asyncio.wait_for(gate.entered.wait(), 10)
        for late in (other, stream):
            await go_on(late, prompt(40), first, "late")
            assert (await late.failure("late"))[0] == "handle_taken"
        gate.go.set()
        await stream.answer()
        await go_on(other, prompt(40), first, "too late")
        assert (await other.failure("too late"))[0] == "kv_expired"


async def test_a_worker_that_stops_keeps_nothing(
    model: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One attempt is being computed, one pulls, one waits for a place."""
    async with AsyncExitStack() as after:
        async with local_cluster(model, redis_server.url, max_num_seqs=PLACES) as stopping:
            service: DecodeService = stopping.decode[0]
            prefill = await after.enter_async_context(stream_to(stopping.local[0]))
            stream = await after.enter_async_context(stream_to(stopping.local[1]))
            firsts = [await prefilled(prefill, prompt(40), str(number)) for number in range(2)]
            gate = PullGate(monkeypatch, before=True)
            await go_on(stream, prompt(40), firsts[0], "pulls")
            await asyncio.wait_for(gate.entered.wait(), 10)
            step = after.enter_context(held_step(service.engine))
            forks = [(index, ()) for index in range(PLACES - 1)]
            await stream.submit([9], request="is computed", forks=forks)
            await eventually(step.computing.is_set)
            await go_on(stream, prompt(40), firsts[1], "waits")
            await eventually(lambda: service.admission.num_waiting == 1)
            asyncio.get_running_loop().call_later(0.2, step.go.set)
        await stopping.assert_all_free()
        await eventually(lambda: stream.ended)
