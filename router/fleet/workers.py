"""All workers this router knows: who there is, who is fit, and whom a request gets.

Redis only introduces workers. One leaves by its goodbye, by a new epoch at its address, or when it can't be
reached and isn't listed any more.
"""

import asyncio
import logging
import math
import random
from collections.abc import Callable, Collection
from dataclasses import replace

from common.deadlines import Deadlines
from common.discovery.registry import Registry, WorkerRecord
from common.errors import ContextLengthExceeded, HandoverError, NoWorker
from common.log import get_logger, log_event
from common.rpc.channel import OpenChannel, open_channel
from router.fleet.hashed_tokens import HashedTokens
from router.fleet.policy import Candidate, goes_unsplit, pick_decode, pick_prefill
from router.fleet.prefix_index import Expectation, PrefixIndex
from router.fleet.room import Room
from router.fleet.worker_client import WorkerClient
from router.metrics import RouterMetrics

log = get_logger("workers")


class Workers:
    """Lives on one event loop."""

    def __init__(
        self,
        registry: Registry,
        index: PrefixIndex,
        router_id: str,
        deadlines: Deadlines,
        clock: Callable[[], float],
        metrics: RouterMetrics,
        channel: OpenChannel = open_channel,
        max_unsplit_tokens: int = 0,
        stranger: Callable[[WorkerRecord], str] = lambda record: "",
        strict_numerics: bool = False,
    ) -> None:
        """`stranger` says why a worker is none of this router's, in a word for the log; empty: it is one."""
        self._registry = registry
        self._index = index
        self._router_id = router_id
        self._deadlines = deadlines
        self._clock = clock
        self._metrics = metrics
        self._channel = channel
        self._max_unsplit_tokens = max_unsplit_tokens
        self._stranger = stranger
        self._strangers: dict[str, str] = {}  # lives that are listed and not this router's: why
        self._strict_numerics = strict_numerics
        self._clients: dict[str, WorkerClient] = {}
        self._changed = asyncio.Event()
        self._listed = False  # the registry has been read
        self._dropped_heard_s = -math.inf  # when a decode worker that is known no more was heard last
        self._random = random.Random(router_id)  # decides between equals, in every router otherwise
        self._closing: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Follows the registry until cancelled."""
        await self._registry.keep_listed(self._see)

    async def settle(self) -> None:
        """Waits until the workers that are listed at the start are connected, at most connect_s."""
        deadline = self._clock() + self._deadlines.connect_s
        while not self._listed or not all(client.connected or client.obsolete for client in self._clients.values()):
            if (left := deadline - self._clock()) <= 0:
                return
            await self.change(left)

    async def close(self) -> None:
        for client in list(self._clients.values()):
            self._drop(client)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def usable(self, role: str) -> list[WorkerClient]:
        """Workers of a role that can take work now."""
        return [c for c in self._clients.values() if c.record.role == role and c.healthy and not c.draining]

    def capacity(self) -> Room | None:
        """What the decode pool has for this router: all it has, less the places that other routers' requests take.

        Of each worker it has one at least: a router that came later is not shut out by those before it. No seats: the
        pool is gone and may come back. None: it has not been there within router_queue_s, or never.
        """
        usable = self.usable("decode")
        if self._listed and not usable and self._clock() - self._decode_heard_s() > self._deadlines.router_queue_s:
            return None
        room = Room()
        for client in usable:
            load, places = client.load, client.record.max_num_seqs or math.inf
            others = max(0, load.running + load.waiting - client.num_forks)
            room += Room(max(1, places - others), load.total_blocks or math.inf)
        return room

    def _decode_heard_s(self) -> float:
        """When a decode worker was heard last."""
        heard = [client.heard_s for client in self._clients.values() if client.record.role == "decode"]
        return max([*heard, self._dropped_heard_s])

    def ready(self) -> tuple[bool, str]:
        """Whether a request could be answered now, and if not, or only just, why."""
        told_with = self._registry.outage.told_with
        if not self.usable("decode"):
            others = f" ({len(self._strangers)} workers of other models are ignored)" if self._strangers else ""
            return False, told_with(f"no decode worker{others}")
        listed = any(client.record.role == "prefill" for client in self._clients.values())
        if listed and not self.usable("prefill"):
            return True, told_with("no prefill worker is reachable: decode workers serve alone")
        return True, told_with("ready")

    def pick_prefill(
        self, context: HashedTokens, decode: WorkerClient, failed: Collection[str] = (), fingerprint: str | None = None
    ) -> tuple[WorkerClient, Expectation] | str:
        """The worker that is done with this prompt first, and the blocks it is now expected to have.

        Or, in a word, why `decode` should compute it. Ids in `failed`, here and below, are those of workers that
        this request has tried in vain. Only a worker of `fingerprint` will do, if one is given.
        """
        fingerprints = {client.record.fingerprint for client in self.usable("decode")}
        if fingerprint is not None:
            fingerprints &= {fingerprint}
        picked = pick_prefill(
            self._candidates("prefill", context, failed, {client.record.numerics for client in self.usable("decode")}),
            len(context),
            fingerprints=fingerprints,
            turn=self._random.getrandbits(32),
        )
        reason = goes_unsplit(
            picked, self._candidate(decode, context, failed), len(context), most_tokens=self._max_unsplit_tokens
        )
        if picked is None or reason:
            return reason
        client = self._clients[picked.worker_id]
        return client, self._index.expect(picked.worker_id, context.hashes(client.record.model_revision))

    def pick_decode(
        self,
        context: HashedTokens,
        fingerprint: str | None,
        failed: Collection[str] = (),
        numerics: str | None = None,
    ) -> WorkerClient | None:
        """The worker that holds the least, counting what it has of this prompt; of one fingerprint, if given.

        numerics: of the KV's holder. Others come after those that round alike, or not at all if numerics are strict.
        """
        picked = pick_decode(
            self._candidates("decode", context, failed, None if numerics is None else {numerics}),
            len(context),
            fingerprint=fingerprint,
            turn=self._random.getrandbits(32),
        )
        return None if picked is None else self._clients[picked.worker_id]

    async def change(self, timeout_s: float) -> None:
        """Waits until a worker may have become usable, at most timeout_s."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    async def decode_worker(
        self,
        context: HashedTokens,
        fingerprint: str | None,
        failed: Collection[str] = (),
        numerics: str | None = None,
    ) -> WorkerClient:
        """pick_decode, waiting for a worker to come back if need be. Raises NoWorker after the queue deadline.

        KV, or an answer, that only workers of one fingerprint could take is given up, by HandoverError, when the last
        of them has been away for dead_s while others could compute the prompt anew: a rolling update has gone by.
        """
        began = self._clock()
        while True:
            self._check_context(len(context))
            if (client := self.pick_decode(context, fingerprint, failed, numerics)) is not None:
                return client
            waited = self._clock() - began
            if waited >= self._deadlines.router_queue_s:
                raise NoWorker("no decode worker can take the request")
            alone = not any(self._takes(client.record, fingerprint, numerics) for client in self.usable("decode"))
            if alone and waited >= self._deadlines.dead_s and self.usable("decode"):
                raise HandoverError("no decode worker of this fingerprint is left")
            await self.change(min(self._deadlines.router_queue_s - waited, self._deadlines.heartbeat_s))

    def _takes(self, record: WorkerRecord, fingerprint: str | None, numerics: str | None) -> bool:
        """Whether a decode worker may go on with KV or an answer of these."""
        rounds_alike = numerics in (None, record.numerics) or not self._strict_numerics
        return fingerprint in (None, record.fingerprint) and rounds_alike

    def _check_context(self, num_tokens: int) -> None:
        """Raises ContextLengthExceeded for what no decode worker there is will ever take."""
        longest = max((client.record.max_model_len for client in self.usable("decode")), default=num_tokens + 1)
        if num_tokens >= longest:
            raise ContextLengthExceeded(
                f"the prompt has {num_tokens} tokens, the workers' context {longest}", field="prompt"
            )

    def _candidates(
        self, role: str, context: HashedTokens, failed: Collection[str], numerics: Collection[str] | None
    ) -> list[Candidate]:
        """numerics: of whom they would be paired with."""
        found = []
        for client in self.usable(role):
            mixed = numerics is not None and client.record.numerics not in numerics
            if not (mixed and self._strict_numerics):
                found.append(replace(self._candidate(client, context, failed), mixed=mixed))
        return found

    def _candidate(self, client: WorkerClient, context: HashedTokens, failed: Collection[str]) -> Candidate:
        record, load = client.record, client.load
        return Candidate(
            worker_id=record.worker_id,
            fingerprint=record.fingerprint,
            healthy=client.healthy,
            draining=client.draining,
            charged_tokens=client.charged_tokens,
            reported_tokens=load.waiting_tokens,
            in_flight=client.in_flight,
            free_blocks=load.free_blocks,
            total_blocks=load.total_blocks,
            prefix_blocks=self._index.prefix_blocks(record.worker_id, context.hashes(record.model_revision)),
            failed=record.worker_id in failed,
            running=load.running,
            token_s=load.token_s,
            step_s=load.step_s,
        )

    def _see(self, records: list[WorkerRecord]) -> None:
        """Takes in what the registry lists now."""
        records = self._known(records)
        listed = {(record.worker_id, record.epoch) for record in records}

        def is_listed(client: WorkerClient) -> bool:
            return (client.record.worker_id, client.record.epoch) in listed

        for client in list(self._clients.values()):
            if not (client.connected or is_listed(client)):
                self._drop(client)
        # Two lives of one worker may be listed for a while: the one that answers stays, else they take turns.
        staying = {client for client in self._clients.values() if client.connected and is_listed(client)}
        for record in records:
            known = self._clients.get(record.worker_id)
            if known is not None and known.record.epoch == record.epoch:
                known.draining = known.draining or record.leaving
                continue
            rivals = [
                client
                for client in self._clients.values()
                if client is known or client.record.address == record.address
            ]
            if record.leaving or not staying.isdisjoint(rivals):
                continue
            for client in rivals:
                self._drop(client)
            client = WorkerClient(
                record, self._router_id, self._deadlines, self._clock, self._changed.set, self._channel
            )
            self._clients[record.worker_id] = client
            staying.add(client)
            self._index.follow(record)
        self._count()
        self._listed = True
        self._changed.set()

    def _known(self, records: list[WorkerRecord]) -> list[WorkerRecord]:
        """Without those of other models; each of them is told once."""
        reasons = {record.member: self._stranger(record) for record in records}
        strangers = {member: reason for member, reason in reasons.items() if reason}
        for member, reason in strangers.items():
            if self._strangers.get(member) != reason:
                log_event(log, logging.WARNING, "worker ignored", worker=member, reason=reason)
        self._strangers = strangers
        return [record for record in records if record.member not in strangers]

    def _drop(self, client: WorkerClient) -> None:
        del self._clients[client.record.worker_id]
        if client.record.role == "decode":
            self._dropped_heard_s = max(self._dropped_heard_s, client.heard_s)
        self._index.forget(client.record.worker_id)
        task = asyncio.create_task(client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _count(self) -> None:
        counts: dict[tuple[str, str], int] = {}
        for client in self._clients.values():
            state = "draining" if client.draining else "ready" if client.healthy else "unreachable"
            key = (client.record.role, state)
            counts[key] = counts.get(key, 0) + 1
        self._metrics.on_workers(counts)
        self._metrics.on_index(self._index.num_hashes)
