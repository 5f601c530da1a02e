"""Forks, parked sequences and KV from elsewhere share blocks; no answer shows it, and no block outlives its users."""

import pytest
import torch

from common.engine.batch import Batch, StepOutput
from common.engine.block_table import Reservation
from common.sampling import FinishReason
from tests.support.builders import Stepper, alone, answers, assert_all_free, kv_of, scheduler, sequence, tokens

torch.set_num_threads(1)


# Forks.


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 9])
def test_forks_share_a_prompt_and_copy_before_they_write(count):
    stepper = Stepper(scheduler())
    one = sequence(count, forks=(0, 1, 2), temperature=1.0, seed=3, max_tokens=6)
    stepper.scheduler.add(one)
    outputs = [stepper.step()[1] for _ in range(-(-count // 8))]
    shared = one.block_ids
    assert [s.block_ids for s in stepper.scheduler.running] == [shared] * 3
    batch = stepper.scheduler.schedule()
    full = count // 4
    assert [s.block_ids[:full] for s in stepper.scheduler.running] == [shared[:full]] * 3
    written = [s.block_ids[full] for s in stepper.scheduler.running]
    assert len(set(written)) == 3
    assert bool(batch.copies) == (count % 4 > 0)
    outputs += [stepper.finish(batch), *stepper.run()]
    assert answers(outputs) == {("s", fork): alone(one, fork) for fork in (0, 1, 2)}
    assert len({tuple(ids) for ids in answers(outputs).values()}) == 3
    assert_all_free(stepper.scheduler)


@pytest.mark.parametrize("when", ["waiting", "computing", "sampling", "split"])
@pytest.mark.parametrize("prefill_only", [False, True])
def test_an_aborted_fork_gives_no_more_output_and_leaves_the_others_alone(when, prefill_only):
    stepper = Stepper(scheduler())
    one = sequence(12, forks=(0, 1, 2), temperature=1.0, max_tokens=3, prefill_only=prefill_only)
    stepper.scheduler.add(one)
    outputs: list[StepOutput] = []
    for now in ("waiting", "computing", "sampling", "split"):
        batch = Batch(()) if now == "waiting" else stepper.scheduler.schedule()
        if now == when:
            before = answers(outputs).get(("s", 1), [])
            stepper.scheduler.abort("s", [1])
        outputs.append(stepper.finish(batch))
    outputs += stepper.run()
    assert len(before) == (when == "split")
    wanted = {("s", fork): alone(one, fork)[: 1 if prefill_only else 3] for fork in (0, 2)}
    assert answers(outputs) == wanted | ({("s", 1): before} if before else {})
    for _, blocks in (parked for output in outputs for parked in output.parked):
        stepper.scheduler.pool.free(blocks)
    assert_all_free(stepper.scheduler)


@pytest.mark.parametrize("forks", [None, [0, 1], [1, 0, 7]])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_aborting_all_forks_during_a_step_ends_the_sequence_with_it(steps, forks):
    stepper = Stepper(scheduler())
    stepper.scheduler.add(sequence(12, forks=(0, 1)))
    for _ in range(steps):
        stepper.step()
    batch = stepper.scheduler.schedule()
    for _ in range(2):
        stepper.scheduler.abort("s", forks)
    output = stepper.finish(batch)
    assert (output.tokens, output.parked, output.progress) == ((), (), ())
    assert_all_free(stepper.scheduler)


@pytest.mark.parametrize(("key", "forks"), [("other", None), ("s", []), ("s", [5])])
def test_an_abort_of_what_is_not_there_changes_nothing(key, forks):
    stepper = Stepper(scheduler())
    one = sequence()
    stepper.scheduler.add(one)
    stepper.scheduler.abort(key, forks)
    stepper.run()
    assert one.output_ids == alone(one)


def test_an_aborted_fork_gives_its_place_back():
    stepper = Stepper(scheduler(max_num_seqs=3))
    stepper.scheduler.add(sequence(12, forks=(0, 1)))
    stepper.step()
    stepper.scheduler.abort("s", [0])
    stepper.scheduler.add(sequence([1], key="two", forks=(0, 1)))
    assert {c.sequence.key for c in stepper.step()[0].chunks} == {"s", "two"}
    stepper.run()
    assert_all_free(stepper.scheduler)


# Prefill only.


def test_a_prefilled_sequence_is_parked_with_all_its_blocks():
    stepper = Stepper(scheduler())
    one = sequence(10, forks=(0, 1), prefill_only=True, temperature=1.0)
    stepper.scheduler.add(one)
    outputs = stepper.run()
    ((parked, blocks),) = outputs[-1].parked
    assert (parked, one.block_ids) == (one, [])  # they are the receiver's now
    assert stepper.runner.read(blocks, 10).tolist() == kv_of(tuple(one.token_ids)).tolist()
    assert [(t.fork, t.index, t.sample.token_id) for t in outputs[-1].tokens] == [
        (fork, 0, alone(one, fork)[0]) for fork in (0, 1)
    ]
    assert [stepper.scheduler.pool.references(block) for block in blocks] == [1] * 3
    stepper.scheduler.pool.free(blocks)
    assert_all_free(stepper.scheduler)


def test_a_prefilled_sequence_is_parked_for_the_forks_that_go_on():
    first, second = (alone(sequence(10, temperature=1.0), fork)[0] for fork in (0, 1))
    assert first != second
    for stop, reasons in ((first, [FinishReason.STOP, None]), (second, [None, FinishReason.STOP])):
        stepper = Stepper(scheduler())
        one = sequence(10, forks=(0, 1), prefill_only=True, temperature=1.0, stop_token_ids=(stop,))
        stepper.scheduler.add(one)
        outputs = stepper.run()
        assert [t.finish_reason for t in outputs[-1].tokens] == reasons
        ((_, blocks),) = outputs[-1].parked
        stepper.scheduler.pool.free(blocks)
        assert_all_free(stepper.scheduler)


def test_a_prefilled_sequence_without_a_live_fork_holds_nothing():
    stepper = Stepper(scheduler())
    stepper.scheduler.add(sequence(10, forks=(0, 1), prefill_only=True, max_tokens=1))
    outputs = stepper.run()
    assert [t.finish_reason for t in outputs[-1].tokens] == [FinishReason.LENGTH] * 2
    assert outputs[-1].parked == ()
    assert_all_free(stepper.scheduler)


# KV from elsewhere.


def arrive(stepper: Stepper, reservation: Reservation) -> None:
    """Writes what a holder would send: the KV of all blocks that are not here yet."""
    first = reservation.forks[0]
    known = reservation.num_cached_blocks * stepper.scheduler.pool.block_size
    entries = kv_of(tuple(first.token_ids[:-1]))
    stepper.runner.write(reservation.block_ids, known, entries[known:])


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("cached", [0, 4, 12])
def test_admitted_forks_go_on_as_if_computed_here(count, cached):
    stepper = Stepper(scheduler())
    if cached:
        stepper.scheduler.add(sequence(cached, key="earlier", max_tokens=1))
        stepper.run()
    whole = sequence(count, temperature=1.0, max_tokens=6)
    forks = [
        sequence(count, output=alone(whole, fork)[:1], forks=(fork,), temperature=1.0, max_tokens=6) for fork in (0, 1)
    ]
    reservation = stepper.scheduler.reserve(forks)
    assert reservation is not None
    assert reservation.num_cached_blocks == min(cached, count) // 4
    assert len(reservation.block_ids) == -(-count // 4)
    arrive(stepper, reservation)
    stepper.scheduler.admit(reservation)
    assert [fork.num_cached_tokens for fork in forks] == [reservation.num_cached_blocks * 4] * 2
    stepper.run()
    assert [fork.output_ids for fork in forks] == [alone(whole, 0), alone(whole, 1)]
    assert_all_free(stepper.scheduler)


def test_admitted_blocks_are_found_by_others_and_cancelled_ones_are_not():
    stepper = Stepper(scheduler())
    for end, hit in ((stepper.scheduler.cancel, 0), (stepper.scheduler.admit, 8)):
        reservation = stepper.scheduler.reserve([sequence(9, output=[1], key="pulled", max_tokens=2)])
        arrive(stepper, reservation)
        end(reservation)
        one = sequence([*tokens(8), 1, 2, 3])
        stepper.scheduler.add(one)
        stepper.run()
        assert (one.num_cached_tokens, one.output_ids) == (hit, alone(one))
    assert_all_free(stepper.scheduler)


@pytest.mark.parametrize(("free", "granted"), [(2, False), (3, False), (4, True)])
def test_a_reservation_leaves_a_block_for_each_running_sequence(free, granted):
    stepper = Stepper(scheduler(num_blocks=9))
    stepper.scheduler.add(sequence([1], key="running", max_tokens=9))
    stepper.step()
    held = stepper.scheduler.pool.allocate(8 - free)
    reservation = stepper.scheduler.reserve([sequence(9, output=[1], key="pulled")])
    assert (reservation is not None) == granted
    load = stepper.scheduler.load()
    assert (load.reserved_blocks, load.free_blocks) == ((3, free - 3) if granted else (0, free))
    if reservation:
        stepper.scheduler.cancel(reservation)
    stepper.scheduler.pool.free(held)
    stepper.run()
    assert_all_free(stepper.scheduler)


@pytest.mark.parametrize(("forks", "granted"), [(2, True), (3, True), (4, False)])
def test_a_reservation_takes_a_place_for_each_fork(forks, granted):
    stepper = Stepper(scheduler(max_num_seqs=4))
    stepper.scheduler.add(sequence([1], key="running", max_tokens=3))
    stepper.step()
    pulled = [sequence(5, output=[1], forks=(fork,), key="pulled") for fork in range(forks)]
    reservation = stepper.scheduler.reserve(pulled)
    assert (reservation is not None) == granted
    stepper.scheduler.add(sequence([2], key="next", forks=(0, 1), max_tokens=1))
    runs = {c.sequence.key for c in stepper.step()[0].chunks}
    assert ("next" in runs) == (not granted)
    if reservation:
        stepper.scheduler.cancel(reservation)
    stepper.run()
    assert_all_free(stepper.scheduler)
