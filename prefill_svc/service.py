"""Step 4 of a request: the prompt's KV, the first token, and the blocks held for whoever decodes."""

import asyncio
from dataclasses import dataclass, field

from common.engine.batch import StepOutput, TokenOutput
from common.engine.sequence import Sequence
from common.errors import InvalidRequest, KVRelayError, Overloaded, RequestTimeout
from common.rpc.pb import kv_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from common.tasks import end
from common.worker.messages import load_to_proto, scores_to_proto, sequences_of, token_to_proto
from common.worker.process import Worker
from common.worker.relay import RelayServer, Session
from kvtransfer.holder import KVHolder
from kvtransfer.lease import LeaseTable


@dataclass(slots=True)
class Prefilled:
    """What the engine made of a prompt: a token a fork, and the blocks unless all forks are finished."""

    tokens: list[TokenOutput]
    block_ids: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Prefilling:
    """An attempt on its way through the engine."""

    request: types_pb2.Submission
    session: Session
    sequence: Sequence
    done: asyncio.Future[Prefilled]
    block_ids: tuple[int, ...] = field(default=())  # parked for it, until a lease owns them


class PrefillService:
    """Runs submissions through the engine. All methods belong to one event loop."""

    def __init__(self, worker: Worker, leases: LeaseTable, holder: KVHolder) -> None:
        self.info = worker.info
        self.engine = worker.engine
        self.leases = leases
        self.holder = holder
        self._server = worker.server.server
        self._metrics = worker.metrics
        self._clock = worker.clock
        self._deadlines = worker.deadlines
        self._max_held_kv = worker.settings.max_held_kv
        self._expired = 0  # leases that metrics have counted
        self._attempts: dict[str, Prefilling] = {}
        self.relay_server = RelayServer(
            epoch=self.info.epoch,
            fingerprint=self.info.fingerprint,
            event_type=prefill_pb2.PrefillEvent,
            serve=self.serve,
            abort_forks=lambda key, forks: True,  # forks have no sequence of their own here yet
            load=self.load,
            health=worker.health,
            heartbeat_s=self._deadlines.heartbeat_s,
        )

        self._expiry = asyncio.create_task(holder.run())

    def register(self) -> None:
        """Adds this service and the holder to the gRPC server."""
        prefill_pb2_grpc.add_PrefillServicer_to_server(self.relay_server, self._server)  # type: ignore[no-untyped-call]
        kv_pb2_grpc.add_KVServicer_to_server(self.holder, self._server)  # type: ignore[no-untyped-call]

    @property
    def idle(self) -> bool:
        """Whether it could stop now and nobody would miss anything."""
        return self.relay_server.idle and not self.leases.num_held

    async def close(self) -> None:
        """Frees what is held; the streams have ended."""
        await end(self._expiry)
        self.leases.close()

    async def serve(self, submission: types_pb2.Submission, session: Session, key: str) -> None:
        """One attempt, from its tokens to FirstTokens; whatever ends it, the engine and the pool forget it."""
        if not any(fork.output_ids for fork in submission.forks):  # an answer that is out already is never refused
            self._check_room()
        sequence, *others = sequences_of(
            submission,
            key=key,
            engine=self.engine,
            model_revision=self.info.model_revision,
            vocab_size=self.info.vocab_size,
        )
        if others:
            raise InvalidRequest("forks with different output resume one by one", field="forks")
        sequence.prefill_only = True
        attempt = Prefilling(submission, session, sequence, asyncio.get_running_loop().create_future())
        self._attempts[key] = attempt
        try:
            session.send(types_pb2.Accepted(key=submission.key))
            self.engine.add(sequence)
            try:
                async with asyncio.timeout(self._deadlines.request_s):
                    prefilled = await attempt.done
            except TimeoutError as error:
                raise RequestTimeout("the prompt was not computed in time") from error
            self._send_first_tokens(attempt, prefilled)
        except asyncio.CancelledError:
            self._metrics.on_abort(len(sequence.forks))
            raise
        finally:
            del self._attempts[key]
            self.engine.abort(key)
            self.engine.free_blocks(attempt.block_ids)

    def _check_room(self) -> None:
        """Raises Overloaded while too much is held for readers that don't come: a new prompt would only wait."""
        held, total = self.leases.held_blocks, self.engine.load().total_blocks
        if held and held >= self._max_held_kv * total:
            raise Overloaded(f"{held} of {total} blocks are held for others")

    def _send_first_tokens(self, attempt: Prefilling, prefilled: Prefilled) -> None:
        sequence, now = attempt.sequence, self._clock()
        first = prefill_pb2.FirstTokens(
            key=attempt.request.key,
            tokens=[token_to_proto(token) for token in prefilled.tokens],
            cached_tokens=sequence.num_cached_tokens or 0,
            queue_s=(sequence.started_s or now) - sequence.arrived_s,
            prefill_s=now - (sequence.started_s or now),
        )
        if prefilled.block_ids:
            lease = self.leases.hold(attempt.request.key.request_id, prefilled.block_ids, sequence.num_tokens)
            attempt.block_ids = ()
            first.handle.CopyFrom(self.holder.handle(lease, address=self.info.address, key=attempt.request.key))
        attempt.session.send(first)

    def on_output(self, output: StepOutput) -> None:
        """Takes one step's results to the attempts they belong to; blocks that nobody waits for are freed."""
        for sequence, computed in output.progress:
            if attempt := self._attempts.get(sequence.key):
                progress = prefill_pb2.Progress(
                    key=attempt.request.key, computed_tokens=computed, total_tokens=sequence.num_tokens
                )
                attempt.session.send(progress)
        for scores in output.scores:
            if attempt := self._attempts.get(scores.sequence.key):
                attempt.session.send(scores_to_proto(scores, attempt.request.key))
        tokens: dict[str, list[TokenOutput]] = {}
        for token in output.tokens:
            tokens.setdefault(token.sequence.key, []).append(token)
        blocks = {sequence.key: block_ids for sequence, block_ids in output.parked}
        for key, outputs in tokens.items():
            attempt = self._attempts.get(key)
            if attempt is None or attempt.done.done():
                self.engine.free_blocks(blocks.get(key, ()))
                continue
            attempt.block_ids = blocks.get(key, ())
            attempt.done.set_result(Prefilled(outputs, attempt.block_ids))
        for sequence, error in output.failed:
            self._fail(sequence.key, error)

    def _fail(self, key: str, error: KVRelayError) -> None:
        attempt = self._attempts.get(key)
        if attempt is not None and not attempt.done.done():
            attempt.done.set_exception(error)

    def measure(self) -> None:
        """Brings the gauges of its metrics up to date."""
        self._metrics.on_load(self.engine.load(), self.relay_server.num_attempts)
        self._metrics.on_leases(self.leases.num_held, self.leases.held_blocks)
        self._metrics.on_lease_expirations(self.leases.num_expired - self._expired)
        self._expired = self.leases.num_expired

    def load(self) -> types_pb2.Load:
        return load_to_proto(self.engine.load(), held_blocks=self.leases.held_blocks)
