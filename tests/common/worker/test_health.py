"""A worker is stuck when it has work and finishes no step for long; an idle one, and a slow one, are healthy."""

import pytest

from common.engine.batch import EngineLoad
from common.rpc.pb import types_pb2
from common.worker.health import Health

PATIENCE_S = 10.0


class Watched:
    """A health, and a clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.health = Health(lambda: self.now, PATIENCE_S)

    def look(self, after_s: float, steps: int = 5, running: int = 1, waiting: int = 0, blocked: bool = False) -> bool:
        self.now += after_s
        self.health.look(EngineLoad(running=running, waiting=waiting, steps=steps, blocked=blocked))
        return self.health.stuck


@pytest.mark.parametrize(("silence_s", "stuck"), [(9.9, False), (10.0, False), (10.1, True)])
def test_work_without_a_step_for_longer_than_the_patience_is_stuck(silence_s: float, stuck: bool) -> None:
    watched = Watched()
    assert not watched.look(1.0)
    assert watched.look(silence_s) is stuck
    assert watched.health.live() == ((False, "no step gets done") if stuck else (True, "ok"))


def test_a_step_makes_it_healthy_again() -> None:
    watched = Watched()
    watched.look(1.0, steps=5)
    assert watched.look(11.0, steps=5)
    assert not watched.look(1.0, steps=6)
    assert watched.health.ready() == (True, "ok")


@pytest.mark.parametrize(("running", "waiting", "blocked"), [(0, 0, True), (0, 3, True), (1, 0, True), (0, 3, False)])
def test_idle_is_healthy_and_so_is_who_waits_for_blocks(running: int, waiting: int, blocked: bool) -> None:
    """Also in the middle of a prompt, when others hold what its next chunk needs."""
    watched = Watched()
    for _ in range(5):
        assert not watched.look(100.0, running=running, waiting=waiting, blocked=blocked)
    assert not watched.look(1.0, running=1)  # the first work after a long rest has its time


def test_a_model_with_slow_steps_gets_ten_times_its_slowest() -> None:
    watched = Watched()
    for _ in range(99):
        watched.health.on_step(0.1, 1)
    watched.health.on_step(4.0, 1)
    assert watched.health.limit_s == pytest.approx(40.0)
    watched.look(1.0)
    assert not watched.look(39.0)
    assert watched.look(2.0)


def test_one_slow_step_of_many_does_not_stretch_the_limit() -> None:
    watched = Watched()
    watched.health.on_step(60.0, 1)
    for _ in range(600):
        watched.health.on_step(0.1, 1)
    assert watched.health.limit_s == PATIENCE_S


def test_what_tokens_and_steps_take_is_measured_apart_and_told() -> None:
    health = Health(lambda: 0.0, PATIENCE_S, token_s=0.002)
    for _ in range(100):
        health.on_step(0.256, 256)
        health.on_step(0.025, 1)
        health.on_step(0.0, 0)  # copies alone
    load = types_pb2.Load(running=3)
    health.tell(load)
    assert (load.token_s, load.step_s) == (pytest.approx(0.001, rel=1e-3), pytest.approx(0.025))
    assert (load.running, load.draining, load.stuck) == (3, False, False)
    first = Health(lambda: 0.0, PATIENCE_S)
    first.on_step(0.5, 100)
    assert first.token_s == 0.005


def test_a_change_is_told_once() -> None:
    watched = Watched()
    load = EngineLoad(running=1, steps=5)
    assert not watched.health.look(load)
    watched.now += 11.0
    assert watched.health.look(load)
    assert not watched.health.look(load)


def test_who_drains_is_alive_and_not_ready_and_who_has_no_step_loop_is_neither() -> None:
    watched = Watched()
    watched.health.draining = True
    assert (watched.health.live(), watched.health.ready()) == ((True, "ok"), (False, "draining"))
    watched.health.draining, watched.health.dead = False, True
    assert watched.health.live() == watched.health.ready() == (False, "the step loop has ended")
