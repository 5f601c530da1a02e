"""A prefill worker computes prompts, holds their KV for one reader, and keeps nothing of whatever ends otherwise."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from common.block_hash import BLOCK_SIZE
from common.deadlines import Deadlines
from common.errors import EpochMismatch, FingerprintMismatch, HandleTaken, KVExpired, KVRelayError, TransportUnavailable
from common.rpc.convert import finish_reason_from_proto
from common.sampling import SamplingParams
from kvtransfer.holder_client import HolderClient
from kvtransfer.lease import ROUTER
from prefill_svc.service import PrefillService
from tests.support.checkpoints import make_random_checkpoint
from tests.support.in_process_cluster import LocalCluster, LocalWorker, local_cluster
from tests.support.kv_fakes import ManualClock
from tests.support.redis_process import RedisServer
from tests.support.redis_tools import eventually
from tests.support.worker_stream import GREEDY, QUICK_HEARTBEAT, WorkerStream, held_step, holder_client, stream_to

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHUNK = 64  # tokens a prefill step may compute
CONTEXT = 256
EOS = 2
ONE = 77  # some token
SEEDED = SamplingParams(
    max_tokens=40, temperature=0.9, top_k=50, seed=11, ignore_eos=True, repetition_penalty=1.2, frequency_penalty=0.4
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path, redis_server: RedisServer) -> AsyncIterator[LocalCluster]:
    async with local_cluster(
        model, redis_server.url, prefill_tokens=CHUNK, max_model_len=CONTEXT, deadlines=QUICK_HEARTBEAT
    ) as cluster:
        yield cluster


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def all_free(cluster: LocalCluster) -> AsyncIterator[None]:
    cluster.forget_prefixes("prefill")
    yield
    await cluster.assert_all_free()


@pytest.fixture
def one(cluster: LocalCluster) -> LocalWorker:
    return cluster.local[0]


@pytest.fixture
def service(one: LocalWorker) -> PrefillService:
    return one.service


@pytest.fixture
def clock(service: PrefillService) -> Iterator[ManualClock]:
    """The clock of the leases, which a test may move."""
    clock, real = ManualClock(), service.leases._clock
    service.leases._clock = clock
    yield clock
    service.leases.expire(clock())
    service.leases._clock = real


@pytest_asyncio.fixture(loop_scope="module")
async def stream(one: LocalWorker) -> AsyncIterator[WorkerStream]:
    async with stream_to(one) as stream:
        yield stream


@pytest_asyncio.fixture(loop_scope="module")
async def holder(one: LocalWorker) -> AsyncIterator[HolderClient]:
    async with holder_client(one) as holder:
        yield holder


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 250, (1024,), generator=generator)[:length].tolist()


async def release(holder: HolderClient, *firsts: Any) -> None:
    for first in firsts:
        assert await holder.release(first.handle.id, first.handle.epoch, ROUTER)


@pytest.mark.parametrize("length", [1, BLOCK_SIZE, BLOCK_SIZE + 1, CHUNK, CHUNK + 1, 3 * CHUNK - 5])
async def test_events_come_in_order_and_the_handle_says_what_is_held(
    one: LocalWorker, stream: WorkerStream, holder: HolderClient, length: int
) -> None:
    await stream.submit(prompt(length), cache_salt=str(length))
    first = await stream.event("first_tokens")
    chunks = -(-length // CHUNK)
    assert [kind for kind, _ in stream.of()] == ["accepted", *["progress"] * (chunks - 1), "first_tokens"]
    progress = [(m.computed_tokens, m.total_tokens) for kind, m in stream.of() if kind == "progress"]
    assert progress == [(CHUNK * (i + 1), length) for i in range(chunks - 1)]
    [token] = first.tokens
    assert (token.fork, token.index, finish_reason_from_proto(token)) == (0, 0, None)
    handle, info = first.handle, one.worker.info
    assert (handle.address, handle.epoch, handle.fingerprint) == (info.address, info.epoch, info.fingerprint)
    assert (handle.num_tokens, len(set(handle.block_ids))) == (length, -(-length // BLOCK_SIZE))
    assert (handle.key.request_id, handle.key.attempt, handle.lease_s) == ("r", 1, one.worker.deadlines.lease_s)
    load = await stream.heartbeat()
    assert load.held_blocks == load.total_blocks - load.free_blocks == len(handle.block_ids)
    await release(holder, first)
    await stream.until(lambda: stream.loads[-1].held_blocks == 0)


@pytest.mark.parametrize(
    ("params", "length", "token_id", "reason", "stop_token_id"),
    [
        (SamplingParams(max_tokens=9, temperature=0, logit_bias=((EOS, 100.0),)), 20, EOS, "stop", None),
        (
            SamplingParams(max_tokens=9, temperature=0, logit_bias=((ONE, 100.0),), stop_token_ids=(5, ONE)),
            20,
            ONE,
            "stop",
            ONE,
        ),
        (SamplingParams(max_tokens=1, temperature=0, logit_bias=((ONE, 100.0),)), 20, ONE, "length", None),
        (SamplingParams(max_tokens=1, temperature=0, logit_bias=((EOS, 100.0),)), 20, EOS, "stop", None),
        (SamplingParams(max_tokens=9, temperature=0, logit_bias=((ONE, 100.0),)), CONTEXT - 1, ONE, "length", None),
    ],
    ids=["EOS", "stop token", "one token", "EOS as the one token", "end of the context"],
)
async def test_an_answer_of_one_token_leaves_nothing_held(
    service: PrefillService,
    stream: WorkerStream,
    params: SamplingParams,
    length: int,
    token_id: int,
    reason: str,
    stop_token_id: int | None,
) -> None:
    granted = service.leases.num_granted
    await stream.submit(prompt(length), params=params)
    first = await stream.event("first_tokens")
    [token] = first.tokens
    assert (token.token_id, finish_reason_from_proto(token)) == (token_id, reason)
    assert (token.stop_token_id if token.HasField("stop_token_id") else None) == stop_token_id
    assert not first.HasField("handle")
    assert service.leases.num_granted == granted


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=9, temperature=0, logit_bias=((EOS, 100.0),), ignore_eos=True),
        SamplingParams(max_tokens=9, min_tokens=2, temperature=0, logit_bias=((EOS, 50.0),)),
    ],
    ids=["ignore_eos", "min_tokens"],
)
async def test_eos_that_does_not_count_goes_on(
    stream: WorkerStream, holder: HolderClient, params: SamplingParams
) -> None:
    await stream.submit(prompt(20), params=params)
    first = await stream.event("first_tokens")
    assert [finish_reason_from_proto(token) for token in first.tokens] == [None]
    await release(holder, first)


async def test_forks_that_end_at_once_leave_the_handle_to_the_others(
    service: PrefillService, stream: WorkerStream, holder: HolderClient
) -> None:
    """Half of the probability is EOS's."""
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=3, logit_bias=((EOS, 100.0), (ONE, 100.0)))
    forks = [(index, ()) for index in (0, 1, 2, 3, 9, 12)]
    await stream.submit(prompt(33), forks=forks, params=params)
    first = await stream.event("first_tokens")
    assert [token.fork for token in first.tokens] == [0, 1, 2, 3, 9, 12]
    assert {token.token_id: finish_reason_from_proto(token) for token in first.tokens} == {EOS: "stop", ONE: None}
    assert (first.handle.num_tokens, len(first.handle.block_ids)) == (33, 3)
    assert service.leases.held_blocks == 3
    await release(holder, first)


async def test_forks_that_all_end_at_once_leave_nothing_held(stream: WorkerStream) -> None:
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=3, logit_bias=((EOS, 100.0),))
    await stream.submit(prompt(33), forks=[(0, ()), (1, ())], params=params)
    first = await stream.event("first_tokens")
    assert [(token.fork, finish_reason_from_proto(token)) for token in first.tokens] == [(0, "stop"), (1, "stop")]
    assert not first.HasField("handle")


@pytest.mark.parametrize("params", [replace(GREEDY, max_tokens=40), SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("fork", [0, 3])
async def test_a_resume_samples_the_token_that_the_uninterrupted_run_does(
    cluster: LocalCluster, stream: WorkerStream, holder: HolderClient, params: SamplingParams, fork: int
) -> None:
    """At every number of tokens around block borders, and at the last but one."""
    ids = prompt(BLOCK_SIZE + 3)
    async with stream_to(cluster.local[1]) as whole:
        await whole.submit(ids, forks=[(fork, ())], params=params)
        tokens = [token.token_id for token in (await whole.answer(forks=[fork]))[fork]]
    assert len(tokens) == params.max_tokens
    for done in (1, 2, BLOCK_SIZE - 4, BLOCK_SIZE - 3, BLOCK_SIZE - 2, params.max_tokens - 1):
        name = f"after {done}"
        await stream.submit(ids, request=name, forks=[(fork, tokens[:done])], params=params)
        first = await stream.event("first_tokens", name)
        [token] = first.tokens
        assert (token.fork, token.index, token.token_id) == (fork, done, tokens[done])
        assert finish_reason_from_proto(token) == ("length" if done == params.max_tokens - 1 else None)
        assert first.HasField("handle") == (not token.finish_reason)
        if first.HasField("handle"):
            assert first.handle.num_tokens == len(ids) + done
            await release(holder, first)


async def test_forks_of_different_output_are_refused(service: PrefillService, stream: WorkerStream) -> None:
    await stream.submit(prompt(20), forks=[(0, [5]), (1, [6])])
    assert await stream.failure() == ("invalid_request", "forks")
    assert [kind for kind, _ in stream.of()] == ["failed"]


async def test_leases_of_one_prefix_share_its_blocks_until_the_last_is_released(
    service: PrefillService, stream: WorkerStream, holder: HolderClient
) -> None:
    ids = prompt(3 * BLOCK_SIZE)
    await stream.submit(ids, request="a")
    first = await stream.event("first_tokens", "a")
    await stream.submit(ids, request="b")
    second = await stream.event("first_tokens", "b")
    assert (first.cached_tokens, second.cached_tokens) == (0, 2 * BLOCK_SIZE)
    assert list(first.handle.block_ids[:2]) == list(second.handle.block_ids[:2])
    assert first.handle.id != second.handle.id
    await release(holder, first)
    assert service.leases.held_blocks == 3
    await release(holder, second)


async def test_prompts_are_refused_while_too_much_is_held_for_others(
    service: PrefillService, stream: WorkerStream, holder: HolderClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any work; a prompt larger than the share itself is none of that, nor is an answer that has begun."""
    total = service.engine.load().total_blocks
    monkeypatch.setattr(service, "_max_held_kv", 3 / total)
    await stream.submit(prompt(4 * BLOCK_SIZE), request="large")
    first = await stream.event("first_tokens", "large")
    steps = service.engine.load().steps
    await stream.submit(prompt(20, seed=1), request="refused")
    assert await stream.failure("refused") == ("overloaded", "")
    assert service.engine.load().steps == steps
    await stream.submit(prompt(20, seed=1), forks=((0, prompt(2, seed=2)),), request="resumed")
    await release(holder, await stream.event("first_tokens", "resumed"))
    await release(holder, first)
    await stream.submit(prompt(20, seed=1), request="taken")
    await release(holder, await stream.event("first_tokens", "taken"))


async def test_prefixes_of_different_salt_are_not_shared(stream: WorkerStream, holder: HolderClient) -> None:
    ids = prompt(3 * BLOCK_SIZE)
    for salt in ("", "a", "b"):
        await stream.submit(ids, request=f"salt {salt}", cache_salt=salt)
        first = await stream.event("first_tokens", f"salt {salt}")
        assert first.cached_tokens == 0
        await release(holder, first)


async def test_an_abort_right_behind_its_submit_ends_it(service: PrefillService, stream: WorkerStream) -> None:
    with held_step(service.engine):
        for number in range(20):
            await stream.submit(prompt(3 * CHUNK, seed=number), request=str(number))
            await stream.abort(str(number))
        await stream.submit([5], request="last", params=replace(GREEDY, max_tokens=1))
        await stream.event("accepted", "last")
        await eventually(lambda: service.relay_server.num_attempts == 1)
    await stream.event("first_tokens", "last")
    assert {kind for number in range(20) for kind, _ in stream.of(str(number))} <= {"accepted"}


async def test_an_abort_before_the_first_step_computes_nothing_of_it(
    service: PrefillService, stream: WorkerStream
) -> None:
    with held_step(service.engine) as step:
        await stream.submit(prompt(5), request="computes", params=replace(GREEDY, max_tokens=1))
        await eventually(step.computing.is_set)
        await stream.submit(prompt(20))
        await stream.event("accepted")
        await stream.abort()
        await eventually(lambda: service.relay_server.num_attempts == 1)
        step.go.set()
        await stream.event("first_tokens", "computes")
        await eventually(lambda: service.engine.load().running == 0)
        assert {chunk.sequence.key for batch in step.batches for chunk in batch.chunks} == {"raw/computes/1"}
    assert [kind for kind, _ in stream.of()] == ["accepted"]


@pytest.mark.parametrize("length", [20, CHUNK, 2 * CHUNK + 1], ids=["last chunk", "a full chunk", "first chunk"])
@pytest.mark.parametrize("n", [1, 4])
async def test_an_abort_while_a_step_computes_it_holds_nothing(
    service: PrefillService, stream: WorkerStream, length: int, n: int
) -> None:
    granted = service.leases.num_granted
    with held_step(service.engine) as step:
        await stream.submit(prompt(length), forks=[(i, ()) for i in range(n)])
        await eventually(step.computing.is_set)
        await stream.abort()
        await eventually(lambda: service.relay_server.num_attempts == 0)
        assert service.engine.load().free_blocks < service.engine.load().total_blocks  # the step writes to them
    await eventually(lambda: service.engine.load().running == 0)
    assert [kind for kind, _ in stream.of()] == ["accepted"]
    assert service.leases.num_granted == granted


async def test_an_abort_after_the_first_token_leaves_the_lease_to_whoever_has_the_handle(
    service: PrefillService, stream: WorkerStream, holder: HolderClient
) -> None:
    await stream.submit(prompt(20))
    first = await stream.event("first_tokens")
    await stream.abort()
    await stream.heartbeat()
    assert service.leases.num_held == 1
    await release(holder, first)


async def test_aborts_at_any_moment_hold_nothing_but_what_was_handed_out(
    service: PrefillService, stream: WorkerStream, holder: HolderClient
) -> None:
    moments = random.Random(0)

    async def start_and_stop(request: str) -> None:
        await stream.submit(prompt(moments.choice([20, CHUNK, 2 * CHUNK + 1])), request=request, cache_salt=request)
        await asyncio.sleep(moments.random() * 0.03)
        await stream.abort(request)

    for turn in range(4):
        await asyncio.gather(*(start_and_stop(f"{turn} {number}") for number in range(12)))
    await eventually(lambda: service.relay_server.num_attempts == 0)
    await stream.heartbeat()
    handed_out = [message for kind, message in stream.events if kind == "first_tokens"]
    await eventually(lambda: service.engine.load().running == 0)
    assert service.leases.num_held == len(handed_out)
    await release(holder, *handed_out)


async def test_a_newer_attempt_replaces_one_that_is_being_computed(
    service: PrefillService, stream: WorkerStream, holder: HolderClient
) -> None:
    with held_step(service.engine) as step:
        await stream.submit(prompt(20), attempt=1)
        await eventually(step.computing.is_set)
        await stream.submit(prompt(20), attempt=2)
        await stream.event("accepted", attempt=2)
    first = await stream.event("first_tokens", attempt=2)
    assert [kind for kind, _ in stream.of(attempt=1)] == ["accepted"]
    assert first.handle.key.attempt == 2
    assert service.leases.num_held == 1
    await release(holder, first)


async def test_two_routers_with_equal_request_ids_get_their_own_answers(
    one: LocalWorker, service: PrefillService, holder: HolderClient
) -> None:
    async with stream_to(one, router_id="A") as a, stream_to(one, router_id="B") as b:
        with held_step(service.engine) as step:
            await a.submit(prompt(20))
            await eventually(step.computing.is_set)
            await b.submit(prompt(40, seed=1))
            await b.event("accepted")
            await b.abort("r", attempt=2)
        first, second = await a.event("first_tokens"), await b.event("first_tokens")
        assert (first.handle.num_tokens, second.handle.num_tokens) == (20, 40)
        assert ([k for k, _ in a.of()], [k for k, _ in b.of()]) == (["accepted", "first_tokens"],) * 2
        await release(holder, first, second)


@pytest.mark.parametrize("how", ["cancel", "close the channel"])
async def test_a_broken_stream_ends_what_waits_and_what_is_computed(
    one: LocalWorker, service: PrefillService, how: str
) -> None:
    async with stream_to(one, router_id="stays") as stays, stream_to(one) as stream:
        with held_step(service.engine) as step:
            await stream.submit(prompt(20), request="computed")
            await eventually(step.computing.is_set)
            await stream.submit(prompt(2 * CHUNK), request="waits")
            await stream.event("accepted", "waits")
            await stays.submit(prompt(20), params=replace(GREEDY, max_tokens=1))
            await stays.event("accepted")
            if how == "cancel":
                stream.call.cancel()
            else:
                await stream.channel.close()
            await eventually(lambda: service.relay_server.num_attempts == 1)
        await stays.event("first_tokens")


async def test_a_lease_outlives_the_stream_and_ends_at_its_time(
    one: LocalWorker, service: PrefillService, holder: HolderClient, clock: ManualClock
) -> None:
    async with stream_to(one) as stream:
        await stream.submit(prompt(20))
        handle = (await stream.event("first_tokens")).handle
    clock.offset += 0.9 * handle.lease_s
    assert await holder.renew(handle.id, handle.epoch, ROUTER) == handle.lease_s
    clock.offset += 0.9 * handle.lease_s
    service.leases.expire(clock())
    assert service.leases.num_held == 1
    clock.offset += 0.2 * handle.lease_s
    with pytest.raises(KVExpired):
        await holder.renew(handle.id, handle.epoch, ROUTER)


async def test_a_failed_forward_fails_its_batch_only(
    service: PrefillService, stream: WorkerStream, holder: HolderClient
) -> None:
    with held_step(service.engine) as step:
        step.failure = RuntimeError("the kernel broke")
        await stream.submit(prompt(20), request="in it")
        await eventually(step.computing.is_set)
        await stream.submit(prompt(20), request="behind it")
        await stream.event("accepted", "behind it")
    assert (await stream.failure("in it"))[0] == "engine_failure"
    await release(holder, await stream.event("first_tokens", "behind it"))


async def test_a_prompt_that_is_not_computed_in_time_is_given_up(
    service: PrefillService, stream: WorkerStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_deadlines", replace(service._deadlines, request_s=0.05))
    with held_step(service.engine):
        await stream.submit(prompt(20))
        assert (await stream.failure())[0] == "request_timeout"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"epoch": 1}, EpochMismatch),
        ({"fingerprint": "another"}, FingerprintMismatch),
        ({"layout_id": "another"}, FingerprintMismatch),
    ],
)
async def test_a_reader_of_another_kind_is_refused_at_connect(
    one: LocalWorker, holder: HolderClient, changes: dict[str, Any], error: type[KVRelayError]
) -> None:
    info = one.worker.info
    right = {"epoch": info.epoch, "fingerprint": info.fingerprint, "layout_id": info.layout_id}
    assert [offer.name for offer in await holder.connect(**right)] == ["shm", "grpc"]
    with pytest.raises(error) as refused:
        await holder.connect(**(right | changes))
    assert type(refused.value) is error
    with pytest.raises(TransportUnavailable):
        await holder.prove(info.epoch, "shm", b"guess")


async def test_a_handle_opens_to_its_id_epoch_and_first_reader_only(
    service: PrefillService, stream: WorkerStream, holder: HolderClient
) -> None:
    await stream.submit(prompt(20))
    handle = (await stream.event("first_tokens")).handle
    for id, epoch, error in [
        (bytes(16), handle.epoch, KVExpired),
        (handle.id[:-1] + bytes([handle.id[-1] ^ 1]), handle.epoch, KVExpired),
        (handle.id, handle.epoch ^ 1, EpochMismatch),
    ]:
        for ask in (holder.renew, holder.release):
            with pytest.raises(error):
                await ask(id, epoch, 5)
    await holder.renew(handle.id, handle.epoch, 5)
    for ask in (holder.renew, holder.release):
        with pytest.raises(HandleTaken):
            await ask(handle.id, handle.epoch, 6)
    assert service.leases.num_held == 1
    for _ in range(2):
        assert await holder.release(handle.id, handle.epoch, 5)
    assert not await holder.release(handle.id, handle.epoch, ROUTER)


async def test_a_worker_that_stops_keeps_nothing(model: Path, redis_server: RedisServer) -> None:
    """One prompt is being computed, one waits, one is held; the step ends after the worker's last word."""
    async with AsyncExitStack() as after:
        deadlines = Deadlines(drain_s=0.5)
        async with local_cluster(model, redis_server.url, decode=0, deadlines=deadlines) as stopping:
            service = stopping.prefill[0]
            stream = await after.enter_async_context(stream_to(stopping.local[0]))
            await stream.submit(prompt(20), request="held")
            await stream.event("first_tokens", "held")
            step = after.enter_context(held_step(service.engine))
            await stream.submit(prompt(20), request="computed")
            await eventually(step.computing.is_set)
            await stream.submit(prompt(20), request="waits")
            await stream.event("accepted", "waits")
            assert (service.leases.num_held, service.relay_server.num_attempts) == (1, 2)
            asyncio.get_running_loop().call_later(0.2, step.go.set)
        await stopping.assert_all_free()
        await eventually(lambda: stream.ended)
