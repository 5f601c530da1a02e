"""A router over scripted workers, and the proof that a test has left nothing behind in it."""

import asyncio
import gc
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from common.deadlines import Deadlines
from common.discovery.redis_client import Outage
from common.discovery.registry import WorkerRecord
from common.sampling import SamplingParams
from common.tasks import end
from common.text.text_model import TextModel
from router.fleet.prefix_index import PrefixIndex
from router.fleet.worker_client import WorkerClient
from router.fleet.workers import Workers
from router.metrics import RouterMetrics
from router.pipeline.generation import Delta, Generation, GenerationRequest, Report
from router.pipeline.pipeline import Pipeline
from tests.support.fake_turns import Words
from tests.support.fake_workers import FakeWorker
from tests.support.redis_tools import eventually

QUICK = Deadlines(
    heartbeat_s=0.05, suspect_s=0.5, dead_s=1.0, connect_s=5.0, rpc_s=5.0, router_queue_s=5.0, prefill_s=3.0,
    decode_token_s=3.0, request_s=20.0, lease_s=0.3,
)  # fmt: skip
PROMPT = (10, 11, 12, 13)


def letters(text: TextModel, written: str) -> list[int]:
    """A token a letter."""
    return [token_id for letter in written for token_id in text.encode(letter)]


class Clock:
    """The real one, and what a test has skipped."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.skipped_s


class FakeRegistry:
    """Lists what a test says, at once; until then it has not been read."""

    def __init__(self) -> None:
        self.outage = Outage()
        self._seen: Callable[[list[WorkerRecord]], None] = lambda records: None

    def show(self, *records: WorkerRecord) -> None:
        self._seen(list(records))

    async def keep_listed(self, seen: Callable[[list[WorkerRecord]], None]) -> None:
        self._seen = seen
        await asyncio.Event().wait()


@dataclass
class Answered:
    """What one request came to; `error` is what it ended with."""

    deltas: list[Delta]
    report: Report
    n: int
    error: Exception | None = None

    @property
    def tokens(self) -> list[list[int]]:
        return [[t.token_id for d in self.deltas if d.index == i for t in d.tokens] for i in range(self.n)]

    @property
    def texts(self) -> list[str]:
        return ["".join(d.text for d in self.deltas if d.index == i) for i in range(self.n)]

    @property
    def ends(self) -> list[tuple[str | None, str | int | None]]:
        """Finish reason and stop reason of each answer that has ended, by index."""
        ended = sorted((d.index, d.finish_reason, d.stop_reason) for d in self.deltas if d.finish_reason)
        return [(reason, stop) for _, reason, stop in ended]


class FakeCluster:
    def __init__(self, workers: Workers, pipeline: Pipeline, registry: FakeRegistry, index: PrefixIndex) -> None:
        self.workers = workers
        self.pipeline = pipeline
        self.registry = registry
        self.index = index
        self.clock = Clock()
        self.words = Words()
        self.fakes: list[FakeWorker] = []
        self.metrics = pipeline._metrics
        self.deadlines = pipeline._deadlines

    @property
    def prefill(self) -> FakeWorker:
        return next(fake for fake in self.fakes if fake.role == "prefill")

    @property
    def decode(self) -> FakeWorker:
        return next(fake for fake in self.fakes if fake.role == "decode")

    def client(self, fake: FakeWorker) -> WorkerClient:
        return self.workers._clients[fake.record.worker_id]

    async def add(self, role: str, name: str = "", *, epoch: int = 7, address: str = "127.0.0.1:0") -> FakeWorker:
        """A worker that runs and isn't listed yet."""
        name = name or f"{role}-{sum(fake.role == role for fake in self.fakes)}"
        fake = FakeWorker(role, name, self.words, self.deadlines, epoch=epoch)
        fake.cluster = self  # for scripts
        await fake.start(address)
        self.fakes.append(fake)
        return fake

    async def show(self, *fakes: FakeWorker) -> None:
        """Lists these and waits until they are connected."""
        self.registry.show(*(fake.record for fake in fakes))
        await eventually(lambda: all(self.client(fake).connected for fake in fakes))

    async def lose(self, fake: FakeWorker) -> None:
        """It dies, and the router knows."""
        await fake.stop()
        await eventually(lambda: not self.client(fake).connected)

    def generation(
        self, answers: Sequence[list[int]], prompt: Sequence[int] = PROMPT, params: dict[str, Any] | None = None,
        **request: Any,
    ) -> Generation:  # fmt: skip
        """A request for len(answers) answers, which honest workers give."""
        self.words.answers = [list(answer) for answer in answers]
        longest = max(map(len, answers), default=1)
        sampling = SamplingParams(**{"max_tokens": longest, **(params or {})})
        return Generation(GenerationRequest(secrets.token_hex(4), tuple(prompt), sampling, len(answers), **request))

    async def answer(self, answers: Sequence[list[int]], **asked: Any) -> Answered:
        return await self.run(self.generation(answers, **asked))

    async def run(self, generation: Generation) -> Answered:
        """Runs a request to its end, good or bad."""
        answered = Answered([], generation.report, generation.request.n)
        try:
            async with aclosing(self.pipeline.generate(generation)) as deltas:
                async for delta in deltas:
                    answered.deltas.append(delta)
        except Exception as error:
            answered.error = error
        return answered

    def leftovers(self) -> list[str]:
        """What is still charged, held, open or running anywhere."""
        counts = {"requests running": self.pipeline._running, "handles held": len(self.words.held)}
        running = "kvrelay:num_requests_running"
        labels = {"model_name": "test", "role": "router"}
        counts["running gauge"] = int(self.metrics.registry.get_sample_value(running, labels) or 0)
        counts["open expectations"] = len(self.index._open)
        for client in self.workers._clients.values():
            counts[f"attempts on {client.record.worker_id}"] = client.in_flight
            counts[f"tokens charged to {client.record.worker_id}"] = client.charged_tokens
        for fake in self.fakes:
            counts[f"attempts at {fake.record.worker_id}"] = len(fake.running)
        return [f"{what}: {count}" for what, count in counts.items() if count]

    async def assert_nothing_left(self) -> None:
        """What is on its way gets a moment to end."""
        try:
            await eventually(lambda: not self.leftovers(), 5.0)
        except TimeoutError:
            raise AssertionError("; ".join(self.leftovers())) from None
        self.clock.skipped_s += 60.0  # expectations linger
        self.index.prefix_blocks("nobody", ())
        assert not [worker_id for worker_id, view in self.index._views.items() if view.expected]


async def cancelled_at_turn(coroutine: Coroutine[Any, Any, Any], turn: int) -> bool:
    """Runs it and cancels it at the start of this turn of the event loop; whether it had ended by then."""
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(coroutine)
    run_once, count = loop._run_once, 0

    def counted() -> None:
        nonlocal count
        if count == turn:
            task.cancel()
        count += 1
        run_once()

    loop._run_once = counted
    try:
        await asyncio.wait({task})
    finally:
        del loop._run_once
    if not task.cancelled():
        task.result()
    return not task.cancelled()


@asynccontextmanager
async def no_task_left() -> AsyncIterator[None]:
    """Proves at the end that no task is left, and no exception that nobody has seen."""
    problems: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: problems.append(f"{context['message']}: {context.get('exception')!r}")
    )
    gc.freeze()  # so that collecting is quick
    before = asyncio.all_tasks()
    try:
        yield
        await eventually(lambda: asyncio.all_tasks() <= before)
        gc.collect()
        assert problems == []
    finally:
        gc.unfreeze()


@asynccontextmanager
async def fake_cluster(
    text: TextModel,
    *,
    prefill: int = 1,
    decode: int = 1,
    listed: bool = True,
    stranger: Callable[[WorkerRecord], str] = lambda record: "",
    strict_numerics: bool = False,
    hearing: Callable[[], float] = time.monotonic,
    **deadlines: float,
) -> AsyncIterator[FakeCluster]:
    """Runs the workers, lists and connects them; at the end proves that nothing is left, no task either."""
    chosen = replace(QUICK, **deadlines)
    metrics, registry, clock = RouterMetrics("test"), FakeRegistry(), Clock()
    index = PrefixIndex(None, "test", chosen, clock=clock)
    workers = Workers(
        registry, index, "router-0", chosen, hearing, metrics, stranger=stranger, strict_numerics=strict_numerics
    )
    pipeline = Pipeline(workers, text, metrics, chosen, time.monotonic)
    cluster = FakeCluster(workers, pipeline, registry, index)
    cluster.clock = clock
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(no_task_left())
        stack.push_async_callback(stop_all, cluster.fakes)
        stack.push_async_callback(workers.close)
        stack.push_async_callback(end, asyncio.create_task(workers.run()))
        for role, count in (("prefill", prefill), ("decode", decode)):
            for _ in range(count):
                await cluster.add(role)
        await asyncio.sleep(0)
        if listed:
            await cluster.show(*cluster.fakes)
        yield cluster
        await cluster.assert_nothing_left()


async def stop_all(fakes: Sequence[FakeWorker]) -> None:
    for fake in fakes:
        await fake.stop()
