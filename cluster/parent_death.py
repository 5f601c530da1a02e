"""Children that don't outlive their parent."""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1  # Linux, prctl(2)

# die_with_parent as a program, which becomes another one.
LAUNCHER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
os.execvp(sys.argv[2], sys.argv[2:])
"""

# Loaded here, because a forked child must not load libraries before it executes something.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(parent_pid: int | None = None) -> bool:
    """Asks the kernel to kill this process when its parent ends; False where the kernel can't.

    As a preexec_fn it survives the exec, so it works for any program:
    `Popen(..., preexec_fn=partial(die_with_parent, os.getpid()))`. A role calls it first of all, with the
    pid its parent gave it. A parent that is gone already is noticed by that pid, and this process ends.

    The kernel means the parent *thread*: the child must be started from a thread that lives as long as
    its process, which a thread of an executor need not.
    """
    if _libc is None:
        return False
    parent_pid = os.getppid() if parent_pid is None else parent_pid
    if _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """A command that runs this one in a child that ends with this process; the pid is the program's in the end.

    Unlike a preexec_fn it needs no fork of this process, which other libraries' threads (gRPC's) may not survive.
    """
    return [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid()), *command]
