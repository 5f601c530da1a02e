"""A row that gives no token concerns its sequence alone: once more without cached KV, then an error."""

import logging
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import Tensor

from common.engine.batch import BadRow, Batch, ScheduledChunk, StepOutput
from common.engine.engine import Engine
from common.engine.sampler import NOT_FINITE, Sampler
from common.engine.scheduler import Scheduler
from common.engine.sequence import Sequence
from common.errors import SequenceFailure
from tests.support.builders import EOS, ToyRunner, alone, answers, assert_all_free, engine, kv_of, scheduler, sequence

SPOILT = np.uint64(2**64 - 1)  # a KV entry that stands for NaN


class SpoiltRunner(ToyRunner):
    """The logits of what reads a spoilt entry, and of the sequences named, are NaN."""

    def __init__(self, sched: Scheduler, *hopeless: str) -> None:
        super().__init__(sched.pool.num_blocks, sched.pool.block_size)
        self.hopeless = hopeless
        self.asked: list[str] = []  # whose row was bad

    def spoil(self, block_ids: Iterable[int]) -> None:
        self.kv[list(block_ids)] = SPOILT

    def _compute(self, chunk: ScheduledChunk) -> list[Tensor]:
        rows = super()._compute(chunk)
        seen = [self.read(chunk.block_ids, chunk.start + row + 1) for row in (*chunk.scored, *chunk.sampled)]
        bad = [chunk.sequence.key in self.hopeless or SPOILT in entries for entries in seen]
        return [row * torch.nan if spoilt else row for row, spoilt in zip(rows, bad, strict=True)]

    def where_not_finite(self, chunk: ScheduledChunk) -> str:
        self.asked.append(chunk.sequence.key)
        return "layer 0"


def run(one: Engine, count: int = 60) -> list[StepOutput]:
    """Steps until nothing can be computed."""
    outputs: list[StepOutput] = []
    while (output := one.step()) is not None:
        outputs.append(output)
        assert len(outputs) < count
    return outputs


def failures(outputs: list[StepOutput]) -> list[tuple[str, type, str]]:
    return [(one.key, type(error), error.message) for output in outputs for one, error in output.failed]


@pytest.mark.parametrize("forks", [(0,), (0, 1)])
@pytest.mark.parametrize("prefill_only", [False, True])
def test_it_fails_alone_and_after_one_more_try(forks: tuple[int, ...], prefill_only: bool) -> None:
    sched = scheduler(24, max_num_seqs=6)
    runner = SpoiltRunner(sched, "bad")
    one = engine(sched, runner)
    bad = sequence(9, key="bad", forks=forks, prefill_only=prefill_only, temperature=1.0)
    others = [sequence([1], key="short"), sequence([7, 8, 9], key="long", max_tokens=9, temperature=1.0)]
    for each in (others[0], bad, others[1]):
        one.add(each)
    outputs = run(one)
    assert failures(outputs) == [("bad", SequenceFailure, NOT_FINITE)]
    assert not SequenceFailure.resumable  # no other worker is asked, with other neighbours
    assert runner.asked == ["bad", "bad"]
    assert {key: written for (key, _), written in answers(outputs).items()} == {s.key: alone(s) for s in others}
    assert not set(bad.block_hashes) & set(one.cached_hashes())
    assert_all_free(sched)


def test_spoilt_kv_is_computed_anew_and_found_no_more() -> None:
    sched = scheduler(24, max_num_seqs=6)
    runner = SpoiltRunner(sched)
    one = engine(sched, runner)
    one.add(sequence(9, key="first"))
    run(one)
    runner.spoil(sched.pool._block_of.values())
    outputs = []
    for key in ("second", "third"):
        one.add(sequence(9, key=key))
        one.add(sequence([3], key=f"beside {key}", max_tokens=6))
        outputs += run(one)
    assert failures(outputs) == []
    assert runner.asked == ["second"]
    written = {key: tokens for (key, _), tokens in answers(outputs).items()}
    assert written["second"] == written["third"] == alone(sequence(9))
    assert written["beside second"] == written["beside third"] == alone(sequence([3], max_tokens=6))
    cached = {token.sequence.key: token.sequence.num_cached_tokens for o in outputs for token in o.tokens}
    assert (cached["second"], cached["third"]) == (0, 8)
    assert_all_free(sched)


def test_an_answer_that_has_begun_goes_on_where_it_was() -> None:
    sched = scheduler()
    runner = SpoiltRunner(sched)
    one = engine(sched, runner)
    asked = sequence(6, max_tokens=7, temperature=1.0, frequency_penalty=1.0)
    one.add(asked)
    outputs = [one.step() for _ in range(3)]
    runner.spoil(asked.block_ids)
    outputs += run(one)
    assert (runner.asked, failures(outputs)) == (["s"], [])
    assert answers(outputs) == {("s", 0): alone(asked)}
    assert_all_free(sched)


def test_spoilt_kv_from_elsewhere_is_computed_here() -> None:
    sched = scheduler()
    runner = SpoiltRunner(sched)
    one = engine(sched, runner)
    prompt = sequence(5, max_tokens=5)
    pulled = sequence(5, output=alone(prompt)[:1], max_tokens=5)
    reservation = one.reserve([pulled])
    runner.write(reservation.block_ids, 0, kv_of(tuple(prompt.prompt_ids)))
    runner.kv[reservation.block_ids[0], 2] = SPOILT
    one.admit(reservation)
    assert failures(run(one)) == []
    assert (pulled.output_ids, runner.asked) == (alone(prompt), ["s"])
    assert_all_free(sched)


def test_prompt_scores_that_are_bad_are_told_once_and_right() -> None:
    told = []
    for spoils in (False, True):
        sched = scheduler(max_scored_tokens=3)
        runner = SpoiltRunner(sched)
        one = engine(sched, runner)
        asked = sequence(9, prompt_logprobs=1)
        one.add(asked)
        outputs = [one.step()]
        if spoils:
            runner.spoil(asked.block_ids)
        outputs += run(one)
        assert (len(runner.asked), failures(outputs)) == (spoils, [])
        told.append([(s.first + i, one) for o in outputs for s in o.scores for i, one in enumerate(s.logprobs)])
    assert told[0] == told[1]
    assert [position for position, _ in told[1]] == list(range(1, 9))


def test_who_starts_over_waits_before_those_that_have_not_begun() -> None:
    sched = scheduler(24, max_num_batched_tokens=8)
    company = [sequence([number], key=str(number), max_tokens=9) for number in range(1, 6)]
    for one in company:
        sched.add(one)
    batch = sched.schedule()
    bad = [chunk.sequence for chunk in batch.chunks]
    assert [one.key for one in bad] == ["1", "2", "3", "4"]
    sched.update(batch, [BadRow(one, "because") for one in bad])
    assert [one.key for one in sched.waiting] == ["1", "2", "3", "4", "5"]
    assert (sched.running, sched.pool.num_free, sched.num_preemptions) == ([], 24, 0)


@pytest.mark.parametrize("tries", [1, 2])
def test_what_is_aborted_while_its_row_goes_bad_is_gone(tries: int) -> None:
    sched = scheduler()
    one = engine(sched, SpoiltRunner(sched, "s"))
    one.add(sequence(3))
    outputs = [one.step() for _ in range(tries - 1)]
    batch, begun_s = one.begin()
    one.abort("s")
    outputs.append(one.finish(batch, begun_s))
    assert failures(outputs) == []
    assert one.step() is None
    assert_all_free(sched)


def nothing_left(**values: object) -> Sequence:
    return sequence([1, 2], key="bad", min_tokens=1, max_tokens=3, ignore_eos=False, **values)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_leaves_no_token_is_bad_and_no_other(temperature: float) -> None:
    """The only token that is possible is the one that must not come yet."""
    only_end = torch.full((8,), -torch.inf)
    only_end[EOS] = 1.0
    company = [sequence([4], key="before"), nothing_left(temperature=temperature), sequence([5], key="behind")]
    batch = Batch(tuple(ScheduledChunk(one, 0, (1,), (0,), sampled=range(1)) for one in company))
    plain = torch.arange(8.0)
    before, bad, behind = Sampler((EOS,))(torch.stack([plain, only_end, plain]), batch)
    assert [one.token_id for one in (*before, *behind)] == [7, 7]
    assert isinstance(bad, BadRow)
    assert (bad.sequence.key, bad.reason, type(bad.error)) == ("bad", "no token could be drawn", ValueError)


def test_an_exception_in_one_row_fails_its_sequence_alone() -> None:
    sched = scheduler(eos_token_ids=(EOS, 300))  # beyond the vocabulary: an index error where it is masked
    one = engine(sched, SpoiltRunner(sched))
    one.add(nothing_left())
    other = sequence([4], key="other")
    one.add(other)
    outputs = run(one)
    assert failures(outputs) == [("bad", SequenceFailure, "no token could be drawn")]
    assert answers(outputs) == {("other", 0): alone(other)}
    assert_all_free(sched)


def test_the_log_says_who_why_where_and_whether_there_is_another_try(caplog: pytest.LogCaptureFixture) -> None:
    sched = scheduler()
    one = engine(sched, SpoiltRunner(sched, "router/request/1"))
    one.add(sequence(3, key="router/request/1"))
    with caplog.at_level(logging.WARNING, "kvrelay.engine"):
        run(one)
    wanted = {"key": "router/request/1", "reason": NOT_FINITE, "where": "layer 0"}
    assert [record.values for record in caplog.records] == [{**wanted, "again": again} for again in (True, False)]
