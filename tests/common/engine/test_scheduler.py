"""Whatever comes, goes and fails: every answer is the one of a sequence alone, nothing starves, no block is lost.

The scheduler drives a toy model whose next token depends on every KV entry it reads back through the
block table (see builders), so that a wrong, stale, shared or early freed block gives other tokens.
"""

import pytest
import torch

from common.engine.batch import Batch
from common.engine.limits import SchedulerConfig, finish
from common.errors import ConfigError, EngineFailure
from common.sampling import FinishReason
from tests.support.builders import EOS, Stepper, alone, answers, assert_all_free, kv_of, scheduler, sequence, tokens

torch.set_num_threads(1)


# Chunk borders and block borders.


@pytest.mark.parametrize("count", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_a_prompt_is_computed_in_chunks_of_the_budget(count):
    stepper = Stepper(scheduler())
    one = sequence(count)
    stepper.scheduler.add(one)
    chunks, progress = [], []
    for _ in range(-(-count // 8)):
        batch, output = stepper.step()
        chunks += [(c.start, len(c.token_ids), len(c.block_ids), bool(c.sampled)) for c in batch.chunks]
        progress += [computed for _, computed in output.progress]
    starts = range(0, count, 8)
    assert chunks == [(s, min(8, count - s), -(-min(s + 8, count) // 4), s + 8 >= count) for s in starts]
    assert progress == list(starts[1:])
    stepper.run()
    assert_all_free(stepper.scheduler)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 7, 8, 9, 16, 17])
@pytest.mark.parametrize("cached", [0, 4, 5, 8, 20])
def test_a_hit_ends_at_a_full_block_before_the_last_token(count, cached):
    stepper = Stepper(scheduler())
    if cached:
        stepper.scheduler.add(sequence(tokens(cached), key="earlier", max_tokens=1))
        stepper.run()
    one = sequence(count)
    stepper.scheduler.add(one)
    batch, _ = stepper.step()
    hit = min(cached // 4, (count - 1) // 4) * 4
    assert (one.num_cached_tokens, batch.chunks[0].start) == (hit, hit)
    assert batch.chunks[0].token_ids == tuple(tokens(count)[hit : hit + 8])
    later = stepper.run()
    written = [sample.token_id for sample in (t.sample for o in later for t in o.tokens)]
    assert one.output_ids == alone(one)
    assert one.output_ids[-len(written) :] == written
    assert_all_free(stepper.scheduler)


@pytest.mark.parametrize(("count", "blocks"), [(15, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_hits_of_real_blocks_of_sixteen(count, blocks):
    stepper = Stepper(scheduler(block_size=16, max_num_batched_tokens=64, max_model_len=64))
    for key in ("first", "second"):
        one = sequence(count, key=key, max_tokens=1)
        stepper.scheduler.add(one)
        stepper.run()
    assert one.num_cached_tokens == blocks * 16


@pytest.mark.parametrize(
    ("values", "hit"),
    [({}, 8), ({"root": b"other"}, 0), ({"prompt": [*tokens(7), 1, 1]}, 4), ({"prompt": [1, *tokens(8)]}, 0)],
)
def test_only_the_same_tokens_under_the_same_root_hit(values, hit):
    stepper = Stepper(scheduler())
    stepper.scheduler.add(sequence(9))
    stepper.run()
    one = sequence(**({"prompt": 9} | values))
    stepper.scheduler.add(one)
    stepper.run()
    assert one.num_cached_tokens == hit
    assert one.output_ids == alone(one)


def test_output_is_found_again_by_the_next_turn():
    stepper = Stepper(scheduler())
    first = sequence(6, max_tokens=8)
    stepper.scheduler.add(first)
    stepper.run()
    second = sequence(first.token_ids)
    stepper.scheduler.add(second)
    stepper.run()
    assert second.num_cached_tokens == 12  # of 14 tokens 13 were computed


def test_without_caching_nothing_is_shared_and_answers_are_the_same():
    stepper = Stepper(scheduler(enable_caching=False))
    for _ in range(2):
        one = sequence(9)
        stepper.scheduler.add(one)
        stepper.run()
        assert (one.num_cached_tokens, one.output_ids) == (0, alone(one))
    assert_all_free(stepper.scheduler)


def test_cached_tokens_are_those_found_when_the_sequence_first_ran():
    stepper = Stepper(scheduler(num_blocks=8))
    holder = stepper.scheduler.pool.allocate(8)
    one = sequence(9)
    stepper.scheduler.add(one)
    assert stepper.scheduler.schedule() == Batch(())
    stepper.scheduler.pool.publish(holder[0], one.block_hashes[0])  # computed by somebody meanwhile
    stepper.runner.write(holder, 0, kv_of(tuple(tokens(4))))
    stepper.scheduler.pool.free(holder)
    stepper.run()
    assert one.num_cached_tokens == 4
    assert one.output_ids == alone(one)


# Who gets on.


def test_short_gaps_go_first_and_prompts_take_the_rest_of_the_budget():
    stepper = Stepper(scheduler())
    decoding = [sequence([n, n], key=str(n), max_tokens=9) for n in (1, 2)]
    for one in decoding:
        stepper.scheduler.add(one)
    stepper.step()
    stepper.scheduler.add(sequence(12, key="long"))
    batch = stepper.scheduler.schedule()
    assert [(c.sequence.key, len(c.token_ids)) for c in batch.chunks] == [("1", 1), ("2", 1), ("long", 6)]


def test_an_older_prompt_does_not_hold_up_a_newer_short_gap():
    stepper = Stepper(scheduler())
    stepper.scheduler.add(sequence(24, key="long", max_tokens=1))
    stepper.step()
    stepper.scheduler.admit(stepper.scheduler.reserve([sequence([], output=[1], key="pulled", max_tokens=2)]))
    batch, _ = stepper.step()
    assert [(c.sequence.key, len(c.token_ids)) for c in batch.chunks] == [("pulled", 1), ("long", 7)]
    stepper.run()
    assert_all_free(stepper.scheduler)


def test_a_preempted_sequence_comes_back_before_anyone_new():
    stepper = Stepper(scheduler(num_blocks=4, max_model_len=16))
    for n in (1, 2):
        stepper.scheduler.add(sequence([n, n, n], key=str(n), max_tokens=9))
    while not stepper.scheduler.num_preemptions:
        stepper.step()
        assert stepper.scheduler.running
    stepper.scheduler.add(sequence([3], key="3", max_tokens=1))
    served: list[str] = []
    for _ in range(20):
        served += [chunk.sequence.key for chunk in stepper.step()[0].chunks]
    assert served.index("2") < served.index("3")
    assert_all_free(stepper.scheduler)


def test_a_prompt_gets_a_token_a_step_beside_as_many_running_sequences_as_fit():
    stepper = Stepper(scheduler(max_num_batched_tokens=4, max_num_seqs=4, max_model_len=16))
    for n in (1, 2, 3):
        stepper.scheduler.add(sequence([n], key=str(n), max_tokens=12))
    stepper.step()
    one = sequence(4, key="prompt", max_tokens=1)
    stepper.scheduler.add(one)
    outputs = [stepper.step()[1] for _ in range(4)]
    assert [t.sequence.key for t in outputs[-1].tokens][-1] == "prompt"
    stepper.run()
    assert_all_free(stepper.scheduler)


@pytest.mark.parametrize(("places", "runs"), [(2, False), (3, True), (4, True)])
def test_a_sequence_waits_until_there_is_a_place_for_each_fork(places, runs):
    stepper = Stepper(scheduler(max_num_seqs=places + 1))
    stepper.scheduler.add(sequence([1], key="running", max_tokens=9))
    stepper.step()
    stepper.scheduler.add(sequence([2], key="three", forks=(0, 1, 2), max_tokens=1))
    batch = stepper.scheduler.schedule()
    assert ("three" in [c.sequence.key for c in batch.chunks]) == runs
    stepper.finish(batch)
    stepper.run()
    assert_all_free(stepper.scheduler)


def test_the_newest_is_preempted_and_comes_back_with_the_same_answer():
    stepper = Stepper(scheduler(num_blocks=4, max_model_len=16))
    old, new = (sequence([n, n, n], key=str(n), max_tokens=9) for n in (1, 2))
    stepper.scheduler.add(old)
    stepper.scheduler.add(new)
    outputs = stepper.run()
    assert stepper.scheduler.num_preemptions > 0
    assert answers(outputs) == {("1", 0): alone(old), ("2", 0): alone(new)}
    ended = [t.sequence.key for o in outputs for t in o.tokens if t.finish_reason]
    assert ended == ["1", "2"]
    assert (old.num_cached_tokens, new.num_cached_tokens) == (0, 0)  # what it finds of its own is no hit
    assert_all_free(stepper.scheduler)


def test_nothing_new_comes_in_while_a_running_sequence_finds_no_block():
    stepper = Stepper(scheduler(num_blocks=8))
    one = sequence(16, key="long", max_tokens=1)
    stepper.scheduler.add(one)
    stepper.step()
    held = stepper.scheduler.pool.allocate(5)  # leaves one block; the next chunk takes two
    stepper.scheduler.add(sequence([1], key="short", max_tokens=1))
    assert stepper.scheduler.schedule() == Batch(())
    assert (stepper.scheduler.load().running, stepper.scheduler.load().blocked) == (1, True)
    assert stepper.scheduler.reserve([sequence([2, 3], key="other")]) is None
    stepper.scheduler.pool.free(held)
    assert [c.sequence.key for c in stepper.step()[0].chunks] == ["long"]
    assert not stepper.scheduler.load().blocked
    stepper.run()
    assert_all_free(stepper.scheduler)


@pytest.mark.parametrize("waits_for", ["blocks", "places"])
def test_no_reservation_overtakes_a_sequence_that_waits_for_room(waits_for):
    stepper = Stepper(scheduler(num_blocks=8, max_num_seqs=2))
    held = stepper.scheduler.pool.allocate(6 if waits_for == "blocks" else 0)
    stepper.scheduler.add(sequence([1], key="running", max_tokens=5))
    stepper.step()
    stepper.scheduler.add(sequence(8, key="head", forks=(0,) if held else (0, 1), max_tokens=2))
    assert [c.sequence.key for c in stepper.step()[0].chunks] == ["running"]
    other = sequence([2], key="other")
    assert stepper.scheduler.reserve([other]) is None
    stepper.scheduler.abort("head")
    reservation = stepper.scheduler.reserve([other])  # at once: no step may come to find out
    assert reservation is not None
    stepper.scheduler.cancel(reservation)
    stepper.scheduler.pool.free(held)
    stepper.run()
    assert_all_free(stepper.scheduler)


# Ends.

EOS_STOP = (FinishReason.STOP, None)
LENGTH = (FinishReason.LENGTH, None)
GOES_ON = (None, None)


@pytest.mark.parametrize(
    ("written", "values", "end"),
    [
        (1, {}, GOES_ON),
        (3, {}, LENGTH),  # max_tokens
        (4, {}, LENGTH),
        (1, {"last": EOS}, EOS_STOP),
        (3, {"last": EOS}, EOS_STOP),  # where both hold, it stopped
        (1, {"last": 2}, EOS_STOP),  # one of several
        (1, {"last": EOS, "ignore_eos": True}, GOES_ON),
        (3, {"last": EOS, "ignore_eos": True}, LENGTH),
        (1, {"last": 9, "stop_token_ids": (8, 9)}, (FinishReason.STOP, 9)),
        (1, {"last": 9, "stop_token_ids": (8, 9), "ignore_eos": True}, (FinishReason.STOP, 9)),
        (1, {"last": EOS, "stop_token_ids": (EOS,)}, EOS_STOP),
        (1, {"last": EOS, "stop_token_ids": (EOS,), "ignore_eos": True}, (FinishReason.STOP, EOS)),
        (1, {"last": 7, "stop_token_ids": (8, 9)}, GOES_ON),
        (1, {"last": EOS, "min_tokens": 1}, GOES_ON),
        (2, {"last": EOS, "min_tokens": 1}, EOS_STOP),
        (2, {"last": 9, "stop_token_ids": (9,), "min_tokens": 2}, GOES_ON),
        (3, {"last": 9, "stop_token_ids": (9,), "min_tokens": 2}, (FinishReason.STOP, 9)),
        (3, {"last": EOS, "min_tokens": 3}, LENGTH),
        (2, {"prompt": 29}, GOES_ON),  # 31 of 32 tokens
        (2, {"prompt": 30}, LENGTH),  # max_model_len
        (2, {"prompt": 30, "last": EOS}, EOS_STOP),
        (1, {"prompt": 31}, LENGTH),
        (1, {"prompt": 31, "min_tokens": 2}, LENGTH),
    ],
)
def test_what_ends_a_sequence(written, values, end):
    values = {"last": 5, "ignore_eos": False, "max_tokens": 3, "prompt": 4} | values
    last = values.pop("last")
    one = sequence(output=[5] * (written - 1) + [last], **values)
    assert finish(one, SchedulerConfig(max_model_len=32, eos_token_ids=(EOS, 2))) == end


def test_a_failed_step_ends_its_sequences_and_only_them():
    stepper = Stepper(scheduler(max_num_batched_tokens=4))
    stepper.scheduler.add(sequence(3, key="a", forks=(0, 1)))
    stepper.scheduler.add(sequence([1, 2], key="b"))
    stepper.step()
    failing = stepper.scheduler.schedule()
    assert {c.sequence.key for c in failing.chunks} == {"a", "b"}
    assert failing.copies
    waiting = sequence([1, 2], key="c")
    stepper.scheduler.add(waiting)
    error = EngineFailure("broken")
    stepper.scheduler.abort("b")
    output = stepper.scheduler.fail(failing, error)
    assert [(s.key, s.forks, e) for s, e in output.failed] == [("a", (0,), error), ("a", (1,), error)]
    assert output.num_batched_tokens == 0
    stepper.run()
    assert waiting.output_ids == alone(waiting)
    assert_all_free(stepper.scheduler)


@pytest.mark.parametrize(("budget", "places", "ok"), [(4, 4, True), (5, 4, True), (3, 4, False)])
def test_the_budget_must_have_a_token_for_each_place(budget, places, ok):
    if ok:
        SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=places)
    else:
        with pytest.raises(ConfigError, match="max_num_batched_tokens") as caught:
            SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=places)
        assert caught.value.field == "max_num_batched_tokens"


@pytest.mark.parametrize("places", [1, 4])
def test_a_sequence_of_the_greatest_length_runs_in_the_smallest_pool(places):
    stepper = Stepper(scheduler(num_blocks=8, max_num_seqs=places))
    for key in range(3):
        stepper.scheduler.add(
            sequence([key + 1], key=str(key), forks=tuple(range(places)), max_tokens=99, temperature=1.0)
        )
    outputs = stepper.run(most=3 * places * 32)
    assert len(answers(outputs)) == 3 * places
    assert {len(ids) for ids in answers(outputs).values()} == {31}
    assert_all_free(stepper.scheduler)
