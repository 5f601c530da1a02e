"""What tests of child processes share."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest


def _no_namespaces() -> str:
    """Why there are none; empty where there are."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None:
        return "namespaces need root on Linux, and unshare"
    command = ["unshare", "--pid", "--fork", "--mount-proc", "unshare", "--user", "--map-user=54321", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"namespaces can't be had here: {done.stderr.strip()}" if done.returncode else ""


NO_NAMESPACES = _no_namespaces()
needs_namespaces = pytest.mark.skipif(bool(NO_NAMESPACES), reason=NO_NAMESPACES)
linux = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")


def is_running(pid: int) -> bool:
    """A zombie that nobody has reaped yet has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_ended(pid: int, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.01)


def first_of(unshare: subprocess.Popen[str]) -> int:
    """The process with pid 1 in the namespace that `unshare --pid --fork` has made, by its pid out here."""
    return int(Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text().split()[0])
