"""Whatever comes, goes and fails at any time: every answer is the one of a sequence alone, and no block is lost.

Random requests run against a toy model whose next token depends on every KV entry that it reads back
through the block table (see builders), so that a wrong, stale, shared or early freed block gives
other tokens; what holds each block is counted anew after every step.
"""

from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.engine.batch import Batch, StepOutput
from common.engine.block_table import Reservation
from common.engine.sampler import Sampler
from common.engine.sequence import Sequence
from common.errors import EngineFailure
from common.sampling import FinishReason, SamplingParams
from tests.support.builders import VOCAB, ToyRunner, answer, assert_all_free, kv_of, scheduler, tokens

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
SIZE = 4  # tokens of a block
MAX_LEN = 24


@dataclass(eq=False)
class Request:
    """What was asked for under one key, and what came of it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    skip: int  # output tokens that were there from the start
    prefill_only: bool
    open: set[int]  # forks that neither ended nor were aborted nor failed
    written: dict[int, list[int]] = field(default_factory=dict)

    def expected(self, fork: int) -> tuple[tuple[int, ...], FinishReason]:
        return answer(self.prompt, self.params, fork, MAX_LEN)


@dataclass(eq=False)
class Pulling:
    reservation: Reservation
    request: Request
    key: str
    source: tuple[Sequence, tuple[int, ...]] | None  # parked here, else from another pool
    pulled: bool = False


PROMPTS = st.builds(
    lambda stream, shared, tail: (*tokens(shared, stream), *tail),
    st.integers(0, 1),
    st.integers(1, 14),
    st.lists(st.integers(1, VOCAB - 1), max_size=2),
)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([1, 2, 5, 9, 20]),
    min_tokens=st.integers(0, 1),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2),
    stop_token_ids=st.sampled_from([(), (), (), tuple(range(1, VOCAB, 9))]),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests on tiny pools, with aborts, hand-overs and failures at any time, also during a step."""

    @initialize(
        extra=st.integers(0, 4),
        places=st.sampled_from([1, 2, 3, 4, 6]),
        budget=st.integers(0, 6),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, extra: int, places: int, budget: int, caching: bool) -> None:
        self.scheduler = scheduler(
            MAX_LEN // SIZE + extra,
            block_size=SIZE,
            max_num_batched_tokens=places + budget,
            max_num_seqs=places,
            max_model_len=MAX_LEN,
            enable_caching=caching,
        )
        self.pool, self.config = self.scheduler.pool, self.scheduler.config
        self.runner, self.sampler = ToyRunner.of(self.scheduler), Sampler(self.config.eos_token_ids)
        self.requests: dict[str, Request] = {}
        self.added: list[Sequence] = []  # not served yet, in order
        self.pulls: list[Pulling] = []
        self.parked: list[tuple[Sequence, tuple[int, ...]]] = []
        self.batch: Batch | None = None
        self.samples = None  # of the batch, when computed early
        self.index: set[bytes] = set()  # the prefix cache, from the events
        self.cached_kv: dict[bytes, list[int]] = {}

    # Requests.

    def new_request(self, prompt, params, forks, skip=0, prefill_only=False) -> tuple[str, Request]:
        key = f"r{len(self.requests)}"
        self.requests[key] = Request(prompt, params, skip, prefill_only, set(forks))
        return key, self.requests[key]

    @rule(prompt=PROMPTS, params=PARAMS, forks=st.integers(1, 3), prefill_only=st.booleans(), skip=st.integers(0, 3))
    def add(self, prompt, params, forks, prefill_only, skip) -> None:
        """A new request with n forks, or (skip > 0) a single fork that resumes after some output."""
        if skip:
            forks = (forks - 1,)
            skip = min(skip, len(answer(prompt, params, forks[0], MAX_LEN)[0]) - 1)
        else:
            forks = tuple(range(min(forks, self.config.max_num_seqs)))
        key, _ = self.new_request(prompt, params, forks, skip, prefill_only)
        output = answer(prompt, params, forks[0], MAX_LEN)[0][:skip]
        one = Sequence(key, [*prompt, *output], len(prompt), params, forks, prefill_only, b"root")
        self.scheduler.add(one)
        self.added.append(one)

    @precondition(lambda self: any(request.open for request in self.requests.values()))
    @rule(data=st.data(), forks=st.none() | st.sets(st.integers(0, 2), max_size=2), now=st.booleans())
    def abort(self, data, forks, now) -> None:
        """Of a request in the engine (`now`: in the batch); whose KV is still on its way ends by a cancel."""
        pulling = {pull.key for pull in self.pulls}
        computing = {chunk.sequence.key for chunk in self.batch.chunks} if self.batch and now else self.requests.keys()
        keys = [key for key in self.requests if self.requests[key].open and key in computing - pulling]
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        self.scheduler.abort(key, forks)
        self.requests[key].open -= self.requests[key].open if forks is None else forks
        self.added = [one for one in self.added if self.requests[one.key].open]

    # Hand-over.

    def reserve_for(self, prompt, params, forks, source=None) -> None:
        firsts = {fork: answer(prompt, params, fork, MAX_LEN)[0][:1] for fork in forks}
        sequences = [
            Sequence(f"r{len(self.requests)}", [*prompt, *first], len(prompt), params, (fork,), root=b"root")
            for fork, first in firsts.items()
        ]
        places = self.config.max_num_seqs - self.occupied()
        reservation = self.scheduler.reserve(sequences)
        if reservation is None:
            idle = not (self.scheduler.running or self.scheduler.waiting or self.pulls or self.parked)
            assert not (idle and places >= len(forks)), "an empty engine has room"
            return
        assert places >= len(forks)
        key, request = self.new_request(prompt, params, forks, skip=1)
        self.runner.poison(reservation.block_ids[reservation.num_cached_blocks :])
        self.pulls.append(Pulling(reservation, request, key, source))

    @rule(prompt=PROMPTS, params=PARAMS, forks=st.sampled_from([1, 1, 2, 3]))
    def reserve(self, prompt, params, forks) -> None:
        forks = range(min(forks, self.config.max_num_seqs))
        live = [fork for fork in forks if len(answer(prompt, params, fork, MAX_LEN)[0]) > 1]
        if live:
            self.reserve_for(prompt, params, live)

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def reserve_parked(self, data) -> None:
        """The same pool as holder and reader: as decode would go on after prefill."""
        source = data.draw(st.sampled_from(self.parked))
        one = source[0]
        request = self.requests[one.key]
        live = [fork for fork in one.forks if len(request.expected(fork)[0]) > 1]
        if not request.skip and live:
            self.reserve_for(request.prompt, request.params, live, source)

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), done=st.booleans())
    def pull(self, data, done) -> None:
        """Copies whole blocks out of a holder's pool."""
        pull = data.draw(st.sampled_from(self.pulls))
        if pull.source in self.parked:
            holder, blocks = self.runner, pull.source[1]
        else:
            holder, blocks = ToyRunner(8, SIZE), (5, 1, 7, 0, 3, 2)
            holder.write(blocks, 0, kv_of(pull.request.prompt))
        reservation = pull.reservation
        for index in range(reservation.num_cached_blocks, len(reservation.block_ids)):
            self.runner.kv[reservation.block_ids[index]] = holder.kv[blocks[index]]
        pull.pulled = True
        if done:
            self.admit()

    @precondition(lambda self: any(pull.pulled for pull in self.pulls))
    @rule()
    def admit(self) -> None:
        pull = next(pull for pull in self.pulls if pull.pulled)
        self.pulls.remove(pull)
        self.scheduler.admit(pull.reservation)

    @precondition(lambda self: self.pulls)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        pull = data.draw(st.sampled_from(self.pulls))
        self.pulls.remove(pull)
        self.scheduler.cancel(pull.reservation)
        pull.request.open.clear()

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def free_parked(self, data) -> None:
        one, blocks = self.parked.pop(data.draw(st.integers(0, len(self.parked) - 1)))
        assert self.runner.read(blocks, one.num_tokens).tolist() == kv_of(tuple(one.token_ids)).tolist()
        self.pool.free(blocks)

    # Steps.

    @precondition(lambda self: self.batch is None)
    @rule(early=st.booleans())
    def begin_step(self, early: bool) -> None:
        waiting = list(self.scheduler.waiting)
        batch = self.scheduler.schedule()
        self.check_batch(batch, waiting)
        self.batch, self.samples = batch, None
        if early:
            self.compute()

    def compute(self) -> None:
        """The forward pass; nothing that the batch needs may have been freed or be shared by now."""
        self.runner.poison(block for block, count in self.references().items() if count == 0 and not self.cached(block))
        for chunk in self.batch.chunks:
            written = chunk.block_ids[chunk.start // SIZE :]
            assert [self.pool.references(block) for block in written] == [1] * len(written)
            assert not any(self.cached(block) for block in written)
        self.samples = self.sampler(self.runner.forward(self.batch), self.batch)

    @precondition(lambda self: self.batch is not None)
    @rule(fails=st.sampled_from([False] * 7 + [True]))
    def end_step(self, fails: bool) -> None:
        if fails and self.batch.chunks:
            self.fail_step()
            return
        if self.samples is None:
            self.compute()
        batch, self.batch = self.batch, None
        self.check_output(self.scheduler.update(batch, self.samples), batch)

    @precondition(lambda self: self.scheduler.running or self.scheduler.waiting)
    @rule(count=st.integers(1, 8))
    def whole_steps(self, count: int) -> None:
        for _ in range(count):
            if self.batch is None:
                self.begin_step(early=False)
            self.end_step(fails=False)

    def fail_step(self) -> None:
        batch, self.batch = self.batch, None
        named = [(chunk.sequence.key, fork) for chunk in batch.chunks for fork in chunk.sequence.forks]
        expected = [(key, fork) for key, fork in named if fork in self.requests[key].open]
        output = self.scheduler.fail(batch, EngineFailure("broken"))
        assert [(one.key, fork) for one, _ in output.failed for fork in one.forks] == expected
        for key, fork in expected:
            self.requests[key].open.discard(fork)
        self.check_output(output, batch)

    # Promises.

    def cached(self, block: int) -> bool:
        return self.pool._hash_of[block] is not None

    def occupied(self) -> int:
        """Places taken: one a fork, from a sequence's first step or a reservation on."""
        return sum(len(s.forks) for s in self.scheduler.running) + sum(len(p.reservation.forks) for p in self.pulls)

    def references(self) -> dict[int, int]:
        """What each block is held by: sequences, reservations, parked sequences and copies that aren't done."""
        counts = Counter(block for s in self.scheduler.running for block in s.block_ids)
        counts.update(block for pull in self.pulls for block in pull.reservation.block_ids)
        counts.update(block for _, blocks in self.parked for block in blocks)
        counts.update(source for source, _ in (self.batch.copies if self.batch else ()))
        return {block: counts[block] for block in range(self.pool.num_blocks)}

    def check_batch(self, batch: Batch, waiting: list[Sequence]) -> None:
        chunked = [chunk.sequence for chunk in batch.chunks]
        assert len(set(chunked)) == len(chunked)
        assert batch.num_tokens <= self.config.max_num_batched_tokens
        for chunk in batch.chunks:
            one, end = chunk.sequence, chunk.start + len(chunk.token_ids)
            assert chunk.start == one.num_computed_tokens < end <= one.num_tokens
            assert chunk.token_ids == tuple(one.token_ids[chunk.start : end])
            count = len(chunk.token_ids)
            assert chunk.sampled == (range(count - 1, count) if end == one.num_tokens else range(0))
            assert chunk.block_ids == tuple(one.block_ids)
            assert len(chunk.block_ids) == -(-end // SIZE)
            if one in self.added:  # its first service
                assert one is self.added.pop(0), "first come, first served"
                assert all(other in self.added for other in self.scheduler.waiting), "the preempted come back first"
                assert chunk.start % SIZE == 0
                assert one.num_cached_tokens == chunk.start
        came_in = [one for one in chunked if one in waiting]
        left_out = [one for one in self.scheduler.running if one not in chunked]
        assert not (came_in and left_out and batch.num_tokens < self.config.max_num_batched_tokens)
        note(f"batch {[(c.sequence.key, c.start, len(c.token_ids), c.block_ids) for c in batch.chunks]} {batch.copies}")

    def check_output(self, output: StepOutput, batch: Batch) -> None:
        for token in output.tokens:
            request = self.requests[token.sequence.key]
            assert token.fork in request.open, "no output after an abort"
            expected, reason = request.expected(token.fork)
            written = request.written.setdefault(token.fork, [])
            assert token.index == request.skip + len(written)
            assert token.sample.token_id == expected[token.index]
            written.append(token.sample.token_id)
            last = token.index == len(expected) - 1
            assert token.finish_reason == (reason if last else None)
            is_stop = last and token.sample.token_id in request.params.stop_token_ids
            assert token.stop_token_id == (token.sample.token_id if is_stop and reason == FinishReason.STOP else None)
            if last or request.prefill_only:
                request.open.discard(token.fork)
        live = {t.sequence.key for t in output.tokens if t.finish_reason is None}
        live &= {key for key, request in self.requests.items() if request.prefill_only}
        assert [one.key for one, _ in output.parked] == [c.sequence.key for c in batch.chunks if c.sequence.key in live]
        for one, blocks in output.parked:
            assert self.runner.read(blocks, one.num_tokens).tolist() == kv_of(tuple(one.token_ids)).tolist()
        self.parked += output.parked
        for one, computed in output.progress:
            assert computed == one.num_computed_tokens < one.num_tokens
        assert not set(output.stored) & set(output.removed)
        self.index = (self.index - set(output.removed)) | set(output.stored)
        assert self.index == set(self.pool.cached_hashes())
        assert output.load == self.scheduler.load()

    @invariant()
    def no_block_is_lost_or_wrongly_shared(self) -> None:
        references = self.references()
        assert {block: self.pool.references(block) for block in references} == references
        assert self.pool.num_free == sum(count == 0 for count in references.values())
        assert not any(one.block_ids for one in self.scheduler.waiting)
        assert self.scheduler.num_reserved_blocks == sum(len(p.reservation.block_ids) for p in self.pulls)

    @invariant()
    def no_more_run_than_have_a_place(self) -> None:
        assert self.occupied() <= self.config.max_num_seqs

    @invariant()
    def cached_blocks_are_never_written(self) -> None:
        now = {h: self.runner.kv[block].tolist() for h, block in self.pool._block_of.items()}
        for block_hash, entries in now.items():
            assert self.cached_kv.setdefault(block_hash, entries) == entries, "the content of a hash changed"

    @invariant()
    def sequences_run_in_order_of_arrival(self) -> None:
        arrivals = [one.arrival for one in self.scheduler.running]
        assert arrivals == sorted(arrivals)

    def teardown(self) -> None:
        """Everything that is open ends, within a bound of steps."""
        if not hasattr(self, "scheduler"):
            return
        while self.pulls:
            if self.pulls[0].pulled:
                self.admit()
            else:
                pull = self.pulls.pop(0)
                self.scheduler.cancel(pull.reservation)
                pull.request.open.clear()
        for _ in range(2 + MAX_LEN * sum(len(request.open) for request in self.requests.values())):
            if self.batch is None and not (self.scheduler.running or self.scheduler.waiting):
                break
            for _, blocks in self.parked:
                self.pool.free(blocks)
            self.parked.clear()
            if self.batch is None:
                self.begin_step(early=False)
            self.end_step(fails=False)
            self.no_block_is_lost_or_wrongly_shared()
            self.no_more_run_than_have_a_place()
        for key, request in self.requests.items():
            assert not request.open, f"{key} starved"
        for _, blocks in self.parked:
            self.pool.free(blocks)
        assert_all_free(self.scheduler)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
