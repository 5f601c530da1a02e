"""What tests of child processes share."""

import sys
import time
from pathlib import Path

import pytest

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
