"""The clients of a world, what they see, and the lies that are told to routers."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from common.errors import KVRelayError
from common.rpc.pb import decode_pb2
from router.fleet.worker_client import AttemptEvent, AttemptStream
from sim import invariants
from sim.cluster import SimRouter
from sim.network import Link
from sim.schedule import DEADLINES, Asked
from sim.toy import VOCAB
from sim.virtual_time import Node

if TYPE_CHECKING:
    from sim.world import World

SLACK_S = 2.5
NEVER = ("internal", "invalid_request", "not_found", "cancelled", "stale_attempt", "fingerprint_mismatch")


class Clients:
    """Asks, leaves, and checks what comes."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.asked: list[Asked] = []

    def ask(self, asked: Asked) -> None:
        """In the router that is at the client's address now; a refused connection is a broken one."""
        router = self._world.routers.get(asked.router)
        self._world.note("ask", asked.request.request_id, asked.router)
        if router is None or router.node.dead:
            asked.outcome = "broken"
            return
        asked.router_node = router.node
        task = router.node.spawn(self._client(router, asked))
        self._world.loop.after(DEADLINES.request_s + SLACK_S, self._overdue, asked, router.node, router.node.freezes)
        if asked.leaves_after is not None:
            self._world.loop.after(asked.leaves_after, self._leave, asked, task, router)

    def _leave(self, asked: Asked, task: asyncio.Task[None], router: SimRouter) -> None:
        if not asked.outcome and not router.node.dead:
            self._world.note("leave", asked.request.request_id)
            self._world.counts["clients that left"] += 1
            task.cancel()
            task.add_done_callback(lambda _: self._left(asked))

    def _left(self, asked: Asked) -> None:
        """Even before the router had seen it."""
        if not asked.outcome:
            self.end_request(asked, "left")

    def _overdue(self, asked: Asked, node: Node, freezes: int) -> None:
        if not asked.outcome and node.freezes == freezes:
            self._world.violate(f"{asked.request.request_id} has no end after {DEADLINES.request_s + SLACK_S} s")

    async def _client(self, router: SimRouter, asked: Asked) -> None:
        outcome = "defect"
        try:
            async with aclosing(router.pipeline.generate(asked.generation)) as deltas:
                async for delta in deltas:
                    self._world.violate(invariants.delta_fits(asked, delta))
            outcome = "finished"
            self._world.violate(invariants.ended_well(asked))
        except KVRelayError as error:
            outcome = error.code
            if error.code in NEVER:
                self._world.violate(f"{asked.request.request_id} failed with {error.code}: {error.message}")
        except asyncio.CancelledError:
            outcome = "left"
            raise
        except Exception as error:
            self._world.violate(f"{asked.request.request_id} failed with {error!r}, which is no KVRelayError")
        finally:
            self.end_request(asked, outcome)

    def end_request(self, asked: Asked, outcome: str) -> None:
        asked.outcome = outcome
        attempts = asked.generation.report.attempts
        self._world.note("ended", asked.request.request_id, outcome, attempts)
        self._world.counts[f"outcome {outcome}"] += 1
        self._world.counts["resumes"] += max(0, attempts - 1)
        if outcome == "token_mismatch" and not asked.forged:
            self._world.violate(f"{asked.request.request_id} ended with a mismatch that nobody forged")
        if outcome == "finished" and asked.must_mismatch:
            self._world.violate(f"{asked.request.request_id} went on over a token that came twice with different ids")
        refused = outcome == "overloaded" and not any(asked.tokens)
        if self._world.faults.harmless and outcome not in ("left", "finished") and not refused:
            self._world.violate(f"{asked.request.request_id} ended with {outcome}, without a fault")

    def resumed(self, code: str) -> None:
        """A router submits a request again. Overloaded: a worker has refused it before any work."""
        self._world.counts[f"resumes after {code}"] += 1
        if self._world.faults.harmless and code != "overloaded":
            self._world.violate(f"a request had to be resumed after {code}, without a fault")

    def watched(self, get_next: Callable[..., Any]) -> Callable[..., Any]:
        """An attempt is told of its own events only."""

        async def next_event(stream: AttemptStream, patience_s: float) -> AttemptEvent:
            event: AttemptEvent = await get_next(stream, patience_s)
            key = (event.key.request_id, event.key.attempt)
            self._world.counts["events"] += 1
            if stream.client._attempts.get(key) is not stream:
                self._world.violate(f"an attempt was given an event of {key}")
            return event

        return next_event

    # Equivocation.

    def forge(self, link: Link, data: bytes) -> bytes | None:
        """A copy of a decode worker's step with another id for its first token."""
        if link.server.node.name[0] != "d" or self._world.rng.random() > 0.2:
            return None
        event = decode_pb2.DecodeEvent.FromString(data)
        if event.WhichOneof("event") != "step":
            return None
        token = event.step.sequences[0].tokens[0]
        token.token_id = (token.token_id + 1 + self._world.rng.randrange(VOCAB - 1)) % VOCAB
        return event.SerializeToString()

    def forged_seen(self, link: Link, data: bytes) -> None:
        """The router has it. Whether its answer was open: it knows the attempt, and more tokens were to come."""
        tokens = decode_pb2.DecodeEvent.FromString(data).step.sequences[0]
        token, key = tokens.tokens[0], (tokens.key.request_id, tokens.key.attempt)
        number = key[0].partition(".")[0]
        for asked in self.asked:
            if asked.request.request_id == number:
                asked.forged = True
                open_there = any(
                    router.node is link.client and key in client._attempts
                    for router in self._world.routers.values()
                    for client in router.workers._clients.values()
                )
                if open_there and token.index < len(asked.expected[token.fork].token_ids) - 1:
                    self._world.counts["forged tokens seen"] += 1
                    asked.must_mismatch = True
