"""A whole cluster in one process: real engines, gRPC, shared memory and Redis, and no HTTP; for tests of the split."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import decode_svc.__main__
import prefill_svc.__main__
from common.deadlines import Deadlines
from common.discovery.redis_client import connect
from common.discovery.registry import Registry
from common.engine.build import build_engine
from common.engine.config import EngineConfig
from common.rpc.channel import GrpcServer, channel_opener
from common.rpc.security import OPEN, Security
from common.sampling import SamplingParams
from common.settings import Bytes
from common.tasks import end
from common.text.text_model import TextModel
from common.worker.config import WorkerConfig
from common.worker.process import Worker, make_worker, running
from decode_svc.service import DecodeService
from prefill_svc.service import PrefillService
from router.fleet.prefix_index import PrefixIndex
from router.fleet.workers import Workers
from router.metrics import RouterMetrics
from router.pipeline.generation import Delta, Generation, GenerationRequest, Report
from router.pipeline.pipeline import Pipeline

START = {"prefill": prefill_svc.__main__.start, "decode": decode_svc.__main__.start}


@dataclass
class LocalWorker:
    worker: Worker
    service: Any
    stop: asyncio.Event  # its step loop died
    life: AsyncExitStack


Start = Callable[..., Awaitable[LocalWorker]]


@dataclass
class Answered:
    """What one request came to: tokens and text of each answer, and the report."""

    tokens: list[list[int]]
    texts: list[str]
    reasons: list[str | None]
    deltas: list[Delta]
    report: Report


class LocalCluster:
    def __init__(self, workers: Workers, pipeline: Pipeline, local: list[LocalWorker], start: Start) -> None:
        self.workers = workers
        self.pipeline = pipeline
        self.local = local
        self._start = start

    async def start(self, role: str, worker_id: str, *, port: int = 0, model: Path | None = None) -> LocalWorker:
        """One more worker, which the router need not know yet."""
        one = await self._start(role, worker_id, port=port, model=model)
        self.local.append(one)
        return one

    async def stop(self, one: LocalWorker) -> None:
        """Ends a worker as SIGTERM does."""
        self.local.remove(one)
        await one.life.aclose()

    @property
    def prefill(self) -> list[PrefillService]:
        return [one.service for one in self.local if one.worker.info.role == "prefill"]

    @property
    def decode(self) -> list[DecodeService]:
        return [one.service for one in self.local if one.worker.info.role == "decode"]

    async def answer(self, prompt_ids: Sequence[int], params: SamplingParams | None = None, **request: Any) -> Answered:
        """Runs one request to its end."""
        asked = GenerationRequest(secrets.token_hex(8), tuple(prompt_ids), params or SamplingParams(), **request)
        generation = Generation(asked)
        deltas = [delta async for delta in self.pipeline.generate(generation)]
        answers = range(asked.n)
        return Answered(
            tokens=[[t.token_id for d in deltas if d.index == i for t in d.tokens] for i in answers],
            texts=["".join(d.text for d in deltas if d.index == i) for i in answers],
            reasons=[
                next((d.finish_reason for d in deltas if d.index == i and d.finish_reason), None) for i in answers
            ],
            deltas=deltas,
            report=generation.report,
        )

    def forget_prefixes(self, role: str) -> None:
        """Empties the prefix caches of a role."""
        for one in self.local:
            if one.worker.info.role == role:
                pool = one.worker.engine._scheduler.pool
                pool.free(pool.allocate(pool.num_free) or [])

    async def wait_ready(self, timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            while len(self.workers.usable("prefill")) + len(self.workers.usable("decode")) < len(self.local):
                await asyncio.sleep(0.01)

    async def assert_all_free(self, timeout_s: float = 5.0) -> None:
        """Every block free, every lease gone, every count zero; what is on its way gets a moment to end."""
        problems: list[str] = []
        try:
            async with asyncio.timeout(timeout_s):
                while problems := self._leftovers():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError("; ".join(problems)) from None

    def _leftovers(self) -> list[str]:
        counts = {
            "router: requests": self.pipeline._running,
            "router: requests at the gate": self.pipeline._gate.num_waiting,
            "router: seats given out": int(self.pipeline._gate.in_use.seats),
            "router: blocks given out": int(self.pipeline._gate.in_use.blocks),
            "router: requests that wait": self.pipeline._waiting,
            "router: open expectations": len(self.workers._index._open),
        }
        for one in self.local:
            name, load = one.worker.info.worker_id, one.worker.engine.load()
            counts[f"{name}: running"] = load.running
            counts[f"{name}: waiting"] = load.waiting
            counts[f"{name}: reserved blocks"] = load.reserved_blocks
            counts[f"{name}: used blocks"] = load.total_blocks - load.free_blocks
            counts[f"{name}: reserved places"] = one.worker.engine._scheduler.num_reserved_forks
            counts[f"{name}: attempts"] = one.service.relay_server.num_attempts
            counts[f"{name}: attempts in the service"] = len(one.service._attempts)
            if isinstance(one.service, PrefillService):
                counts[f"{name}: leases"] = one.service.leases.num_held
            else:
                counts[f"{name}: claims"] = one.service._reader.num_claims
                counts[f"{name}: queued"] = one.service.admission.num_waiting
        for client in self.workers._clients.values():
            counts[f"router: attempts on {client.record.worker_id}"] = client.in_flight
            counts[f"router: tokens charged to {client.record.worker_id}"] = client.charged_tokens
        return [f"{what}: {count}" for what, count in counts.items() if count]


@asynccontextmanager
async def local_cluster(
    model: Path,
    redis_url: str,
    *,
    prefill: int = 1,
    decode: int = 1,
    dtype: str = "float32",
    max_num_seqs: int = 16,
    prefill_tokens: int = 64,
    decode_tokens: int = 32,
    kv_cache_memory: int = 2**19,
    max_model_len: int = 256,
    deadlines: Deadlines | None = None,
    transport: str = "auto",
    security: Security = OPEN,
) -> AsyncIterator[LocalCluster]:
    """A cluster whose chunks and pools are small, so that borders are met and memory gets short."""
    deadlines = deadlines or Deadlines()
    engine = EngineConfig(
        model=str(model),
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_cache_memory=Bytes(kv_cache_memory),
        threads=1,
    )
    namespace = f"test-{secrets.token_hex(4)}"
    async with AsyncExitStack() as stack:
        redis = await connect(redis_url, deadlines)
        stack.push_async_callback(redis.aclose)
        budgets = {"prefill": prefill_tokens, "decode": decode_tokens}

        async def start(role: str, worker_id: str, *, port: int = 0, model: Path | None = None) -> LocalWorker:
            settings = replace(WorkerConfig(), worker_id=worker_id, transport=transport)
            life = AsyncExitStack()
            stack.push_async_callback(life.aclose)
            server = GrpcServer(settings.host, port, deadlines, security)
            server.bind()
            life.push_async_callback(server.stop)
            built = build_engine(
                replace(engine, model=str(model or engine.model), max_num_batched_tokens=budgets[role]),
                max_num_batched_tokens=budgets[role],
                shared_pool=role == "prefill",
                clock=time.monotonic,
            )
            life.callback(built.pool.close)
            worker = make_worker(role, built, server, settings, deadlines)
            one = LocalWorker(worker, START[role](worker), asyncio.Event(), life)
            await life.enter_async_context(running(worker, one.service, redis, namespace, one.stop))
            return one

        names = [("prefill", index) for index in range(prefill)] + [("decode", index) for index in range(decode)]
        local = [await start(role, f"{role}-{index}") for role, index in names]
        index_ = PrefixIndex(redis, namespace, deadlines)
        metrics = RouterMetrics("test")
        registry = Registry(redis, namespace, deadlines, key=security.key)
        opener = channel_opener(security)
        workers = Workers(registry, index_, "router-0", deadlines, time.monotonic, metrics, opener)
        stack.push_async_callback(workers.close)
        tasks = [asyncio.create_task(workers.run()), asyncio.create_task(index_.run())]
        pipeline = Pipeline(workers, TextModel.load(model), metrics, deadlines, time.monotonic)
        cluster = LocalCluster(workers, pipeline, local, start)
        try:
            await cluster.wait_ready()
            yield cluster
        finally:
            await end(*tasks)
