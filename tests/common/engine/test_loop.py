"""The loop hands over every step in order, wakes at once, stops when told to, and never dies in silence."""

import queue
import threading

import pytest
import torch

from common.engine.batch import StepOutput
from common.engine.engine import Engine, EngineLoop
from tests.support.builders import ToyRunner, alone, assert_all_free, engine, scheduler, sequence, waits

torch.set_num_threads(1)
LONG_S = 60.0  # the idle wait, so that what comes soon was not just polled for
SOON_S = 10.0  # bound of what happens at once


class Stage:
    """An engine in a loop, and what the loop handed over."""

    def __init__(self, one: Engine) -> None:
        self.outputs: queue.Queue[StepOutput] = queue.Queue()
        self.deaths: queue.Queue[BaseException] = queue.Queue()
        self.threads: set[str] = set()
        self.loop = EngineLoop(one, [self.on_output], self.deaths.put, idle_s=LONG_S)

    def on_output(self, output: StepOutput) -> None:
        self.threads.add(threading.current_thread().name)
        self.outputs.put(output)

    def answer(self) -> list[int]:
        """Tokens up to the first end of a sequence."""
        written: list[int] = []
        while True:
            for token in self.outputs.get(timeout=SOON_S).tokens:
                assert token.index == len(written)
                written.append(token.sample.token_id)
                if token.finish_reason is not None:
                    return written


def expected() -> list[int]:
    return alone(sequence())


def test_what_was_added_before_the_start_and_while_idle_is_answered():
    sched = scheduler()
    one = engine(sched)
    stage, idle = Stage(one), waits(one)
    one.add(sequence())
    stage.loop.start()
    assert stage.answer() == expected()
    assert idle.wait(SOON_S)
    one.add(sequence(key="later"))
    assert stage.answer() == expected()
    assert stage.loop.stop(SOON_S)
    assert stage.threads == {"engine"}
    assert stage.deaths.empty()
    assert_all_free(sched)


def test_an_idle_loop_stops_at_once():
    one = engine(scheduler())
    stage, idle = Stage(one), waits(one)
    stage.loop.start()
    assert idle.wait(SOON_S)
    assert stage.loop.stop(SOON_S)
    assert stage.loop.stop(SOON_S)
    assert stage.deaths.empty()


def test_a_stop_just_before_the_loop_waits_is_not_missed():
    one = engine(scheduler())
    stage = Stage(one)
    between, go = threading.Event(), threading.Event()
    step = one.step

    def late_step(wait_s):
        between.set()
        assert go.wait(LONG_S)
        return step(wait_s)

    one.step = late_step
    stage.loop.start()
    assert between.wait(SOON_S)
    assert not stage.loop.stop(0.0)  # it is told, and the loop has looked already
    go.set()
    assert stage.loop.stop(SOON_S)


def test_a_stop_waits_for_the_step_and_says_when_that_takes_too_long():
    sched = scheduler()
    runner = ToyRunner.of(sched)
    forward, entered, go = runner.forward, threading.Event(), threading.Event()

    def blocked(batch):
        entered.set()
        assert go.wait(LONG_S)
        return forward(batch)

    runner.forward = blocked
    one = engine(sched, runner)
    stage = Stage(one)
    one.add(sequence(max_tokens=4))
    stage.loop.start()
    assert entered.wait(SOON_S)
    assert not stage.loop.stop(0.01)
    go.set()
    assert stage.loop.stop(SOON_S)
    assert len(stage.outputs.get_nowait().tokens) == 1
    assert stage.outputs.empty()  # no step began after the stop
    assert stage.deaths.empty()
    one.abort("s")
    assert_all_free(sched)


def test_a_failing_forward_pass_does_not_end_the_loop():
    sched = scheduler()
    runner = ToyRunner.of(sched)
    forward, failures = runner.forward, [RuntimeError("out of memory")]
    runner.forward = lambda batch: (_ for _ in ()).throw(failures.pop()) if failures else forward(batch)
    one = engine(sched, runner)
    stage = Stage(one)
    one.add(sequence(key="failing"))
    stage.loop.start()
    assert [s.key for s, _ in stage.outputs.get(timeout=SOON_S).failed] == ["failing"]
    one.add(sequence())
    assert stage.answer() == expected()
    assert stage.loop.stop(SOON_S)
    assert stage.deaths.empty()
    assert_all_free(sched)


@pytest.mark.parametrize("where", ["schedule", "update", "on_output"])
@pytest.mark.parametrize("error", [ZeroDivisionError(), SystemExit()])
def test_a_bug_ends_the_loop_and_is_told(where, error):
    def broken(*args):
        raise error

    sched = scheduler()
    stage = Stage(engine(sched))
    if where == "on_output":
        stage.loop = EngineLoop(engine(sched), [broken, stage.on_output], stage.deaths.put, idle_s=LONG_S)
    else:
        setattr(sched, where, broken)
    sched.add(sequence())
    stage.loop.start()
    assert stage.deaths.get(timeout=SOON_S) is error
    assert stage.loop.stop(SOON_S)
    assert stage.outputs.empty()
    assert stage.deaths.empty()
