"""Proves that a child ends when its parent is killed, and at once when the parent is gone already."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.process_tools import is_running, linux, wait_until_ended

STARTS_A_CHILD = """
import functools, os, subprocess, sys
from cluster.parent_death import die_with_parent
child = subprocess.Popen(["sleep", "60"], preexec_fn=functools.partial(die_with_parent, os.getpid()))
print(child.pid, flush=True)
child.wait()
"""


LAUNCHES_A_CHILD = """
import subprocess
from cluster.parent_death import dying_with_parent
child = subprocess.Popen(dying_with_parent(["sleep", "60"]))
print(child.pid, flush=True)
child.wait()
"""


@linux
def test_foreign_program_dies_with_its_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS_A_CHILD], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child_pid = int(parent.stdout.readline())
        assert is_running(child_pid)
        parent.kill()
    wait_until_ended(child_pid)


@linux
def test_a_program_launched_to_die_with_its_parent_does_so_under_the_pid_it_was_started_with() -> None:
    with subprocess.Popen([sys.executable, "-c", LAUNCHES_A_CHILD], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child_pid = int(parent.stdout.readline())
        command = Path(f"/proc/{child_pid}/cmdline")
        deadline = time.monotonic() + 10
        while not command.read_text().startswith("sleep"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        parent.kill()
    wait_until_ended(child_pid)


@linux
def test_child_of_another_parent_than_expected_ends_at_once() -> None:
    code = f"from cluster.parent_death import die_with_parent; die_with_parent({os.getpid() + 1}); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


@linux
def test_child_of_the_expected_parent_goes_on() -> None:
    code = f"from cluster.parent_death import die_with_parent; print(die_with_parent({os.getpid()}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "True\n")
