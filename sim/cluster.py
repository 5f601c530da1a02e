"""Routers and workers as their __main__ modules put them together, on simulated nodes."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from common.awake_clock import AwakeClock
from common.block_hash import BLOCK_SIZE
from common.deadlines import Deadlines
from common.discovery.registry import Registry, WorkerRecord
from common.engine.batch import Batch, StepOutput
from common.engine.block_pool import BlockPool
from common.engine.block_table import Reservation
from common.engine.engine import Engine
from common.engine.limits import SchedulerConfig
from common.engine.scheduler import Scheduler
from common.errors import RedisUnreachable
from common.layout import KVLayout
from common.text.detokenize import Detokenizer
from common.text.token_pieces import Piece
from common.worker.config import WorkerConfig
from common.worker.health import Health
from common.worker.metrics import WorkerMetrics
from common.worker.process import Worker, WorkerInfo
from decode_svc.service import DecodeService
from kvtransfer.holder import KVHolder
from kvtransfer.lease import LeaseTable
from kvtransfer.reader import KVReader
from kvtransfer.transport import Ticket, holders
from prefill_svc.service import PrefillService
from router.fleet.prefix_index import PrefixIndex
from router.fleet.workers import Workers
from router.metrics import RouterMetrics
from router.pipeline.pipeline import Pipeline
from sim.client_channel import SimChannel
from sim.grpc_server import SimServer
from sim.kv_transport import Machine
from sim.network import Network
from sim.redis import SimRedis
from sim.toy import LETTERS, VOCAB, ToyPool, ToyRunner, sample
from sim.virtual_time import NODE, Node, SimLoop

LAYOUT = KVLayout(1, 1, 1, "float32")
METRICS = {"prefill": WorkerMetrics("sim", "prefill"), "decode": WorkerMetrics("sim", "decode")}
ROUTER_METRICS = RouterMetrics("sim")


@dataclass(frozen=True)
class WorkerShape:
    role: str
    name: str
    address: str
    num_blocks: int
    config: SchedulerConfig
    step_s: float


class Parts:
    """What all nodes share: the outside world, and who watches."""

    def __init__(self, loop: SimLoop, rng: Any, deadlines: Deadlines, network: Network, redis: SimRedis) -> None:
        self.loop = loop
        self.rng = rng
        self.deadlines = deadlines
        self.network = network
        self.redis = redis
        self.machine = Machine(loop, rng)
        self.engine_failures = 0.0  # probability, of each step
        self.aborted_forks = 0
        self.checked: Callable[[SimWorker, str], None] = lambda worker, moment: None
        self.admitting: Callable[[SimWorker, Reservation], None] = lambda worker, reservation: None
        self.released: Callable[[SimWorker, tuple[bytes, int, int], bool], None] = lambda worker, ticket, held: None
        self.stepped: Callable[[SimWorker, StepOutput], None] = lambda worker, output: None

    def channel(self, address: str, deadlines: Deadlines) -> SimChannel:
        """An OpenChannel, for the node that calls."""
        node = NODE.get()
        assert node is not None
        return SimChannel(self.network, node, address)


class WatchedPool(BlockPool):
    """Counts how often each block has become free."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.times_freed = [0] * num_blocks

    def free(self, block_ids: Sequence[int]) -> None:
        super().free(block_ids)
        for block in block_ids:
            if self._references[block] == 0:
                self.times_freed[block] += 1


class WatchedEngine(Engine):
    """Knows the reservations that are open."""

    worker: "SimWorker"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reservations: dict[int, Reservation] = {}
        self._changed = _Wake(self._lock)

    def reserve(self, forks: Any) -> Reservation | None:
        reservation = super().reserve(forks)
        if reservation is not None:
            self.reservations[id(reservation)] = reservation
        return reservation

    def admit(self, reservation: Reservation) -> None:
        self.worker.parts.admitting(self.worker, reservation)
        super().admit(reservation)
        del self.reservations[id(reservation)]

    def cancel(self, reservation: Reservation) -> None:
        super().cancel(reservation)
        del self.reservations[id(reservation)]


class WatchedLeases(LeaseTable):
    """Tells of each release before the blocks are free, and again with its answer."""

    worker: "SimWorker"

    def check_reader(self, handle_id: bytes, epoch: int, reader_id: int, block_ids: Sequence[int] = ()) -> None:
        super().check_reader(handle_id, epoch, reader_id, block_ids)
        self.worker.parts.machine.last_ticket = Ticket(handle_id, epoch, reader_id)

    def release(self, handle_id: bytes, epoch: int, reader_id: int) -> bool:
        ticket = (handle_id, epoch, reader_id)
        self.worker.freed_before = list(self.worker.blocks.times_freed)
        held = super().release(handle_id, epoch, reader_id)
        self.worker.parts.released(self.worker, ticket, held)
        return held


class _Wake(threading.Condition):
    """Wakes a task instead of a thread."""

    def __init__(self, lock: Any) -> None:
        super().__init__(lock)
        self.event = asyncio.Event()

    def notify(self, n: int = 1) -> None:
        self.event.set()

    def wait(self, timeout: float | None = None) -> bool:
        return False


class SimWorker:
    """One life of a worker. To be made in its node."""

    def __init__(self, parts: Parts, node: Node, shape: WorkerShape) -> None:
        self.parts = parts
        self.node = node
        self.shape = shape
        loop, deadlines = parts.loop, parts.deadlines
        epoch = parts.rng.getrandbits(63) + 1
        self.blocks = WatchedPool(shape.num_blocks)
        self.freed_before: list[int] = []
        self.memory = ToyPool(shape.num_blocks, epoch)
        self.runner = ToyRunner(self.memory)
        self.scheduler = Scheduler(shape.config, self.blocks)
        self.engine = WatchedEngine(self.scheduler, self.runner, sample, loop.time)
        self.engine.worker = self
        self.batch: Batch | None = None
        self.undelivered: list[StepOutput] = []
        self.server = SimServer(parts.network, node, shape.address)
        self.info = WorkerInfo(shape.role, shape.name, shape.address, epoch, "sim", "sim", LAYOUT.layout_id, VOCAB)
        worker = Worker(
            info=self.info,
            built=cast(Any, SimpleNamespace(engine=self.engine, pool=self.memory, layout=LAYOUT)),
            settings=WorkerConfig(),
            server=cast(Any, SimpleNamespace(server=self.server)),
            metrics=METRICS[shape.role],
            deadlines=deadlines,
            health=Health(loop.time, deadlines.decode_token_s),
            clock=loop.time,
            awake=AwakeClock(loop.time),
        )
        self.service: Any = self._prefill(worker) if shape.role == "prefill" else self._decode(worker)
        self._abort_forks = self.service.relay_server._abort_forks
        self.service.relay_server._abort_forks = self._count_aborts
        self.record = WorkerRecord(
            shape.role, shape.name, shape.address, shape.address, epoch, "sim", "sim", "sim",
            shape.config.max_model_len, shape.num_blocks, BLOCK_SIZE, LAYOUT.layout_id, 1, "0",
        )  # fmt: skip

    def _count_aborts(self, key: str, forks: list[int]) -> bool:
        self.parts.aborted_forks += len(forks)
        return bool(self._abort_forks(key, forks))

    def _prefill(self, worker: Worker) -> PrefillService:
        self.leases = WatchedLeases(worker.clock, worker.deadlines, self.info.epoch, self.engine.free_blocks)
        self.leases.worker = self
        holder = KVHolder(
            self.leases,
            fingerprint=self.info.fingerprint,
            layout_id=self.info.layout_id,
            transports=holders(self.parts.machine.transports(), cast(Any, self.memory)),
            deadlines=worker.deadlines,
            clock=worker.clock,
        )
        return PrefillService(worker, self.leases, holder)

    def _decode(self, worker: Worker) -> DecodeService:
        reader = KVReader(
            cast(Any, self.memory),
            LAYOUT,
            self.info.fingerprint,
            worker.deadlines,
            worker.clock,
            transports=self.parts.machine.transports(),
            channel=cast(Any, self.parts.channel),
        )
        return DecodeService(worker, reader)

    async def run(self) -> None:
        registry = Registry(cast(Any, self.parts.redis), "sim", self.parts.deadlines)
        self.service.register()
        await self.server.start()
        self.steps = asyncio.create_task(self._step())
        with suppress(RedisUnreachable):
            await registry.announce(self.record)
        await registry.keep_announced(self.record)

    async def _step(self) -> None:
        """The engine loop's thread, with virtual time between the two halves of a step."""
        wake = cast(_Wake, self.engine._changed).event
        parts, rng = self.parts, self.parts.rng
        while True:
            begun = self.engine.begin()
            if begun is None:
                wake.clear()
                await wake.wait()
                continue
            self.batch = begun[0]
            parts.checked(self, "begin")
            draw = rng.random()
            if draw < 0.5:
                self.runner.compute(self.batch)
            await asyncio.sleep(self.shape.step_s * (0.5 + draw) + 0.0002 * self.batch.num_tokens)
            if parts.engine_failures and rng.random() < parts.engine_failures:
                self.runner.fail()
            output = self.engine.finish(*begun)
            self.batch = None
            self.undelivered.append(output)
            parts.checked(self, "finish")
            parts.loop.call_soon_threadsafe(self._on_output, output)

    def _on_output(self, output: StepOutput) -> None:
        self.undelivered.remove(output)
        self.service.on_output(output)
        self.parts.stepped(self, output)
        self.parts.checked(self, "output")

    def leftovers(self) -> dict[str, int]:
        """What is held, reserved, open or running."""
        load, service = self.engine.load(), self.service
        counts = {
            "running": load.running,
            "waiting": load.waiting,
            "reserved blocks": load.reserved_blocks,
            "used blocks": load.total_blocks - load.free_blocks,
            "reserved places": self.scheduler.num_reserved_forks,
            "attempts": service.relay_server.num_attempts,
            "attempts in the service": len(service._attempts),
        }
        if self.shape.role == "prefill":
            counts["leases"] = service.leases.num_held
        else:
            counts["claims"] = service._reader.num_claims
            counts["queued"] = service.admission.num_waiting
        return counts


class ToyPieces:
    streams, errors, merges = (), "replace", False

    def get(self, token_id: int) -> Piece:
        return Piece(LETTERS[token_id], LETTERS[token_id])


class ToyText:
    """A TextModel's part in a pipeline."""

    def detokenizer(self, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        return Detokenizer(ToyPieces())


class SimRouter:
    """One life of a router. To be made in its node."""

    def __init__(self, parts: Parts, node: Node, router_id: str) -> None:
        self.node = node
        self.router_id = router_id
        loop, deadlines, redis = parts.loop, parts.deadlines, cast(Any, parts.redis)
        registry = Registry(redis, "sim", deadlines)
        self.index = PrefixIndex(redis, "sim", deadlines, registry.outage, clock=loop.time)
        self.workers = Workers(
            registry,
            self.index,
            router_id,
            deadlines,
            loop.time,
            ROUTER_METRICS,
            channel=cast(Any, parts.channel),
        )
        self.pipeline = Pipeline(self.workers, cast(Any, ToyText()), ROUTER_METRICS, deadlines, loop.time)
        self.task = asyncio.create_task(self.workers.run())

    def leftovers(self) -> dict[str, int]:
        counts = {"requests": self.pipeline._running, "open expectations": len(self.index._open)}
        for client in self.workers._clients.values():
            counts[f"attempts on {client.record.worker_id}"] = client.in_flight
            counts[f"tokens charged to {client.record.worker_id}"] = client.charged_tokens
            counts[f"releases to {client.record.worker_id}"] = len(client._releases)
        return counts
