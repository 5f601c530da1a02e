"""One schedule: a cluster is drawn from a seed, asked, hurt, healed and looked over."""

import asyncio
import logging
import random
import traceback
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import kvtransfer.claim
import kvtransfer.lease
import kvtransfer.transports.grpc
from common.engine.batch import StepOutput
from common.engine.block_table import Reservation
from kvtransfer.transport import Ticket
from router.fleet.worker_client import AttemptStream
from sim import invariants
from sim.clients import SLACK_S, Clients
from sim.cluster import ROUTER_METRICS, Parts, SimRouter, SimWorker, WorkerShape
from sim.faults import Faults
from sim.network import Network
from sim.redis import SimRedis
from sim.schedule import DEADLINES, SimWorkload, draw_shapes
from sim.toy import ToyPool
from sim.virtual_time import NODE, Node, SimLoop, Stuck

QUIET_S = DEADLINES.lease_s + DEADLINES.dead_s + 2.0  # after the healing, everything is free


@dataclass
class Result:
    """What a schedule came to."""

    seed: int
    violation: str | None
    counts: Counter[str]
    digest: int
    trace: list[str]


class _Secrets:
    """Of the modules that draw ids by themselves."""

    def __init__(self, rng: random.Random) -> None:
        self.randbits = rng.getrandbits
        self.token_bytes = rng.randbytes


class World:
    """Everything of one schedule."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.violation: str | None = None
        self.trace: list[str] = []
        self.digest = 0
        self.tracing = trace
        self.loop = SimLoop()
        self.loop.set_exception_handler(self._on_exception)
        self.shapes = draw_shapes(self.rng)
        self.num_routers = self.rng.choice([1, 1, 1, 2])
        self.network = Network(self.loop, self.rng, DEADLINES, self.note if trace else None)
        self.redis = SimRedis(self.loop.time, self.rng, DEADLINES.rpc_s)
        self.parts = Parts(self.loop, self.rng, DEADLINES, self.network, self.redis)
        self.parts.checked = self._checked
        self.parts.admitting = self._admitting
        self.parts.released = self._released
        self.parts.stepped = self._stepped
        self.parts.machine.on_read = self._on_read
        self.parts.machine.on_write = self._on_write
        self.reads = invariants.Reads()
        self.workload = SimWorkload(self.rng)
        self.lives: list[SimWorker] = []  # all, the dead included
        self.workers: dict[str, SimWorker] = {}
        self.routers: dict[int, SimRouter] = {}
        self.nodes: dict[str, Node] = {}
        self.clients = Clients(self)
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        self.faults = Faults(self)
        self._lives = 0

    # Seen.

    def note(self, kind: str, *details: object) -> None:
        if not self.tracing:
            return
        node = NODE.get()
        line = f"{self.loop.time():9.4f} {node.name if node else '-':10} {kind} {' '.join(map(str, details))}"
        self.digest = zlib.crc32(line.encode(), self.digest)
        self.trace.append(line)

    def violate(self, problem: str | None) -> None:
        if problem is not None and self.violation is None:
            self.note("VIOLATION", problem)
            self.violation = f"at {self.loop.time():.3f} s: {problem}"
            self.loop.stop()

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        text = "".join(traceback.format_exception(error)) if error is not None else ""
        self.violate(f"unhandled: {context['message']} {text}")

    def _checked(self, worker: SimWorker, moment: str) -> None:
        if problem := invariants.block_accounts(worker):
            self.violate(f"{worker.shape.name}, {moment} of a step: {problem}")

    def _admitting(self, worker: SimWorker, reservation: Reservation) -> None:
        self.counts["hand-overs"] += 1
        self.counts["prefix hits"] += reservation.num_cached_blocks > 0
        self.violate(invariants.admitted_kv(worker, reservation))

    def _released(self, worker: SimWorker, ticket: tuple[bytes, int, int], held: bool) -> None:
        self.counts["releases"] += held
        self.counts["refused releases"] += not held
        self.violate(self.reads.released(worker, ticket, held))

    def _stepped(self, worker: SimWorker, output: StepOutput) -> None:
        self.counts["steps"] += 1
        self.counts["preemptions"] += output.num_preemptions
        self.counts["failed steps"] += bool(output.failed)
        if worker.shape.role == "decode":
            self.counts["waits for blocks"] += worker.service.admission.num_waiting > 0

    def _on_read(self, ticket: Ticket, memory: ToyPool, block: int) -> None:
        self.reads.note(self.lives, ticket, memory, block)

    def _on_write(self, memory: Any, block: int) -> None:
        self.violate(invariants.write_is_covered(self.lives, memory, block))

    # The cluster.

    def node(self, name: str) -> Node:
        node = self.nodes[name] = Node(self.loop, name)
        return node

    def start_worker(self, shape: WorkerShape) -> None:
        async def boot() -> None:
            worker = SimWorker(self.parts, node, shape)
            self.lives.append(worker)
            self.workers[shape.name] = worker
            await worker.run()

        node = self.node(shape.name)
        self.note("start", shape.name)
        self.tasks[shape.name] = node.spawn(boot())

    async def start_router(self, number: int) -> None:
        async def boot() -> None:
            self.routers[number] = router = SimRouter(self.parts, node, f"{name}.{self._lives}")
            await router.workers.settle()

        name = f"router-{number}"
        self._lives += 1
        node = self.node(name)
        self.note("start", name)
        await node.spawn(boot())

    # The course of things.

    async def _live(self) -> None:
        for shape in self.shapes:
            self.start_worker(shape)
        await asyncio.sleep(0.02 + 0.98 * self.rng.random())  # so heartbeats of both sides come in any order
        for number in range(self.num_routers):
            await self.start_router(number)
        for _ in range(self.rng.choice([1, 2, 3, 4, 5])):
            asked = self.workload.draw(routers=self.num_routers)
            self.clients.asked.append(asked)
            self.loop.after(asked.at, self.clients.ask, asked)
        self.faults.schedule()
        await asyncio.sleep(max(1.0, self.faults.until))
        await self.faults.heal()
        healed_at = self.loop.time()
        while not all(asked.outcome for asked in self.clients.asked):
            if self.loop.time() > healed_at + DEADLINES.request_s + SLACK_S:
                self.violate("a request has no end")
            await asyncio.sleep(0.1)
        await self._until_clean(max(self.loop.time(), healed_at) + QUIET_S)
        await self._ask_again()
        await self._until_clean(self.loop.time() + QUIET_S)

    async def _until_clean(self, deadline: float) -> None:
        while left := self.leftovers():
            if self.loop.time() > deadline:
                self.violate(f"left behind: {'; '.join(left)}")
            await asyncio.sleep(0.1)

    async def _ask_again(self) -> None:
        """After all that, everybody answers."""
        until = self.loop.time() + QUIET_S  # a router that is new waits for no pool that it has never seen
        while not all(router.workers.ready()[0] for router in self.routers.values()) and self.loop.time() < until:
            await asyncio.sleep(0.05)
        again = [self.workload.draw(routers=1, plain=True) for _ in self.routers]
        for number, asked in enumerate(again):
            asked.router = number
            self.clients.asked.append(asked)
            self.clients.ask(asked)
        while not all(asked.outcome for asked in again):
            await asyncio.sleep(0.05)
        for asked in again:
            if asked.outcome != "finished":
                self.violate(f"{asked.request.request_id}, asked after the healing, ended with {asked.outcome}")

    def leftovers(self) -> list[str]:
        parts = [(name, worker.leftovers()) for name, worker in self.workers.items()]
        parts += [(f"router-{number}", router.leftovers()) for number, router in self.routers.items()]
        return [f"{name}: {count} {what}" for name, counts in parts for what, count in counts.items() if count]

    def run(self) -> Result:
        """The whole schedule. The same seed gives the same one."""
        secrets: Any = _Secrets(self.rng)
        handler = _LogHandler(self)
        logger = logging.getLogger("kvrelay")
        before = logger.level, logger.propagate
        logger.addHandler(handler)
        logger.setLevel(logging.INFO if self.tracing else logging.ERROR)
        logger.propagate = False
        try:
            with (
                mock.patch.object(kvtransfer.claim, "secrets", secrets),
                mock.patch.object(kvtransfer.lease, "secrets", secrets),
                mock.patch.object(kvtransfer.transports.grpc, "secrets", secrets),
                mock.patch.object(ROUTER_METRICS, "on_resume", self.clients.resumed),
                mock.patch.object(kvtransfer.transports.grpc, "FRAME_BYTES", self.parts.machine.frame_bytes),
                mock.patch.object(AttemptStream, "next", self.clients.watched(AttemptStream.next)),
            ):
                self._run()
        finally:
            logger.removeHandler(handler)
            logger.level, logger.propagate = before
        self.counts["pulls over gRPC"] += self.parts.machine.pulls_over_grpc
        self.counts["aborted forks"] += self.parts.aborted_forks
        self.counts["copies cut off"] += self.parts.machine.cut_off
        for worker in self.lives:
            if worker.shape.role == "prefill":
                self.counts["expired leases"] += worker.leases.num_expired
                if self.faults.harmless and worker.leases.num_expired:
                    self.violation = self.violation or "a lease ran out, without a fault"
        return Result(self.seed, self.violation, self.counts, self.digest, self.trace)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self.loop.spawn(self._live()))
        except Stuck as error:
            self.violate(f"stuck: {error}")
        except RuntimeError:  # stopped
            if self.violation is None:
                raise
        finally:
            self.counts["callbacks"] += self.loop.callbacks
            self.counts["seconds"] += round(self.loop.time())
            digest, violation = self.digest, self.violation
            self.tracing = False
            self.violation = self.violation or "none"  # what happens from here on is no finding
            self.network.close()
            self.redis.state = "down"
            self.loop.end()
            asyncio.set_event_loop(None)
            self.digest, self.violation = digest, violation


class _LogHandler(logging.Handler):
    """Logs are part of the trace; an error in them is a defect."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        values = " ".join(f"{key}={value}" for key, value in getattr(record, "values", {}).items())
        self._world.note("log", record.getMessage(), values)
        if record.levelno >= logging.ERROR:
            text = self.format(record) if record.exc_info else values
            self._world.violate(f"logged: {record.getMessage()} {text}")


def run_seed(seed: int, *, trace: bool = False) -> Result:
    """One schedule in a fresh world."""
    return World(seed, trace=trace).run()
