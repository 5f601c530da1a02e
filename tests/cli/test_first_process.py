"""As a container's first process a command dies of its signals, leaves no zombies and tells how it ended."""

import os
import signal
import subprocess
import sys

from tests.support.paths import ROOT
from tests.support.process_tools import first_of, needs_namespaces

PROGRAM = """
import os, signal, subprocess, sys, time
from cli.first_process import leave_first_place
leave_first_place()
{body}
"""
LOADING = """
print("loading", os.getpid(), flush=True)
time.sleep(60)
"""
ORDERLY = """
def on_term(number, frame):
    print("stopping", flush=True)
    time.sleep(60)
signal.signal(signal.SIGTERM, on_term)
signal.signal(signal.SIGINT, lambda number, frame: os._exit(7))
print("ready", flush=True)
time.sleep(60)
"""
ORPHANS = """
reading, writing = os.pipe()
for _ in range(3):  # each has a child that outlives it
    subprocess.run(["sh", "-c", "sleep 0.1 & echo $!"], pass_fds=[writing], stdout=writing, check=True)
os.close(writing)
orphans = [int(line) for line in os.fdopen(reading)]  # until the last has ended
deadline = time.monotonic() + 20
while any(os.path.exists(f"/proc/{pid}") for pid in orphans) and time.monotonic() < deadline:
    time.sleep(0.01)
print([pid for pid in orphans if os.path.exists(f"/proc/{pid}")], flush=True)
"""


def first_in_a_container(body: str) -> subprocess.Popen[str]:
    """The program with pid 1, in process and mount namespaces of its own."""
    return subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", PROGRAM.format(body=body)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        stdout, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
    return process.returncode, stdout, stderr


@needs_namespaces
def test_a_signal_while_it_loads_ends_it() -> None:
    process = first_in_a_container(LOADING)
    assert process.stdout is not None
    assert process.stdout.readline() == "loading 2\n"
    os.kill(first_of(process), signal.SIGTERM)
    assert ended(process) == (128 + signal.SIGTERM, "", "")


@needs_namespaces
def test_signals_reach_the_program_and_its_exit_status_is_the_containers() -> None:
    process = first_in_a_container(ORDERLY)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.kill(first_of(process), signal.SIGTERM)
    assert process.stdout.readline() == "stopping\n"
    os.kill(first_of(process), signal.SIGINT)
    assert ended(process) == (7, "", "")


@needs_namespaces
def test_orphans_leave_no_zombies() -> None:
    assert ended(first_in_a_container(ORPHANS)) == (0, "[]\n", "")


def test_any_other_process_stays_what_it_is() -> None:
    code = PROGRAM.format(body="print(os.getpid() == int(sys.argv[1]) or os.getppid())")
    process = subprocess.Popen([sys.executable, "-c", code, "0"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.communicate(timeout=30)[0] == f"{os.getpid()}\n"
