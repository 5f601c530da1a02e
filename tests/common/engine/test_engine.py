"""The engine answers while it computes: no call waits for a forward pass, a failing one costs its batch alone."""

import itertools
import threading
from collections.abc import Callable

import pytest
import torch

from common.engine.batch import StepOutput
from common.engine.engine import Engine
from common.engine.scheduler import Scheduler
from common.errors import EngineFailure, InvalidRequest
from tests.support.builders import (
    ToyRunner,
    alone,
    assert_all_free,
    engine,
    kv_of,
    scheduler,
    sequence,
    tokens,
    waits,
)

torch.set_num_threads(1)
LONG_S = 60.0  # a wait that nothing ended
SOON_S = 10.0  # bound of what ends at once


class BlockedRunner(ToyRunner):
    """Stays in its forward pass until told to go."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.entered, self.go = threading.Event(), threading.Event()

    def forward(self, batch):
        self.entered.set()
        assert self.go.wait(LONG_S)
        return super().forward(batch)


class FailingRunner(ToyRunner):
    """Fails the forward passes whose numbers are given."""

    def __init__(self, sched: Scheduler, *fails: int) -> None:
        super().__init__(sched.pool.num_blocks, sched.pool.block_size)
        self.fails, self.numbers = fails, itertools.count()

    def forward(self, batch):
        if next(self.numbers) in self.fails:
            raise RuntimeError("out of memory")
        return super().forward(batch)


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    return thread, results


def soon(call: Callable[[], object]) -> object:
    """The result of a call that must not wait for anything."""
    thread, results = in_thread(call)
    thread.join(SOON_S)
    assert results, "the call waits, or raised"
    return results[0]


def steps(one: Engine, count: int = 100) -> list[StepOutput]:
    """Steps until nothing can be computed."""
    outputs = []
    while (output := one.step()) is not None:
        outputs.append(output)
        assert len(outputs) < count
    return outputs


def written(outputs: list[StepOutput], key: str = "s", fork: int = 0) -> list[int]:
    found = [t for output in outputs for t in output.tokens if (t.sequence.key, t.fork) == (key, fork)]
    assert [t.index for t in found] == list(range(found[0].index, found[0].index + len(found)))
    return [t.sample.token_id for t in found]


# Calls during a step.


def test_no_call_waits_for_a_forward_pass():
    sched = scheduler(max_num_seqs=8)
    runner = BlockedRunner.of(sched)
    one = engine(sched, runner)
    held = sched.pool.allocate(2)
    running = sequence(5, key="running")
    one.add(running)
    step, outputs = in_thread(lambda: one.step(LONG_S))
    assert runner.entered.wait(SOON_S)

    pulled, dropped = (sequence([n, n, n], output=[9], key="pulled") for n in (2, 3))
    soon(lambda: one.add(sequence([1], key="waiting")))
    admitted = soon(lambda: one.reserve([pulled]))
    cancelled = soon(lambda: one.reserve([dropped]))
    runner.write(admitted.block_ids, 0, kv_of((2, 2, 2)))
    soon(lambda: one.admit(admitted))
    soon(lambda: one.cancel(cancelled))
    soon(lambda: one.abort("waiting"))
    soon(lambda: one.abort("running", [5]))
    soon(lambda: one.free_blocks(held))
    soon(one.wake)
    soon(one.cached_hashes)
    soon(lambda: one.check(5, 1))
    load = soon(one.load)
    assert (load.running, load.waiting, load.reserved_blocks) == (2, 0, 0)
    assert step.is_alive()

    runner.go.set()
    step.join(SOON_S)
    outputs += steps(one)
    assert written(outputs, "running") == alone(running)
    assert pulled.output_ids == [9, *alone(sequence([2, 2, 2, 9], max_tokens=3))]
    assert_all_free(sched)


@pytest.mark.parametrize("forks", [None, [0]])
def test_what_is_aborted_during_a_step_leaves_with_it(forks):
    sched = scheduler()
    runner = BlockedRunner.of(sched)
    one = engine(sched, runner)
    one.add(sequence(5))
    step, outputs = in_thread(lambda: one.step(LONG_S))
    assert runner.entered.wait(SOON_S)
    soon(lambda: one.abort("s", forks))
    assert sched.pool.num_free == sched.pool.num_blocks - 2  # still written to
    runner.go.set()
    step.join(SOON_S)
    assert (outputs[0].tokens, outputs[0].failed) == ((), ())
    assert_all_free(sched)


# Waits of an idle step.


def test_an_idle_step_computes_nothing_and_gives_none():
    assert engine(scheduler()).step() is None


@pytest.mark.parametrize("call", ["add", "admit", "cancel", "abort", "free_blocks", "wake"])
def test_every_change_ends_the_wait_of_an_idle_step(call):
    sched = scheduler()
    one = engine(sched)
    held = sched.pool.allocate(1)
    reservation = one.reserve([sequence(5, output=[1], key="pulled")])
    changes = {
        "add": lambda: one.add(sequence(3)),
        "admit": lambda: one.admit(reservation),
        "cancel": lambda: one.cancel(reservation),
        "abort": lambda: one.abort("nobody"),
        "free_blocks": lambda: one.free_blocks(held),
        "wake": one.wake,
    }
    idle = waits(one)
    thread, results = in_thread(lambda: one.step(LONG_S))
    assert idle.wait(SOON_S)
    changes[call]()
    thread.join(SOON_S)
    assert results == [None]
    assert (one.step() is not None) == (call in ("add", "admit"))


def test_a_wake_that_comes_before_the_wait_ends_it_too():
    one = engine(scheduler())
    one.wake()
    assert soon(lambda: one.step(LONG_S)) is None


def test_a_wake_ends_one_wait_only():
    one = engine(scheduler())
    one.wake()
    one.step(LONG_S)
    idle = waits(one)
    thread, results = in_thread(lambda: one.step(LONG_S))
    assert idle.wait(SOON_S)
    one.wake()
    thread.join(SOON_S)
    assert results == [None]


# Failures.


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_failing_forward_pass_ends_its_batch_and_no_other(fails):
    sched = scheduler(max_num_batched_tokens=4)
    one = engine(sched, FailingRunner(sched, fails))
    first, second = sequence(3, key="first", forks=(0, 1)), sequence([5], key="second", max_tokens=2)
    one.add(first)
    outputs = [one.step() for _ in range(fails + 1)]
    one.add(second)
    outputs += steps(one)
    failed = [(s.key, fork, type(error), error.message) for o in outputs for s, error in o.failed for fork in s.forks]
    message = "forward pass failed: out of memory"
    assert failed == [("first", fork, EngineFailure, message) for fork in (0, 1)]
    assert sum(len(output.tokens) for output in outputs) == 2 * fails + 2
    assert written(outputs, "second") == alone(second)
    assert_all_free(sched)


def test_what_a_failing_pass_wrote_is_never_found():
    sched = scheduler()
    one = engine(sched, FailingRunner(sched, 0))
    for key in ("failing", "again"):
        again = sequence(9, key=key)
        one.add(again)
        outputs = steps(one)
    assert (again.num_cached_tokens, written(outputs, "again")) == (0, alone(again))


@pytest.mark.parametrize("forward", [lambda batch: torch.empty(0, 64), lambda batch: None])
def test_a_runner_that_gives_no_logits_fails_its_batch(forward):
    sched = scheduler()
    runner = ToyRunner.of(sched)
    runner.forward = forward
    one = engine(sched, runner)
    one.add(sequence())
    assert [s.key for s, _ in one.step().failed] == ["s"]
    assert_all_free(sched)


def test_a_resume_after_a_failure_gives_the_rest_of_the_same_answer():
    sched = scheduler()
    one = engine(sched, FailingRunner(sched, 3))
    values = {"temperature": 1.0, "seed": 5, "presence_penalty": 1.0, "max_tokens": 6}
    first = sequence(6, **values)
    one.add(first)
    before = written(steps(one))
    assert 0 < len(before) < 6
    one.add(sequence(6, output=before, **values))
    assert before + written(steps(one)) == alone(first)
    assert_all_free(sched)


def test_a_bug_in_the_scheduler_is_no_failed_batch():
    sched = scheduler()
    one = engine(sched)
    one.add(sequence())

    def update(*_):
        raise ZeroDivisionError

    sched.update = update
    with pytest.raises(ZeroDivisionError):
        one.step()


# Times and bounds.


def test_times_are_those_of_the_clock_given():
    sched = scheduler()
    clock = itertools.count(100.0)
    one = engine(sched, clock=lambda: next(clock))
    first = sequence(12)
    one.add(first)
    output = one.step()
    assert (first.arrived_s, first.started_s, output.step_s) == (100.0, 101.0, 1.0)
    one.step()
    assert first.started_s == 101.0
    steps(one)
    pulled = sequence(3, output=[1], key="pulled")
    one.admit(one.reserve([pulled]))
    assert pulled.arrived_s == pulled.started_s == next(clock) - 1


@pytest.mark.parametrize(
    ("num_tokens", "forks", "field"),
    [
        (1, 1, None),
        (31, 4, None),
        (32, 1, "prompt_ids"),
        (33, 1, "prompt_ids"),
        (0, 1, "prompt_ids"),
        (5, 0, "n"),
        (5, 5, "n"),
    ],
)
def test_what_could_never_run_is_refused_by_name(num_tokens, forks, field):
    one = engine(scheduler(max_model_len=32, max_num_seqs=4))
    if field is None:
        one.check(num_tokens, forks)
        return
    with pytest.raises(InvalidRequest, match=r"prompt|n must be") as caught:
        one.check(num_tokens, forks)
    assert caught.value.field == field


def test_load_and_events_come_with_each_step():
    sched = scheduler()
    one = engine(sched)
    one.add(sequence(9, max_tokens=1))
    one.add(sequence([1], key="other", max_tokens=1))
    first, second = steps(one)
    assert (first.num_batched_tokens, first.load.running, first.load.waiting_tokens) == (8, 1, 2)
    assert (len(first.stored), first.removed) == (2, ())
    assert (second.num_batched_tokens, second.load.running, second.load.free_blocks) == (2, 0, 16)
    assert sorted(first.stored) == sorted(one.cached_hashes())


# A hand-over, end to end.


@pytest.mark.parametrize("count", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("forks", [(0,), (0, 1, 2)])
def test_prefill_here_and_decode_there_is_the_same_as_one_engine(count, forks):
    values = {"temperature": 1.0, "max_tokens": 5, "seed": 2}
    prefill_scheduler, decode_scheduler = scheduler(), scheduler(num_blocks=24)
    prefill_runner, decode_runner = ToyRunner.of(prefill_scheduler), ToyRunner.of(decode_scheduler)
    prefill, decode = engine(prefill_scheduler, prefill_runner), engine(decode_scheduler, decode_runner)

    prompt = sequence(count, forks=forks, prefill_only=True, **values)
    prefill.add(prompt)
    outputs = steps(prefill)
    ((_, held),) = outputs[-1].parked
    pulled = [sequence(count, output=[t.sample.token_id], forks=(t.fork,), **values) for t in outputs[-1].tokens]
    reservation = decode.reserve(pulled)
    for source, destination in zip(held, reservation.block_ids, strict=True):
        decode_runner.kv[destination] = prefill_runner.kv[source]
    prefill.free_blocks(held)
    prefill_runner.poison(range(16))
    decode.admit(reservation)
    steps(decode)
    assert [one.output_ids for one in pulled] == [alone(prompt, fork) for fork in forks]
    assert_all_free(prefill_scheduler)
    assert_all_free(decode_scheduler)


def test_calls_from_many_threads_lose_nothing():
    sched = scheduler(num_blocks=12, max_num_seqs=4)
    one = engine(sched)
    wanted = {f"{n}.{k}": sequence(tokens(4 + n, seed=n % 2), key=f"{n}.{k}") for n in range(4) for k in range(15)}

    def client(number: int) -> None:
        for k in range(15):
            one.add(wanted[f"{number}.{k}"])
            if k % 5 == 4:
                one.abort(f"{number}.{k}")
            if (reservation := one.reserve([sequence(5, output=[1], key="pulled")])) is not None:
                one.cancel(reservation)
            one.load()

    clients = [in_thread(lambda number=number: client(number))[0] for number in range(4)]
    outputs = []
    for _ in range(5000):
        alive = any(thread.is_alive() for thread in clients)
        output = one.step(0.01)
        if output is not None:
            outputs.append(output)
        elif not alive and not sched.waiting:
            break
    ended = [t.sequence.key for o in outputs for t in o.tokens if t.finish_reason]
    assert len(set(ended)) == len(ended)
    assert {key for key in wanted if int(key.split(".")[1]) % 5 != 4} <= set(ended)
    for key in ended:
        assert wanted[key].output_ids == alone(wanted[key])
    assert_all_free(sched)
