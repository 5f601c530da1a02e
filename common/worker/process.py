"""A worker process around its service: engine and step loop, gRPC, metrics, and its place in Redis."""

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from redis.asyncio import Redis

from common.awake_clock import AwakeClock
from common.block_hash import BLOCK_SIZE
from common.deadlines import Deadlines
from common.discovery.cache_events import CacheEventPublisher
from common.discovery.config import RedisConfig
from common.discovery.known_workers import KnownWorkers
from common.discovery.redis_access import prove_access
from common.discovery.redis_client import Outage, connect
from common.discovery.registry import Registry, WorkerRecord
from common.engine.batch import StepOutput
from common.engine.build import BuiltEngine, build_engine
from common.engine.config import EngineConfig
from common.engine.engine import Engine, EngineLoop
from common.engine.memory import proportional_bytes
from common.errors import EngineFailure, RedisUnreachable
from common.log import get_logger, log_event
from common.progress_bar import progress
from common.role import announce_ready, run_role, stop_on_signals
from common.rpc.channel import GrpcServer
from common.rpc.config import SecurityConfig
from common.rpc.security import Security
from common.settings import from_arguments
from common.tasks import end, watch
from common.version import VERSION
from common.worker.config import WorkerConfig, check_reachable, http_address
from common.worker.health import Health
from common.worker.metrics import WorkerMetrics, serve_worker_http

log = get_logger("worker")


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Who this worker is, to routers and to other workers."""

    role: str
    worker_id: str
    address: str  # host:port that others reach it at
    epoch: int
    fingerprint: str
    model_revision: str
    layout_id: str
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Worker:
    """What a service is given."""

    info: WorkerInfo
    built: BuiltEngine
    settings: WorkerConfig
    server: GrpcServer
    metrics: WorkerMetrics
    deadlines: Deadlines
    health: Health
    clock: Callable[[], float]
    awake: AwakeClock  # for what is expected of others in time
    others: KnownWorkers = field(default_factory=KnownWorkers)  # whom it may call

    @property
    def engine(self) -> Engine:
        return self.built.engine

    @property
    def calls_whom_it_knows(self) -> bool:
        """Whether the registry says whom it may call; with a key, holders prove themselves."""
        return self.info.role == "decode" and self.server.security.key is None


class Service(Protocol):
    """What the process needs of a service."""

    def register(self) -> None:
        """Adds its servicers to the gRPC server, which is bound but not started."""
        ...

    def on_output(self, output: StepOutput) -> None:
        """One step's results, on the event loop."""
        ...

    def measure(self) -> None:
        """Brings the gauges of its metrics up to date."""
        ...

    @property
    def idle(self) -> bool:
        """Whether it could stop now and nobody would miss anything."""
        ...

    async def close(self) -> None:
        """Gives up all it holds; the gRPC server has stopped."""
        ...


def run_worker(
    role: str,
    start_service: Callable[[Worker], Service],
    argv: Sequence[str] | None,
    *,
    max_num_batched_tokens: int,
    shared_pool: bool,
) -> int:
    """The main function of a worker role; returns the exit status.

    What can fail for a reason outside comes first, in the order of its cost: flags, Redis, port, model.
    """

    async def main(arguments: argparse.Namespace) -> int:
        settings = from_arguments(WorkerConfig, arguments)
        redis_settings = from_arguments(RedisConfig, arguments)
        deadlines = settings.deadlines()
        security = Security.load(from_arguments(SecurityConfig, arguments), serves=True)
        check_reachable(settings)
        async with AsyncExitStack() as stack:
            redis = await connect(redis_settings.redis_url, deadlines)
            stack.push_async_callback(redis.aclose)
            await prove_access(redis, redis_settings, deadlines, writes=True)
            server = GrpcServer(settings.host, settings.port, deadlines, security)
            server.bind()
            security.warn_if_open(settings.host)
            stack.push_async_callback(server.stop)
            with progress("loading weights") as show:
                built = await asyncio.to_thread(
                    build_engine,
                    from_arguments(EngineConfig, arguments),
                    max_num_batched_tokens=max_num_batched_tokens,
                    shared_pool=shared_pool,
                    clock=time.monotonic,
                    progress=show,
                )
            stack.callback(built.pool.close)
            worker = make_worker(role, built, server, settings, deadlines)
            service = start_service(worker)
            stop = stop_on_signals()
            async with running(worker, service, redis, redis_settings.redis_namespace, stop) as record:
                memory = {"weights": built.weights_bytes, "pool": built.pool.num_bytes, "pss": proportional_bytes()}
                log_event(log, logging.INFO, "memory", **{name: f"{size >> 20} MiB" for name, size in memory.items()})
                announce_ready(role, record.address, epoch=record.epoch, metrics=record.http_address, memory=memory)
                await stop.wait()
        return 0

    return run_role(role, (EngineConfig, WorkerConfig, RedisConfig, SecurityConfig), main, argv)


def make_worker(
    role: str, built: BuiltEngine, server: GrpcServer, settings: WorkerConfig, deadlines: Deadlines
) -> Worker:
    """A worker in a new epoch; its server is bound."""
    address = settings.advertise or server.address
    info = WorkerInfo(
        role=role,
        worker_id=settings.worker_id or f"{role}-{address}",
        address=address,
        epoch=secrets.randbits(63) + 1,
        fingerprint=built.fingerprint,
        model_revision=built.model_revision,
        layout_id=built.layout.layout_id,
        vocab_size=built.model.vocab_size,
    )
    return Worker(
        info=info,
        built=built,
        settings=settings,
        server=server,
        metrics=WorkerMetrics(built.name, role),
        deadlines=deadlines,
        health=Health(time.monotonic, deadlines.decode_token_s, built.token_s),
        clock=time.monotonic,
        awake=AwakeClock(),
    )


@asynccontextmanager
async def running(
    worker: Worker, service: Service, redis: Redis, namespace: str, stop: asyncio.Event
) -> AsyncIterator[WorkerRecord]:
    """The worker at work: steps its engine, answers calls, is announced. Leaving the context drains it first.

    If the step loop or another one dies, `stop` is set, and leaving the context raises EngineFailure.
    """
    info, built, settings, health = worker.info, worker.built, worker.settings, worker.health
    deadlines, metrics = worker.deadlines, worker.metrics
    registry = Registry(redis, namespace, deadlines, key=worker.server.security.key)
    publisher = CacheEventPublisher(
        redis, namespace, info.worker_id, info.epoch, worker.engine.cached_hashes, deadlines, registry.outage
    )
    deaths: list[tuple[str, BaseException]] = []

    def on_death(what: str, error: BaseException) -> None:
        deaths.append((what, error))
        health.dead = True
        stop.set()

    steps = EngineLoop(
        worker.engine,
        (
            metrics.on_step,
            lambda output: health.on_step(output.step_s, output.num_batched_tokens),
            lambda output: publisher.record(output.stored, output.removed),
            service.on_output,
        ),
        partial(on_death, "the step loop"),
        idle_s=deadlines.heartbeat_s,
        post=asyncio.get_running_loop().call_soon_threadsafe,
    )
    http = await serve_worker_http(
        settings.host,
        settings.metrics_port,
        metrics.registry,
        partial(_told, health.live, registry.outage),
        partial(_told, health.ready, registry.outage),
        service.measure,
        shutdown_s=deadlines.heartbeat_s,
    )
    record = WorkerRecord(
        role=info.role,
        worker_id=info.worker_id,
        address=info.address,
        http_address=http_address(settings.host, info.address, *http.addresses[0][:2]),
        epoch=info.epoch,
        fingerprint=info.fingerprint,
        model_revision=info.model_revision,
        served_model_name=built.name,
        max_model_len=worker.engine.config.max_model_len,
        max_num_seqs=worker.engine.config.max_num_seqs,
        num_blocks=built.pool.num_blocks,
        block_size=BLOCK_SIZE,
        layout_id=info.layout_id,
        tokenizer=built.tokenizer,
        pid=os.getpid(),
        version=VERSION,
        numerics=built.numerics,
    )
    service.register()
    await worker.server.start()
    steps.start()
    await worker.server.set_serving(True)
    with contextlib.suppress(RedisUnreachable):  # keep_announced goes on trying
        await registry.announce(record)
    loops = {
        "announcing": registry.keep_announced(record),
        "cache events": publisher.run(),
        "health": _watch(worker),
        "clock": worker.awake.run(),
    }
    if worker.calls_whom_it_knows:
        loops["other workers"] = worker.others.follow(registry, deadlines)
    tasks = [watch(asyncio.create_task(work), partial(on_death, f"the loop of {n}")) for n, work in loops.items()]
    try:
        yield record
    finally:
        health.draining = True
        with contextlib.suppress(RedisUnreachable):  # then the load tells the routers
            await registry.goodbye(record)
        await _drain(worker, service)
        await worker.server.stop()
        await service.close()
        await end(*tasks)
        await publisher.close()
        await asyncio.to_thread(steps.stop, deadlines.drain_s)
        await http.cleanup()
    if deaths:
        what, death = deaths[0]
        log_event(log, logging.CRITICAL, f"{what} died", exc_info=death)
        raise EngineFailure(f"{what} died: {death}") from death


def _told(ask: Callable[[], tuple[bool, str]], outage: Outage) -> tuple[bool, str]:
    """Without Redis a worker goes on for those who know it, so it is still ready; but it says so."""
    good, reason = ask()
    return good, outage.told_with(reason)


async def _watch(worker: Worker) -> None:
    """Looks every heartbeat whether steps get done; what it finds is told to whoever asks for the health."""
    while True:
        await asyncio.sleep(worker.deadlines.heartbeat_s)
        if worker.health.look(worker.engine.load()):
            stuck = worker.health.stuck
            log_event(log, logging.ERROR if stuck else logging.INFO, "stuck" if stuck else "steps get done again")
            await worker.server.set_serving(worker.health.ready()[0])


async def _drain(worker: Worker, service: Service) -> None:
    """Until what runs here has ended and what is held has been fetched, for drain_s at most.

    What is left then breaks off, and the routers go on with it elsewhere.
    """
    await worker.server.set_serving(False)
    deadline = worker.clock() + worker.deadlines.drain_s
    while not (service.idle or worker.health.dead) and worker.clock() < deadline:
        await asyncio.sleep(worker.deadlines.look_s)
    if not service.idle:
        log_event(log, logging.WARNING, "stopping with work left", seconds=worker.deadlines.drain_s)
