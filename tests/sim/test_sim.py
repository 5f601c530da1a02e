"""Schedules of crashes, freezes and lost messages break no promise, and a seed is one schedule.

A few hundred here; `make sim` runs as many as are wanted, .ci/run ten thousand.
"""

import os
import subprocess
import sys

from sim.world import run_seed
from tests.support.paths import ROOT

SCHEDULES = 400


def run_sim(*arguments: str, timeout_s: float = 900.0, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sim", *arguments],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def test_every_schedule_keeps_every_promise():
    done = run_sim("--schedules", str(SCHEDULES), "--jobs", "1")
    assert done.returncode == 0, done.stderr + done.stdout


def test_a_seed_is_one_schedule_in_every_process():
    one, other = (run_sim("--digest", "--schedules", "15", PYTHONHASHSEED=seed).stdout for seed in ("1", "2"))
    assert one == other
    assert len({line.split()[1] for line in one.splitlines()}) == 15


def test_a_schedule_does_not_depend_on_those_before_it():
    first = run_seed(7, trace=True)
    run_seed(8)
    again = run_seed(7, trace=True)
    assert (first.digest, first.trace) == (again.digest, again.trace)


def test_tracing_changes_nothing():
    traced, silent = run_seed(11, trace=True), run_seed(11)
    assert traced.counts == silent.counts
