"""A request on its way, as the pipeline keeps it: its answers, its report, and what goes out."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.errors import KVRelayError, TokenMismatch
from common.log import request_id as log_id
from common.rpc.convert import params_to_proto, scores_from_proto
from common.rpc.pb import decode_pb2, prefill_pb2, types_pb2
from common.text.text_model import TextModel
from router.fleet.hashed_tokens import HashedTokens
from router.fleet.worker_client import WorkerClient
from router.metrics import RouterMetrics
from router.pipeline.answer import Answer
from router.pipeline.generation import Delta, Generation


class RequestRun:
    """A request on its way: its answers, and the deltas that are to go out."""

    def __init__(self, generation: Generation, text: TextModel, metrics: RouterMetrics, clock: Callable[[], float]):
        self.request = generation.request
        self.report = generation.report
        self._prompt_logprobs = generation.prompt_logprobs
        self.report.prompt_tokens = len(self.request.prompt_ids)
        self.answers = [Answer(index, self.request, text) for index in range(self.request.n)]
        self.failed: set[str] = set()  # ids of workers that were tried in vain
        self.outbox: asyncio.Queue[Delta | KVRelayError] = asyncio.Queue()
        self.failed_handovers = 0
        self._fingerprint: str | None = None  # of the worker that was asked last
        self._metrics = metrics
        self._clock = clock
        self._began = clock()
        # As logs have it, the workers' too: by what the client knows it, and by what no other request has.
        self._name = ":".join(filter(None, (log_id.get(), self.request.request_id)))
        self._last_token_s = [0.0] * self.request.n
        self._params = params_to_proto(self.request.params)
        self._prompt = HashedTokens(self.request.prompt_ids, self.request.cache_salt)

    @property
    def fingerprint(self) -> str | None:
        """Of the model that has written what is out, as long as somebody can go on with it; None: any will do."""
        return self._fingerprint if any(answer.output_ids for answer in self.answers) else None

    def give_up_model(self) -> None:
        """Nobody has the model any more that has begun the answers."""
        self._fingerprint = None

    def elapsed_s(self) -> float:
        return self._clock() - self._began

    @contextmanager
    def blaming(self, worker: WorkerClient, kind: type[KVRelayError] = KVRelayError) -> Iterator[None]:
        """Such an error in the body is this worker's: the next attempt asks others first."""
        try:
            yield
        except kind:
            self.failed.add(worker.record.worker_id)
            raise

    def next_attempt(self, answers: list[Answer]) -> types_pb2.AttemptKey:
        """Attempts are numbered upward. One fork of several that goes on alone is a request of its own to workers:

        a newer attempt of a request ends the older one there, and forks run side by side.
        """
        self.report.attempts += 1
        request_id = self._name
        if len(answers) == 1 and self.request.n > 1:
            request_id += f".{answers[0].index}"
        return types_pb2.AttemptKey(request_id=request_id, attempt=self.report.attempts)

    def context(self, answers: list[Answer]) -> HashedTokens:
        """The prompt and what these answers have in common so far."""
        return self._prompt.extended(answers[0].output_ids) if len(answers) == 1 else self._prompt

    def submission(
        self, answers: list[Answer], worker: WorkerClient, key: types_pb2.AttemptKey
    ) -> types_pb2.Submission:
        """All that a worker needs to go on with these answers from where they are."""
        self._fingerprint = worker.record.fingerprint
        return types_pb2.Submission(
            key=key,
            epoch=worker.record.epoch,
            fingerprint=worker.record.fingerprint,
            prompt_ids=self.request.prompt_ids,
            forks=[types_pb2.Fork(index=answer.index, output_ids=answer.output_ids) for answer in answers],
            params=self._params,
            cache_salt=self.request.cache_salt,
        )

    def accept(self, token: types_pb2.Token) -> None:
        """Takes in one token and sends its delta on. Raises TokenMismatch."""
        if token.fork >= len(self.answers):
            raise TokenMismatch(f"a token came for fork {token.fork} of {len(self.answers)}")
        delta = self.answers[token.fork].accept(token)
        if delta is None:
            return
        now = self.elapsed_s()
        if not self.report.completion_tokens:
            self.report.first_token_s = now
            self._metrics.on_first_token(now)
        if token.index:
            self._metrics.on_token(now - self._last_token_s[token.fork])
        self._last_token_s[token.fork] = self.report.last_token_s = now
        self.report.completion_tokens += 1
        if delta.finish_reason is not None:
            self._metrics.on_answer(delta.finish_reason)
        self.outbox.put_nowait(delta)

    def note_prompt_logprobs(self, message: types_pb2.PromptLogprobs) -> None:
        """A later attempt tells them again from the start, unless all are here."""
        self._prompt_logprobs[message.first - 1 :] = scores_from_proto(message)
        if len(self._prompt_logprobs) == len(self.request.prompt_ids) - 1:
            self._params.ClearField("prompt_logprobs")

    def note_unsplit(self, reason: str) -> None:
        """The decode worker computes the prompt of this attempt itself."""
        self.report.unsplit = reason
        self._metrics.on_unsplit(reason)

    def note_prefill(self, message: prefill_pb2.FirstTokens | decode_pb2.SequenceTokens, worker_id: str) -> None:
        report = self.report
        report.prefill_worker = worker_id
        report.prefill_queue_s += message.queue_s
        report.prefill_s += message.prefill_s
        if self.report.attempts == 1:
            report.cached_tokens = message.cached_tokens

    def note_handover(self, message: decode_pb2.Admitted) -> None:
        report = self.report
        report.decode_queue_s += message.queue_s
        report.decode_cached_tokens = message.cached_tokens
        report.handover_s += message.handover_s
        report.handover_bytes += message.bytes
        report.transport = message.transport
