"""A request's way through both pools (steps 3 to 8), and its way back after a worker was lost.

Whatever dies, the request is submitted again with all the tokens it has: nothing is lost, repeated or rebased.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from common.deadlines import Deadlines
from common.errors import HandoverError, InvalidRequest, KVRelayError, Overloaded, RequestTimeout
from common.log import get_logger, log_event
from common.rpc.pb import decode_pb2, prefill_pb2, types_pb2
from common.tasks import end
from common.text.text_model import TextModel
from kvtransfer.handle import KVHandle
from router.config import MAX_QUEUED
from router.fleet.hashed_tokens import HashedTokens
from router.fleet.worker_client import WorkerClient
from router.fleet.workers import Workers
from router.metrics import RouterMetrics
from router.pipeline.answer import Answer
from router.pipeline.gate import Gate
from router.pipeline.generation import Delta, Generation
from router.pipeline.held_kv import Held, held
from router.pipeline.request_run import RequestRun

log = get_logger("pipeline")
MAX_ATTEMPTS = 6  # at one answer, those together with others included
MAX_HANDOVERS = 3  # that may fail, in one request


class Pipeline:
    """Carries requests through the pools. Lives on one event loop."""

    def __init__(
        self,
        workers: Workers,
        text: TextModel,
        metrics: RouterMetrics,
        deadlines: Deadlines,
        clock: Callable[[], float],
        max_queued: int = MAX_QUEUED,
    ) -> None:
        self._gate = Gate(workers.capacity, deadlines, clock, max_queued)
        self._workers = workers
        self._text = text
        self._metrics = metrics
        self._deadlines = deadlines
        self._clock = clock
        self._running = 0
        self._waiting = 0  # at the gate, or for a decode worker

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        """The answers' deltas as they come. Closing the iterator frees both workers; raises KVRelayError."""
        run = RequestRun(generation, self._text, self._metrics, self._clock)
        self._count(running=1)
        driver = asyncio.create_task(self._drive(run))
        ending = "abort"  # stays, if the iterator is closed
        try:
            open_answers = run.request.n
            while open_answers:
                item = await run.outbox.get()
                if isinstance(item, KVRelayError):
                    ending = "refused" if isinstance(item, InvalidRequest | Overloaded) else "error"
                    raise item
                open_answers -= item.finish_reason is not None
                if not open_answers:
                    self._report(run)
                yield item
        finally:
            self._count(running=-1)
            await end(driver)
            self._metrics.on_answer(ending, sum(not answer.finished for answer in run.answers))

    async def _drive(self, run: RequestRun) -> None:
        try:
            async with asyncio.timeout(self._deadlines.request_s), self._entered(run):
                await self._answer(run, run.answers)
        except TimeoutError:
            run.outbox.put_nowait(RequestTimeout(f"not complete within {self._deadlines.request_s:g} s"))
        except KVRelayError as error:
            run.outbox.put_nowait(error)
        except Exception as error:
            log_event(log, logging.ERROR, "request failed", request=run.request.request_id, exc_info=error)
            run.outbox.put_nowait(KVRelayError(KVRelayError.public))

    @asynccontextmanager
    async def _entered(self, run: RequestRun) -> AsyncIterator[None]:
        """Waits at the gate, which counts as the request's queue."""
        self._count(waiting=1)
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._gate.entered(run.request))
            finally:
                self._count(waiting=-1)
                run.report.router_queue_s += run.elapsed_s()
            yield
            for answer in run.answers:
                self._gate.learn(len(answer.output_ids))

    async def _answer(self, run: RequestRun, answers: list[Answer], tries: int = 0) -> None:
        """Until these answers are finished, whatever dies on the way."""
        while answers:
            tries += 1
            try:
                await self._attempt(run, answers)
                return
            except KVRelayError as error:
                if not error.resumable or tries == MAX_ATTEMPTS:
                    raise
                if isinstance(error, Overloaded):  # nothing was begun: other routers fill this worker, too
                    if run.elapsed_s() > self._deadlines.router_queue_s:
                        raise
                    tries -= 1
                    await self._workers.change(self._deadlines.heartbeat_s)
                else:  # what struck this worker may have struck others, which is noticed meanwhile
                    pause_s = self._deadlines.retry_s * 2 ** (tries - 1)
                    await asyncio.sleep(min(pause_s, self._deadlines.heartbeat_s))
                self._metrics.on_resume(error.code)
                run.failed_handovers += isinstance(error, HandoverError)
                request, reason = run.request.request_id, error.message
                log_event(log, logging.WARNING, "resuming", request=request, code=error.code, reason=reason)
            answers = [answer for answer in answers if not answer.finished]
            if len(answers) > 1 and any(answer.output_ids for answer in answers):
                await _all(self._answer(run, [answer], tries) for answer in answers)
                return

    async def _attempt(self, run: RequestRun, answers: list[Answer]) -> None:
        """Prefill, hand-over, decode; or decode alone where there is no prefill pool."""
        key = run.next_attempt(answers)
        context = run.context(answers)
        decode = await self._decode_worker(run, context, run.fingerprint)  # without one, a prefill would be in vain
        if run.failed_handovers < MAX_HANDOVERS:
            picked = self._workers.pick_prefill(context, decode, run.failed, run.fingerprint)
        else:
            picked = "handovers"
        if isinstance(picked, str):
            run.note_unsplit(picked)
            await self._decode(run, answers, key, None)
            return
        client, expectation = picked
        try:
            first = await self._prefill(run, answers, key, client)
        finally:
            expectation.answered()
        with run.blaming(client, HandoverError):  # as well as the decode worker: either may be at fault
            handle = KVHandle.from_proto(first.handle) if first.HasField("handle") else None
            async with held(client, handle, self._deadlines.lease_s) as kept:
                for token in first.tokens:
                    run.accept(token)
                live = [answer for answer in answers if not answer.finished]
                if live and kept is None:
                    raise HandoverError("the prefill worker sent tokens without their KV")
                if live:
                    await self._decode(run, live, key, kept)

    async def _decode_worker(
        self, run: RequestRun, context: HashedTokens, fingerprint: str | None, numerics: str | None = None
    ) -> WorkerClient:
        """The decode worker for these tokens, as soon as there is one; the wait counts as the request's queue."""
        before = run.elapsed_s()
        self._count(waiting=1)
        try:
            return await self._workers.decode_worker(context, fingerprint, run.failed, numerics)
        except HandoverError:
            run.give_up_model()
            raise
        finally:
            self._count(waiting=-1)
            run.report.router_queue_s += run.elapsed_s() - before

    async def _prefill(
        self, run: RequestRun, answers: list[Answer], key: types_pb2.AttemptKey, client: WorkerClient
    ) -> prefill_pb2.FirstTokens:
        submission = run.submission(answers, client, key)
        num_tokens = len(submission.prompt_ids) + len(submission.forks[0].output_ids)
        patience_s = self._prefill_patience_s(client, num_tokens)
        command = prefill_pb2.PrefillCommand(submit=submission)
        with run.blaming(client), client.attempt(key, command, num_tokens) as stream:
            while True:
                match await stream.next(patience_s):
                    case types_pb2.PromptLogprobs() as scores:
                        run.note_prompt_logprobs(scores)
                    case prefill_pb2.FirstTokens() as first:
                        stream.ended = True
                        run.note_prefill(first, client.record.worker_id)
                        return first

    def _prefill_patience_s(self, client: WorkerClient, num_tokens: int) -> float:
        """For a worker that has these tokens to compute, after those that it has already."""
        queued = client.charged_tokens + client.load.waiting_tokens
        return self._deadlines.prefill_of_s(queued + num_tokens)

    async def _decode(
        self, run: RequestRun, answers: list[Answer], key: types_pb2.AttemptKey, kept: Held | None
    ) -> None:
        """Tokens until these answers are finished, on KV from the handle or, without one, from the start."""
        context = run.context(answers)
        if kept:
            client = await self._decode_worker(run, context, kept.handle.fingerprint, kept.numerics)
        else:
            client = await self._decode_worker(run, context, run.fingerprint)
        run.report.decode_worker = client.record.worker_id
        submission = run.submission(answers, client, key)
        handle = kept.handle.to_proto() if kept else None
        command = decode_pb2.DecodeCommand(submit=decode_pb2.DecodeSubmission(submission=submission, handle=handle))
        live = {answer.index for answer in answers}
        patience_s = self._deadlines.decode_token_s if kept else self._prefill_patience_s(client, len(context))
        with run.blaming(client), client.attempt(key, command, len(context), len(live)) as stream:
            while live:
                match await stream.next(patience_s):
                    case types_pb2.PromptLogprobs() as scores:
                        run.note_prompt_logprobs(scores)
                    case decode_pb2.Admitted() as admitted:
                        run.note_handover(admitted)
                        if kept:
                            kept.taken = True
                    case decode_pb2.SequenceTokens() as step:
                        patience_s = self._deadlines.decode_token_s
                        if step.prefill_s and kept is None:
                            run.note_prefill(step, client.record.worker_id)
                        for token in step.tokens:
                            run.accept(token)
                            if token.fork in live and run.answers[token.fork].finished:
                                live.discard(token.fork)
                                if not token.finish_reason:  # a stop string, which only the router knows
                                    client.abort(key, (token.fork,))
                        stream.num_forks = len(live)
            stream.ended = True

    def _report(self, run: RequestRun) -> None:
        report = run.report
        self._metrics.on_finish(
            first_token_s=report.first_token_s,
            last_token_s=report.last_token_s,
            queue_s=report.router_queue_s + report.prefill_queue_s + report.decode_queue_s,
            prefill_s=report.prefill_s,
            tokens=max(len(answer.output_ids) for answer in run.answers),
        )

    def _count(self, *, running: int = 0, waiting: int = 0) -> None:
        self._running += running
        self._waiting += waiting
        self._metrics.on_load(self._running, self._waiting)


async def _all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs them side by side; the first failure ends the others and is raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end(*tasks)
