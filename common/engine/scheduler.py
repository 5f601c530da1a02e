"""Which tokens the next step computes.

There is no prefill phase and no decode phase: every sequence has a gap between the tokens it has and
those computed, and each step closes as much of the gaps as the token budget allows, short gaps first
(Sarathi-Serve's decode-first batching, https://arxiv.org/abs/2403.02310). Memory goes to the sequence
that arrived first; the newest is preempted and later recomputed.
"""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Sequenced
from dataclasses import replace

from common.engine.batch import (
    BadRow,
    Batch,
    EngineLoad,
    PromptScores,
    Sample,
    ScheduledChunk,
    StepOutput,
    TokenOutput,
    bad_rows,
)
from common.engine.block_pool import BlockPool
from common.engine.block_table import BlockTables, Reservation
from common.engine.limits import SchedulerConfig, finish
from common.engine.sequence import Sequence
from common.errors import KVRelayError, SequenceFailure


class Scheduler:
    """Owns the sequences and the block pool. Not thread-safe: the engine's lock guards it.

    The pool has to hold max_model_len tokens: a sequence that outgrew it would wait for ever.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.tables = BlockTables(pool)
        self.running: list[Sequence] = []  # in order of arrival
        self.waiting: deque[Sequence] = deque()  # preempted ones first, each in order of arrival
        self.num_steps = 0
        self.num_preemptions = 0
        self._told_preemptions = 0  # in outputs
        self.num_reserved_blocks = 0
        self.num_reserved_forks = 0
        self._arrivals = 0
        self._stuck: Sequence | None = None  # found no blocks or places in the last step
        self._blocked = False  # the last step would have been empty

    # What comes and goes from outside.

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence with nothing computed."""
        self._arrive(sequence)
        self.waiting.append(sequence)

    def reserve(self, forks: Sequenced[Sequence]) -> Reservation | None:
        """Blocks for all tokens but the last, found or new; None while there is no room.

        Room means: a place for each fork, no sequence that the last step had no room for, and a block
        to grow into for each running sequence.
        """
        first = forks[0]
        if self._stuck is not None or self._places() < len(forks):
            return None
        self.tables.extend_hashes(first)
        num_computed = first.num_tokens - 1
        found = self.pool.match(first.block_hashes[: num_computed // self.pool.block_size])
        missing = self.tables.blocks_for(num_computed) - len(found)
        fresh = self.pool.allocate(missing) if self.pool.num_free - missing >= len(self.running) else None
        if fresh is None:
            self.pool.free(found)
            return None
        self.num_reserved_blocks += len(found) + missing
        self.num_reserved_forks += len(forks)
        return Reservation(tuple(forks), (*found, *fresh), len(found))

    def admit(self, reservation: Reservation) -> None:
        """The reserved blocks now hold their KV: they are published and the forks run, sharing them."""
        first = reservation.forks[0]
        for fork in reservation.forks:
            self.pool.share(reservation.block_ids)
            fork.block_ids = list(reservation.block_ids)
            fork.num_computed_tokens = fork.num_tokens - 1
            fork.num_cached_tokens = reservation.num_cached_blocks * self.pool.block_size
            fork.block_hashes = first.block_hashes[: fork.num_computed_tokens // self.pool.block_size]
            self.tables.extend_hashes(fork)
            self._arrive(fork)
            self.running.append(fork)
        self.tables.publish(first, 0)
        self.cancel(reservation)

    def cancel(self, reservation: Reservation) -> None:
        """Gives up the reservation's own references."""
        self.num_reserved_blocks -= len(reservation.block_ids)
        self.num_reserved_forks -= len(reservation.forks)
        self.pool.free(reservation.block_ids)

    def abort(self, key: str, forks: Iterable[int] | None = None) -> None:
        """Takes out the sequences of a key, or those of some forks; what a step computes now goes when it ends."""
        named = None if forks is None else set(forks)
        for sequence in [s for s in (*self.running, *self.waiting) if s.key == key]:
            ended = sequence.forks if named is None else named.intersection(sequence.forks)
            sequence.aborted_forks = sequence.aborted_forks.union(ended)
            if not sequence.in_flight:
                self._drop_aborted(sequence)

    def _arrive(self, sequence: Sequence) -> None:
        sequence.arrival = self._arrivals
        self._arrivals += 1

    # One step.

    def schedule(self) -> Batch:
        """The next step; empty when nothing can be computed now."""
        chunks: dict[Sequence, ScheduledChunk] = {}
        copies: dict[Sequence, tuple[int, int]] = {}
        preempted: set[Sequence] = set()
        budget = self.config.max_num_batched_tokens
        scorable = self.config.max_scored_tokens
        self._stuck = None

        def preempt(victim: Sequence) -> None:
            nonlocal budget, scorable
            if chunk := chunks.pop(victim, None):
                budget += len(chunk.token_ids)
                scorable += len(chunk.scored)
            self._end_copies([copies.pop(victim)] if victim in copies else [])
            preempted.add(victim)
            self._preempt(victim)
            self._stuck = victim

        def take(sequence: Sequence, *, may_preempt: bool) -> None:
            nonlocal budget, scorable
            count = min(self._gap(sequence), budget)
            if sequence.num_unscored_tokens:
                count = min(count, scorable + max(0, sequence.num_scored_tokens - sequence.num_computed_tokens))
                if not count:
                    return
            while not self.tables.make_room(sequence, count, copies):
                victim = self.running[-1] if may_preempt else sequence
                if victim is sequence:  # it keeps what it has and waits: all that run came before it
                    self._stuck = sequence
                    return
                preempt(victim)
            chunks[sequence] = chunk = self._chunk(sequence, count)
            budget -= count
            scorable -= len(chunk.scored)

        for sequence in sorted(self.running, key=lambda s: (self._gap(s) > 1, s.arrival)):
            if budget > 0 and sequence not in preempted:
                take(sequence, may_preempt=True)
        while self.waiting and budget > 0 and self._stuck is None:  # where room is short, nothing new comes in
            sequence = self.waiting[0]
            if self._places() < len(sequence.forks):
                self._stuck = sequence
                break
            self.tables.find_prefix(sequence)
            take(sequence, may_preempt=False)
            if sequence not in chunks:
                self.tables.free(sequence)
                break
            if sequence.num_cached_tokens is None:  # else it comes back from a preemption
                sequence.num_cached_tokens = sequence.num_computed_tokens
            self.running.append(self.waiting.popleft())
        self.running.sort(key=lambda s: s.arrival)
        for sequence in chunks:
            sequence.in_flight = True
        self._blocked = not chunks
        return Batch(tuple(chunks.values()), tuple(copies.values()))

    def update(
        self,
        batch: Batch,
        samples: Sequenced[Sequenced[Sample] | BadRow],
        scores: Sequenced[PromptScores | BadRow] = (),
    ) -> StepOutput:
        """Takes in a computed step; `samples` has, for each sampled row in order, a sample a fork.

        A sequence with a bad row starts over without cached KV; when that was in vain, it fails.
        """
        bad = bad_rows((*samples, *scores))
        failed: list[tuple[Sequence, KVRelayError]] = []
        tokens: list[TokenOutput] = []
        parked: list[tuple[Sequence, tuple[int, ...]]] = []
        progress: list[tuple[Sequence, int]] = []
        remaining = iter(samples)
        self.num_steps += 1
        self._end_copies(batch.copies)
        for chunk in batch.chunks:
            sequence = chunk.sequence
            results = [next(remaining) for _ in chunk.sampled]
            rows = [dict(zip(sequence.forks, row, strict=True)) for row in results if not isinstance(row, BadRow)]
            self._land(sequence)
            if not sequence.forks:
                continue
            if sequence in bad:
                self.tables.unpublish(sequence)  # or its KV would spoil later ones
                if sequence.uncached:
                    failed.append((sequence, SequenceFailure(bad[sequence].reason)))
                    self._leave(sequence)
                else:
                    self._start_over(sequence)
                continue
            before = sequence.num_computed_tokens
            sequence.num_computed_tokens += len(chunk.token_ids)
            sequence.num_scored_tokens += len(chunk.scored)
            self.tables.publish(sequence, before)
            if not rows:
                progress.append((sequence, sequence.num_computed_tokens))
                continue
            outputs = self._append(sequence, *rows)
            tokens.extend(outputs)
            if sequence.prefill_only and any(output.finish_reason is None for output in outputs):
                self.running.remove(sequence)
                parked.append((sequence, tuple(sequence.block_ids)))
                sequence.block_ids = []
        self.running.sort(key=lambda s: s.arrival)  # forks go beside the sequence they come from
        good = tuple(one for one in scores if not isinstance(one, BadRow) and one.sequence not in bad)
        output = StepOutput(tuple(tokens), tuple(parked), tuple(progress), good, tuple(failed))
        return self._told(replace(output, num_batched_tokens=batch.num_tokens))

    def fail(self, batch: Batch, error: KVRelayError) -> StepOutput:
        """The step could not be computed: its sequences are gone."""
        failed = []
        self.num_steps += 1
        self._end_copies(batch.copies)
        for chunk in batch.chunks:
            self._land(chunk.sequence)
            if chunk.sequence.forks:
                failed.append((chunk.sequence, error))
                self._leave(chunk.sequence)
        return self._told(StepOutput(failed=tuple(failed)))

    def load(self) -> EngineLoad:
        """Counts as they are now."""
        return EngineLoad(
            running=len(self.running),
            waiting=len(self.waiting),
            waiting_tokens=sum(self._gap(s) for s in (*self.running, *self.waiting)),
            total_blocks=self.pool.num_blocks,
            free_blocks=self.pool.num_free,
            reserved_blocks=self.num_reserved_blocks,
            steps=self.num_steps,
            blocked=self._blocked,
        )

    def _told(self, output: StepOutput) -> StepOutput:
        """With what every step tells."""
        events = self.pool.drain_events()
        preemptions = self.num_preemptions - self._told_preemptions
        self._told_preemptions = self.num_preemptions
        return replace(
            output,
            load=self.load(),
            stored=tuple(events.stored),
            removed=tuple(events.removed),
            num_preemptions=preemptions,
        )

    # Tokens.

    def _append(self, sequence: Sequence, samples: dict[int, Sample]) -> list[TokenOutput]:
        """Each fork gets its token; afterwards each is a sequence of its own, or has left."""
        if sequence.prefill_only:  # its forks go on elsewhere, from the same blocks
            forks = [replace(sequence.split(index), block_ids=[]) for index in sequence.forks]
        else:
            forks = [sequence, *(sequence.split(index) for index in sequence.forks[1:])]
            sequence.forks = sequence.forks[:1]
            for fork in forks[1:]:
                self.pool.share(fork.block_ids)
                self.running.append(fork)
        outputs = []
        for fork in forks:
            sample = samples[fork.forks[0]]
            fork.token_ids.append(sample.token_id)
            self.tables.extend_hashes(fork)
            reason, stop_token = finish(fork, self.config)
            index = fork.num_output_tokens - 1
            outputs.append(TokenOutput(fork, fork.forks[0], index, sample, reason, stop_token))
            if reason is not None and not sequence.prefill_only:
                self._leave(fork)
        if sequence.prefill_only and all(output.finish_reason is not None for output in outputs):
            self._leave(sequence)
        return outputs

    def _land(self, sequence: Sequence) -> None:
        """Its step has ended: what was aborted meanwhile goes."""
        sequence.in_flight = False
        self._drop_aborted(sequence)

    def _drop_aborted(self, sequence: Sequence) -> None:
        sequence.forks = tuple(fork for fork in sequence.forks if fork not in sequence.aborted_forks)
        if not sequence.forks:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if sequence is self._stuck:
            self._stuck = None
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.tables.free(sequence)

    def _end_copies(self, copies: Iterable[tuple[int, int]]) -> None:
        for source, _ in copies:
            self.pool.free([source])

    # Blocks.

    def _gap(self, sequence: Sequence) -> int:
        return sequence.num_tokens - sequence.num_computed_tokens

    def _places(self) -> int:
        """How many more sequences may run."""
        return self.config.max_num_seqs - self.num_reserved_forks - sum(len(s.forks) for s in self.running)

    def _chunk(self, sequence: Sequence, count: int) -> ScheduledChunk:
        start = sequence.num_computed_tokens
        end = start + count
        unscored_end = min(end, sequence.num_scored_tokens + sequence.num_unscored_tokens)
        return ScheduledChunk(
            sequence,
            start,
            tuple(sequence.token_ids[start:end]),
            tuple(sequence.block_ids),
            sampled=range(count - 1, count) if end == sequence.num_tokens else range(0),
            scored=range(max(0, sequence.num_scored_tokens - start), unscored_end - start),
        )

    def _start_over(self, sequence: Sequence) -> None:
        sequence.uncached, sequence.num_cached_tokens = True, 0
        self._wait_again(sequence)
        self.waiting = deque(sorted(self.waiting, key=lambda s: (s.num_cached_tokens is None, s.arrival)))

    def _preempt(self, victim: Sequence) -> None:
        self._wait_again(victim)
        self.num_preemptions += 1

    def _wait_again(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.tables.free(sequence)
        self.waiting.appendleft(sequence)
