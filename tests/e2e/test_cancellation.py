"""Proves that cancelling at any await of the three service functions leaves nothing behind, and the next request works.

Each test cancels at the first suspension, at the second and so on, until the function ends before it is met.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from common.rpc.pb import prefill_pb2
from common.sampling import SamplingParams
from kvtransfer.lease import ROUTER
from router.fleet.room import Room
from router.pipeline.generation import Generation, GenerationRequest
from router.pipeline.pipeline import Pipeline
from tests.support.checkpoints import make_random_checkpoint
from tests.support.in_process_cluster import LocalCluster, LocalWorker, local_cluster
from tests.support.interruptions import Awaits, fails_at
from tests.support.paths import ROOT
from tests.support.recompute import Recompute, prompt
from tests.support.redis_process import RedisServer
from tests.support.redis_tools import eventually
from tests.support.worker_stream import QUICK_HEARTBEAT, WorkerStream, stream_to

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = prompt(70)  # two chunks
SEEDED = SamplingParams(max_tokens=4, temperature=1.5, seed=21, ignore_eos=True)

OWN = tuple(str(ROOT / package) for package in ("common", "router", "kvtransfer", "prefill_svc", "decode_svc"))
WHEN = pytest.mark.parametrize("when", ["suspended", "ready", "twice"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path, redis_server: RedisServer) -> AsyncIterator[LocalCluster]:
    """Leases last half a minute: what is free in a moment was released."""
    async with local_cluster(model, redis_server.url, deadlines=QUICK_HEARTBEAT) as cluster:
        yield cluster


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def nothing_left(cluster: LocalCluster) -> AsyncIterator[None]:
    problems: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(
        lambda _, context: problems.append(f"{context['message']}: {context.get('exception')!r}")
    )
    await drop_connections(cluster)
    before = tasks()
    yield
    await drop_connections(cluster)
    await cluster.assert_all_free()
    await eventually(lambda: tasks() <= before)
    loop.set_exception_handler(None)
    assert problems == []


@pytest.fixture
def recompute(model: Path) -> Recompute:
    return Recompute.of(model, "float32")


def tasks() -> Counter[str]:
    """Those that run the repository's own code, by what they run."""
    own = [task.get_coro() for task in asyncio.all_tasks()]
    return Counter(coro.__qualname__ for coro in own if coro.cr_code.co_filename.startswith(OWN))


async def drop_connections(cluster: LocalCluster) -> None:
    connections = cluster.decode[0]._reader._connections
    for task in list(connections._current.values()):
        connections._retire(task.result())
    await eventually(lambda: not connections._background)


async def the_next_request_works(cluster: LocalCluster, recompute: Recompute) -> None:
    await cluster.assert_all_free()
    answered = await cluster.answer(PROMPT, SEEDED)
    assert answered.tokens == [recompute(PROMPT, SEEDED)]
    assert answered.report.attempts == 1
    cluster.forget_prefixes("prefill")
    cluster.forget_prefixes("decode")


@contextmanager
def cancelled(service: Any, at: int, when: str) -> Iterator[list[Awaits]]:
    """The next attempt's serve() is cancelled at that suspension; yields its Awaits."""
    server, awaits = service.relay_server, []
    real = server._serve

    async def serve(command: Any, session: Any, key: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        awaits.append(Awaits(at, when, task.cancel))
        await awaits[0].watch(real(command, session, key))

    server._serve = serve
    try:
        yield awaits
    finally:
        server._serve = real


async def served(one: LocalWorker, awaits: list[Awaits]) -> bool:
    """When the attempt is over, and its sequences are at most in a last step: whether it was cancelled."""
    await eventually(lambda: awaits and not one.service.relay_server.num_attempts)
    engine = one.worker.engine
    with engine._lock:
        sequences = [*engine._scheduler.running, *engine._scheduler.waiting]
        assert all(sequence.aborted_forks.issuperset(sequence.forks) for sequence in sequences)
    return awaits[0].reached


async def first_tokens(stream: WorkerStream, request: str) -> prefill_pb2.FirstTokens:
    await stream.submit(PROMPT, request=request, params=SEEDED, forks=[(0, ()), (1, ())])
    first: prefill_pb2.FirstTokens = await stream.event("first_tokens", request)
    return first


def release(cluster: LocalCluster, first: prefill_pb2.FirstTokens) -> None:
    """What the router does with KV that no decode worker has claimed."""
    leases = cluster.prefill[0].leases
    lease = leases._held.get(first.handle.id)
    if lease is not None and lease.reader_id == ROUTER:
        leases.release(first.handle.id, first.handle.epoch, ROUTER)


@WHEN
async def test_prefill_serve(cluster: LocalCluster, recompute: Recompute, when: str) -> None:
    one, number, reached = cluster.local[0], 0, True
    async with stream_to(one) as stream:
        while reached:
            number += 1
            with cancelled(one.service, number, when) as awaits:
                await stream.submit(PROMPT, request=str(number), params=SEEDED, forks=[(0, ()), (1, ())])
                reached = await served(one, awaits)
            if not reached:
                release(cluster, await stream.event("first_tokens", str(number)))
            await the_next_request_works(cluster, recompute)
    assert number > 1


@WHEN
@pytest.mark.parametrize(
    ("handle", "known"),
    [(True, True), (True, False), (False, True)],
    ids=["with a handle", "with a stranger's handle", "from the start"],
)
async def test_decode_serve(cluster: LocalCluster, recompute: Recompute, when: str, handle: bool, known: bool) -> None:
    """`known`: the reader has a connection to the holder already."""
    prefill, decode = cluster.local
    number, reached = 0, True
    async with stream_to(prefill) as holder, stream_to(decode) as stream:
        while reached:
            number += 1
            first = await first_tokens(holder, str(number))
            if not known:
                await drop_connections(cluster)
            fields: dict[str, Any] = {"params": SEEDED, "forks": [(t.fork, [t.token_id]) for t in first.tokens]}
            with cancelled(decode.service, number, when) as awaits:
                await stream.submit(PROMPT, request=str(number), handle=first.handle if handle else None, **fields)
                reached = await served(decode, awaits)
            if not reached:
                tokens = await stream.answer(str(number), forks=(0, 1))
                for fork in (0, 1):
                    whole = [first.tokens[fork].token_id, *(token.token_id for token in tokens[fork])]
                    assert whole == recompute(PROMPT, SEEDED, fork)
            release(cluster, first)
            await the_next_request_works(cluster, recompute)
    assert number > (5 if handle else 1)


@WHEN
async def test_admission_that_waits_for_room(cluster: LocalCluster, recompute: Recompute, when: str) -> None:
    """The one await of _admit that others never meet: for blocks. What comes behind it is let in."""
    prefill, decode = cluster.local
    engine = decode.worker.engine
    number, reached, waited = 0, True, 0
    admission = decode.service.admission
    async with stream_to(prefill) as holder, stream_to(decode) as stream:
        while reached:
            number += 1
            firsts = [await first_tokens(holder, f"{number} {name}") for name in ("ends", "behind")]
            with engine._lock:
                taken = engine._scheduler.pool.allocate(engine._scheduler.pool.num_free)
            with cancelled(decode.service, number, when) as awaits:
                for name, first in zip(("ends", "behind"), firsts, strict=True):
                    forks = [(token.fork, [token.token_id]) for token in first.tokens]
                    await stream.submit(
                        PROMPT, request=f"{number} {name}", handle=first.handle, params=SEEDED, forks=forks
                    )
                    if name == "ends":
                        await eventually(lambda: awaits and (admission.num_waiting or awaits[0].reached))
                        waited += admission.num_waiting
                        decode.service.relay_server._serve = decode.service.serve
                await eventually(lambda: admission.num_waiting)
                engine.free_blocks(taken)
                admission.poll()
                await stream.answer(f"{number} behind", forks=(0, 1))
                reached = await served(decode, awaits)
            release(cluster, firsts[0])
            await the_next_request_works(cluster, recompute)
    assert waited


class Client:
    """Reads two answers to their end; leaves by being cancelled at one await of what it is given to watch."""

    def __init__(self, cluster: LocalCluster, at: int, when: str) -> None:
        self.awaits = Awaits(at, when, self.leave)
        self.answers: list[list[int]] = [[], []]
        self.carriers: set[asyncio.Task[Any]] = set()  # tasks of the pipeline's
        self.task: asyncio.Task[None]
        self._cluster = cluster
        self._name = f"client-{at}"

    async def read(self) -> None:
        request = GenerationRequest(self._name, tuple(PROMPT), SEEDED, n=2)
        async with aclosing(self._cluster.pipeline.generate(Generation(request))) as deltas:
            async for delta in deltas:
                self.answers[delta.index] += [token.token_id for token in delta.tokens]

    def leave(self) -> None:
        """The carriers end in this very turn, and not some turns later, so that each await is met as it is."""
        for task in (self.task, *self.carriers):
            task.cancel()

    async def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Until the coroutine has ended or was cancelled."""
        self.task = asyncio.create_task(coroutine)
        await asyncio.wait({self.task}, timeout=20)
        assert self.task.done()
        if not self.task.cancelled():
            self.task.result()


@contextmanager
def watched(pipeline: Pipeline, client: Client) -> Iterator[None]:
    """All that carries the pipeline's requests: the task of each, and those of forks that go on side by side."""
    drive, attempt = pipeline._drive, pipeline._attempt

    async def carry(coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.current_task()
        assert task is not None
        if task in client.carriers:
            await coroutine
            return
        client.carriers.add(task)
        try:
            await client.awaits.watch(coroutine)
        finally:
            client.carriers.discard(task)

    pipeline._drive = lambda run: carry(drive(run))  # type: ignore[method-assign]
    pipeline._attempt = lambda run, answers: carry(attempt(run, answers))  # type: ignore[method-assign]
    try:
        yield
    finally:
        del pipeline._drive, pipeline._attempt


@contextmanager
def closed_gate(pipeline: Pipeline) -> Iterator[None]:
    """Opens a little later."""
    gate, capacity = pipeline._gate, pipeline._gate._capacity

    def reopen() -> None:
        gate._capacity = capacity
        gate.poll()

    gate._capacity = Room
    opening = asyncio.get_running_loop().call_later(0.02, reopen)
    try:
        yield
    finally:
        opening.cancel()
        reopen()


@WHEN
async def test_the_client_of_generate(cluster: LocalCluster, recompute: Recompute, when: str) -> None:
    """The consuming task is cancelled wherever it waits itself."""
    number, reached = 0, True
    while reached:
        number += 1
        client = Client(cluster, number, when)
        await client.run(client.awaits.watch(client.read()))
        reached = client.awaits.reached
        await the_next_request_works(cluster, recompute)
    assert number > 4


@WHEN
@pytest.mark.parametrize("trouble", ["none", "gate", "prefill", "decode"])
async def test_generate_wherever_it_waits(cluster: LocalCluster, recompute: Recompute, when: str, trouble: str) -> None:
    """The client leaves in each await of its request: at a gate that is closed at first, and in second attempts,

    after the second forward pass of one worker has failed; then forks go on side by side.
    """
    number, reached = 0, True
    while reached:
        number += 1
        client = Client(cluster, number, when)
        with ExitStack() as stack:
            stack.enter_context(watched(cluster.pipeline, client))
            if trouble == "gate":
                stack.enter_context(closed_gate(cluster.pipeline))
            elif trouble != "none":
                stack.enter_context(fails_at(getattr(cluster, trouble)[0], 2))
            await client.run(client.read())
        reached = client.awaits.reached
        if not reached:
            assert client.answers == [recompute(PROMPT, SEEDED, fork) for fork in range(2)]
        await the_next_request_works(cluster, recompute)
    assert number > {"none": 6, "gate": 7, "prefill": 9, "decode": 9}[trouble]


async def test_closing_the_generator_after_any_delta(cluster: LocalCluster, recompute: Recompute) -> None:
    for count in range(2 * SEEDED.max_tokens + 1):
        request = GenerationRequest(f"closing-{count}", tuple(PROMPT), SEEDED, n=2)
        deltas = cluster.pipeline.generate(Generation(request))
        for _ in range(count):
            await anext(deltas)
        await deltas.aclose()
        await the_next_request_works(cluster, recompute)
