"""The engine: a scheduler, a runner and a sampler behind one lock, no notion of roles, and the thread that steps it.

Calls from services take the lock only to change the scheduler's state, never during a forward pass.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Sequenced
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from common.engine.batch import BadRow, Batch, EngineLoad, Sample, ScheduledChunk, StepOutput, bad_rows
from common.engine.block_table import Reservation
from common.engine.sampler import take_scores
from common.engine.scheduler import Scheduler
from common.engine.sequence import Sequence
from common.errors import ContextLengthExceeded, EngineFailure, InvalidRequest
from common.log import get_logger, log_event

log = get_logger("engine")


class Runner(Protocol):
    def forward(self, batch: Batch) -> Tensor:
        """Logits [rows, vocab], float32: of each chunk those scored, then those sampled. All KV is written."""
        ...

    def where_not_finite(self, chunk: ScheduledChunk) -> str:
        """Of a chunk whose logits are not finite, after its forward pass: where that comes from."""
        ...


class Engine:
    """Thread-safe; step() is for one thread, the loop's."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Callable[[Tensor, Batch], list[list[Sample] | BadRow]],
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._woken = False
        self.config = scheduler.config

    def check(self, num_tokens: int, num_forks: int) -> None:
        """Raises InvalidRequest for a sequence that this engine could never run."""
        if num_tokens >= self.config.max_model_len:
            raise ContextLengthExceeded(
                f"prompt has {num_tokens} tokens, the context {self.config.max_model_len}", field="prompt_ids"
            )
        if num_tokens < 1:
            raise InvalidRequest("prompt is empty", field="prompt_ids")
        if not 1 <= num_forks <= self.config.max_num_seqs:
            raise InvalidRequest(f"n must be between 1 and {self.config.max_num_seqs}, got {num_forks}", field="n")

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence; its tokens come out of step()."""
        self._scheduler.tables.extend_hashes(sequence)  # outside the lock: it takes a while for a long prompt
        sequence.arrived_s = self._clock()
        with self._changed:
            self._scheduler.add(sequence)
            self._changed.notify()

    def reserve(self, forks: Sequenced[Sequence]) -> Reservation | None:
        """Blocks for KV from elsewhere, or None while there is no room. The caller admits or cancels it."""
        self._scheduler.tables.extend_hashes(forks[0])
        with self._changed:
            return self._scheduler.reserve(forks)

    def admit(self, reservation: Reservation) -> None:
        """The reservation's blocks hold valid KV: its forks run."""
        now = self._clock()
        with self._changed:
            for fork in reservation.forks:
                fork.arrived_s = fork.started_s = now
            self._scheduler.admit(reservation)
            self._changed.notify()

    def cancel(self, reservation: Reservation) -> None:
        with self._changed:
            self._scheduler.cancel(reservation)
            self._changed.notify()

    def abort(self, key: str, forks: Iterable[int] | None = None) -> None:
        """Ends the sequences of a key (or some of its forks); no more output comes for them. Idempotent."""
        with self._changed:
            self._scheduler.abort(key, forks)
            self._changed.notify()

    def free_blocks(self, block_ids: Sequenced[int]) -> None:
        """Drops one reference on each: the way back for blocks of parked sequences."""
        with self._changed:
            self._scheduler.pool.free(block_ids)
            self._changed.notify()

    def wake(self) -> None:
        """Ends the wait of an idle step(): this one's, or the next one's when none waits now."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def load(self) -> EngineLoad:
        with self._lock:
            return self._scheduler.load()

    def cached_hashes(self) -> list[bytes]:
        with self._lock:
            return self._scheduler.pool.cached_hashes()

    def step(self, wait_s: float = 0.0) -> StepOutput | None:
        """One step, or None when nothing could be computed within wait_s."""
        begun = self.begin(wait_s)
        return None if begun is None else self.finish(*begun)

    def begin(self, wait_s: float = 0.0) -> tuple[Batch, float] | None:
        """What the next step computes and when it began, or None when there is nothing within wait_s."""
        with self._changed:
            batch = self._scheduler.schedule()
            if not batch.chunks:
                if not self._woken:
                    self._changed.wait(wait_s)
                self._woken = False
                return None
        now = self._clock()
        for chunk in batch.chunks:
            if chunk.sequence.started_s is None:
                chunk.sequence.started_s = now
        return batch, now

    def finish(self, batch: Batch, begun_s: float) -> StepOutput:
        """Computes what was begun, and takes it in; sequences may come and go meanwhile."""
        try:
            logits, scores = take_scores(self._runner.forward(batch), batch)
            samples = self._sampler(logits, batch)
            self._log_bad_rows(batch, bad_rows((*samples, *scores)))
        except Exception as error:  # whatever a kernel raises concerns this batch only
            with self._changed:
                output = self._scheduler.fail(batch, EngineFailure(f"forward pass failed: {error}"))
        else:
            with self._changed:
                output = self._scheduler.update(batch, samples, scores)
        return replace(output, step_s=self._clock() - begun_s)

    def _log_bad_rows(self, batch: Batch, bad: Mapping[Sequence, BadRow]) -> None:
        for sequence, row in bad.items():
            where = None
            if row.error is None:
                where = self._runner.where_not_finite(next(c for c in batch.chunks if c.sequence is sequence))
            values = {"key": sequence.key, "reason": row.reason, "where": where, "again": not sequence.uncached}
            log_event(log, logging.WARNING, "a sequence has no token", exc_info=row.error, **values)


class EngineLoop:
    """The thread that steps an engine while it has work.

    Each output goes to all `receivers`, in order and one after the other, by way of `post`: with an event loop's
    call_soon_threadsafe that is one hand-off a step. `on_death`, by the same way, gets what ended the thread against
    its will, or what a receiver raised: the state can't be trusted afterwards, so the process should end.
    """

    def __init__(
        self,
        engine: Engine,
        receivers: Sequenced[Callable[[StepOutput], object]],
        on_death: Callable[[BaseException], object],
        *,
        idle_s: float,
        post: Callable[..., object] = lambda work, *arguments: work(*arguments),
    ) -> None:
        """`idle_s`: how long an idle engine waits before it looks again by itself."""
        self._engine = engine
        self._receivers = tuple(receivers)
        self._on_death = on_death
        self._idle_s = idle_s
        self._post = post
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends after the current step; False if that takes longer than timeout_s."""
        self._stopping.set()
        self._engine.wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                output = self._engine.step(self._idle_s)
                if output is not None:
                    self._post(self._deliver, output)
        except BaseException as error:
            self._post(self._on_death, error)

    def _deliver(self, output: StepOutput) -> None:
        try:
            for receive in self._receivers:
                receive(output)
        except Exception as error:  # whose tokens were in it would wait for them in vain
            self._stopping.set()
            self._on_death(error)
