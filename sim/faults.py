"""What goes wrong in a schedule: swarm testing, each schedule has some kinds of faults and not the others."""

import asyncio
from typing import TYPE_CHECKING

from sim.network import MessageFaults
from sim.schedule import DEADLINES
from sim.virtual_time import Node

if TYPE_CHECKING:
    from sim.world import World

KINDS = ("crash", "restart", "freeze", "partition", "messages", "redis", "forge", "stall", "engine")
WINDOW_S = 1.3  # in which requests come and are answered


class Faults:
    """Draws them, does them, and takes them all back."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._rng = rng = world.rng
        draw = rng.random()
        if draw < 0.1:
            self.kinds: list[str] = []
        elif draw < 0.18:
            self.kinds = ["redis"]
        else:
            count = rng.choice([1, 1, 2, 3, 4])
            self.kinds = [kind for kind in KINDS if kind in rng.sample(KINDS, count)]
        self.harmless = set(self.kinds) <= {"redis"}  # every request is answered at its first attempt
        self.until = 0.0
        for kind in self.kinds or ["none"]:
            world.counts[f"schedules with {kind}"] += 1

    def schedule(self) -> None:
        """From now on."""
        rng = self._rng
        for kind in self.kinds:
            if kind in ("messages", "forge", "stall", "engine"):
                getattr(self, f"_{kind}")()
                self.until = max(self.until, WINDOW_S)
                continue
            for _ in range(rng.choice([1, 1, 2])):
                getattr(self, f"_{kind}")(rng.random() * WINDOW_S)

    def _at(self, when: float, what, *args: object) -> None:  # type: ignore[no-untyped-def]
        self.until = max(self.until, when + 0.01)
        self._world.loop.after(when, what, *args)

    # Kinds.

    def _victim(self) -> str:
        world = self._world
        names = [shape.name for shape in world.shapes] * 2 + [f"router-{number}" for number in range(world.num_routers)]
        return self._rng.choice(names)

    def _crash(self, at: float) -> None:
        self._at(at, self.kill, self._victim(), self._rng.random() < 0.3)

    def _restart(self, at: float) -> None:
        name = self._victim()
        self._at(at, self.kill, name, self._rng.random() < 0.3)
        self._at(at + 0.05 + self._rng.random() * self._rng.choice([0.2, 3.0]), self.revive, name)

    def _freeze(self, at: float) -> None:
        length = self._rng.random() * self._rng.choice([0.5, DEADLINES.dead_s, 1.7 * DEADLINES.lease_s])
        self._at(at, self.freeze, self._victim(), length, self._rng.random() < 0.5)
        self.until = max(self.until, at + length + 0.01)

    def _partition(self, at: float) -> None:
        names = [shape.name for shape in self._world.shapes] + [f"router-{n}" for n in range(self._world.num_routers)]
        one = self._rng.choice(names)
        other = self._rng.choice([name for name in names if name != one])
        length = self._rng.random() * self._rng.choice([1.0, 6.0])
        for source, target in self._rng.choice([[(one, other)], [(one, other), (other, one)]]):
            self._at(at, self._block, source, target)
            self._at(at + length, self._world.network.unblock, source, target)

    def _messages(self) -> None:
        rng = self._rng

        def often(probability: float) -> float:
            return rng.choice([0.0, probability, probability / 4])

        self._world.network.faults = MessageFaults(
            lose=often(0.2), twice=often(0.2), slow=often(0.1), slow_s=rng.choice([0.1, 1.5]), cut=often(0.02)
        )

    def _redis(self, at: float) -> None:
        length = self._rng.random() * 4
        self._at(at, self._redis_becomes, self._rng.choice(["down", "frozen", "empty"]))
        if self._rng.random() < 0.5:
            self._at(at + length, self._redis_becomes, "empty")
        self._at(at + length, self._redis_becomes, "up")

    def _forge(self) -> None:
        self._world.network.forge = self._world.clients.forge
        self._world.network.forged_seen = self._world.clients.forged_seen

    def _stall(self) -> None:
        machine = self._world.parts.machine
        machine.stall = self._rng.choice([0.2, 0.6])
        machine.stall_s = self._rng.choice([0.5, 1.5]) * self._rng.choice(
            [DEADLINES.pull_progress_s, DEADLINES.lease_s]
        )

    def _engine(self) -> None:
        self._world.parts.engine_failures = self._rng.choice([0.01, 0.1])

    # Deeds.

    def kill(self, name: str, silent: bool) -> None:
        world, node = self._world, self._world.nodes[name]
        if node.dead:
            return
        world.note("kill", name, silent)
        world.counts["crashes"] += 1
        node.kill()
        world.network.killed(node, silent=silent)
        if name.startswith("router"):
            hears_late = silent or "messages" in self.kinds
            heard_s = 1.2 * DEADLINES.dead_s + 2.0 if hears_late else 0.1
            patience = heard_s + 3 * world.parts.machine.piece_s  # the last piece of a copy is waited for
            world.loop.after(patience, self._forgotten, world.routers[int(name[7:])].router_id)
            for asked in world.clients.asked:
                if name == f"router-{asked.router}" and asked.router_node is node and not asked.outcome:
                    world.clients.end_request(asked, "broken")

    def _forgotten(self, router_id: str) -> None:
        """Workers that have heard everything all the time have nothing of a dead router any more."""
        for worker in self._world.workers.values():
            heard = not (self._world.counts["partitions"] or worker.node.freezes or "stall" in self.kinds)
            attempts = [request for router, request in worker.service.relay_server._attempts if router == router_id]
            if heard and attempts:
                self._world.violate(f"{worker.shape.name} still has {attempts} of {router_id}, which is dead")

    def revive(self, name: str) -> None:
        world = self._world
        if not world.nodes[name].dead:
            return
        world.counts["restarts"] += 1
        if name.startswith("router"):
            world.loop.spawn(world.start_router(int(name[7:])))
        else:
            world.start_worker(next(shape for shape in world.shapes if shape.name == name))

    def freeze(self, name: str, length: float, timers_last: bool) -> None:
        world, node = self._world, self._world.nodes[name]
        if node.stopped:
            return
        world.note("freeze", name, length)
        world.counts["freezes"] += 1
        node.freeze()
        world.network.frozen(node)
        world.loop.after(length, self._thaw, node, timers_last)

    def _thaw(self, node: Node, timers_last: bool) -> None:
        if not node.dead:
            self._world.note("thaw", node.name)
            node.thaw(timers_last=timers_last)

    def _block(self, source: str, target: str) -> None:
        self._world.note("block", source, target)
        self._world.counts["partitions"] += 1
        self._world.network.block(source, target)

    def _redis_becomes(self, state: str) -> None:
        self._world.note("redis", state)
        self._world.counts["redis outages"] += state != "up"
        if state == "empty":
            self._world.redis.flush()
        else:
            self._world.redis.state = state

    async def heal(self) -> None:
        """All faults end; who is dead starts again."""
        world = self._world
        world.note("heal")
        world.redis.state = "up"
        world.network.faults = MessageFaults()
        world.network.forge = None
        world.parts.machine.stall = world.parts.engine_failures = 0.0
        for name, node in list(world.nodes.items()):
            if node.dead:
                self.revive(name)
        await asyncio.sleep(0.01)
