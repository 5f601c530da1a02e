"""Step 6 of a request: blocks for it, its KV from the holder, the holder's word, and then its tokens."""

import asyncio
from collections.abc import Sequence as Sequenced
from dataclasses import dataclass, replace

from common.block_hash import BLOCK_SIZE
from common.engine.batch import StepOutput
from common.engine.sequence import Sequence
from common.errors import HandoverError, InvalidRequest, RequestTimeout
from common.rpc.pb import decode_pb2, decode_pb2_grpc, types_pb2
from common.worker.messages import load_to_proto, scores_to_proto, sequences_of, token_to_proto
from common.worker.process import Worker
from common.worker.relay import RelayServer, Session
from decode_svc.admission import Admission
from kvtransfer.handle import KVHandle
from kvtransfer.reader import KVReader


@dataclass(eq=False, slots=True)
class Decoding:
    """An attempt on its way: its forks run in the engine, or wait for their KV."""

    key: str
    request: types_pb2.Submission
    session: Session
    live: set[int]  # forks that are neither finished nor aborted
    done: asyncio.Future[None]
    answering: bool = False


class DecodeService:
    """Runs submissions with KV from elsewhere, or from the start. All methods belong to one event loop."""

    def __init__(self, worker: Worker, reader: KVReader) -> None:
        self.info = worker.info
        self.engine = worker.engine
        self.admission = Admission(worker.engine)
        self._reader = reader
        self._server = worker.server.server
        self._metrics = worker.metrics
        self._clock = worker.clock
        self._deadlines = worker.deadlines
        self._attempts: dict[str, Decoding] = {}
        self.relay_server = RelayServer(
            epoch=self.info.epoch,
            fingerprint=self.info.fingerprint,
            event_type=decode_pb2.DecodeEvent,
            serve=self.serve,
            abort_forks=self.abort_forks,
            load=self.load,
            health=worker.health,
            heartbeat_s=self._deadlines.heartbeat_s,
        )

    def register(self) -> None:
        """Adds this service to the gRPC server."""
        decode_pb2_grpc.add_DecodeServicer_to_server(self.relay_server, self._server)  # type: ignore[no-untyped-call]

    @property
    def idle(self) -> bool:
        """Whether it could stop now and nobody would miss anything."""
        return self.relay_server.idle

    async def close(self) -> None:
        """Lets go of all holders; the streams have ended."""
        await self._reader.close()

    async def serve(self, command: decode_pb2.DecodeSubmission, session: Session, key: str) -> None:
        """One attempt until its last token; whatever ends it, engine, pool and holder forget it."""
        submission = command.submission
        sequences = sequences_of(
            submission,
            key=key,
            engine=self.engine,
            model_revision=self.info.model_revision,
            vocab_size=self.info.vocab_size,
        )
        handle = KVHandle.from_proto(command.handle) if command.HasField("handle") else None
        if handle is not None:
            _check_fit(handle, sequences)
        live = {fork.index for fork in submission.forks}
        attempt = Decoding(key, submission, session, live, asyncio.get_running_loop().create_future())
        self._attempts[key] = attempt
        limit = asyncio.timeout(self._deadlines.request_s)
        try:
            session.send(types_pb2.Accepted(key=submission.key))
            async with limit:
                if handle is not None:
                    await self._admit(attempt, handle, sequences)
                else:
                    for sequence in sequences:
                        self.engine.add(sequence)
                await attempt.done
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise RequestTimeout("the answer was not complete in time") from error
        except asyncio.CancelledError:
            self._metrics.on_abort(len(live))
            raise
        finally:
            del self._attempts[key]
            self.engine.abort(key)
            self.admission.poll()

    async def _admit(self, attempt: Decoding, handle: KVHandle, sequences: list[Sequence]) -> None:
        """Brings the KV here and lets the forks run on it. Raises HandoverError with nothing kept."""
        forks = [fork for sequence in sequences for fork in map(sequence.split, sequence.forks)]
        arrived = self._clock()
        try:
            async with (
                self._reader.claimed(handle) as claim,
                self.admission.reserved(forks, claim.voided) as reservation,
            ):
                reserved = self._clock()
                cached = reservation.num_cached_blocks
                pairs = zip(handle.block_ids[cached:], reservation.block_ids[cached:], strict=True)
                stats = await claim.pull(list(pairs))
                await claim.confirm()
        except HandoverError as error:
            self._metrics.on_handover_failure(error.code)
            raise
        self._metrics.on_handover(stats.transport, stats.bytes, stats.seconds)
        admitted = decode_pb2.Admitted(
            key=attempt.request.key,
            cached_tokens=cached * BLOCK_SIZE,
            bytes=stats.bytes,
            handover_s=stats.seconds,
            queue_s=reserved - arrived,
            transport=stats.transport,
        )
        attempt.session.send(admitted)
        self.engine.abort(attempt.key, [fork.forks[0] for fork in forks if fork.forks[0] not in attempt.live])

    def abort_forks(self, key: str, forks: list[int]) -> bool:
        """The router wants no more of some forks; False: none is left."""
        attempt = self._attempts.get(key)
        if attempt is None:
            return True  # it has not begun
        self._metrics.on_stop_strings(len(attempt.live.intersection(forks)))  # the router's one reason for it
        attempt.live.difference_update(forks)
        self.engine.abort(key, forks)
        return bool(attempt.live)

    def on_output(self, output: StepOutput) -> None:
        """One step's tokens, as one message to each router, and room for those who wait."""
        messages: dict[str, decode_pb2.SequenceTokens] = {}
        steps: dict[Session, decode_pb2.StepTokens] = {}
        for scores in output.scores:
            if attempt := self._attempts.get(scores.sequence.key):
                attempt.session.send(scores_to_proto(scores, attempt.request.key))
        for token in output.tokens:
            attempt = self._attempts.get(token.sequence.key)
            if attempt is None or token.fork not in attempt.live:
                continue
            message = messages.get(attempt.key)
            if message is None:
                message = steps.setdefault(attempt.session, decode_pb2.StepTokens()).sequences.add()
                message.key.CopyFrom(attempt.request.key)
                messages[attempt.key] = message
            message.tokens.append(token_to_proto(token))
            if not attempt.answering:
                self._add_timings(message, token.sequence)
                attempt.answering = True
            if token.finish_reason is not None:
                attempt.live.discard(token.fork)
                if not attempt.live and not attempt.done.done():
                    attempt.done.set_result(None)
        for session, step in steps.items():
            session.send(step)
        for sequence, error in output.failed:
            attempt = self._attempts.get(sequence.key)
            if attempt is not None and not attempt.done.done():
                attempt.done.set_exception(error)
        self.admission.poll()

    def _add_timings(self, message: decode_pb2.SequenceTokens, sequence: Sequence) -> None:
        started = sequence.started_s or sequence.arrived_s
        message.cached_tokens = sequence.num_cached_tokens or 0
        message.queue_s = started - sequence.arrived_s
        message.prefill_s = self._clock() - started

    def measure(self) -> None:
        """Brings the gauges of its metrics up to date."""
        load = self.engine.load()
        load = replace(load, waiting=load.waiting + self.admission.num_waiting)
        self._metrics.on_load(load, self.relay_server.num_attempts)
        self._metrics.on_claims(self._reader.num_claims)

    def load(self) -> types_pb2.Load:
        message = load_to_proto(self.engine.load(), moved_bytes=self._reader.moved_bytes)
        message.waiting += self.admission.num_waiting
        return message


def _check_fit(handle: KVHandle, sequences: Sequenced[Sequence]) -> None:
    """The handle's KV has to be that of all tokens but the last one, for every fork. Raises InvalidRequest."""
    if any(sequence.num_tokens - 1 != handle.num_tokens for sequence in sequences):
        raise InvalidRequest(f"the handle is for {handle.num_tokens} tokens, the forks need others", field="handle")
    if any(sequence.token_ids[:-1] != sequences[0].token_ids[:-1] for sequence in sequences[1:]):
        raise InvalidRequest("forks on one handle may differ in their last token only", field="forks")
