"""A container's first process: the kernel takes no default action on its signals, and gives it every orphan.

So the work goes on in a child, which is a process like any other, and the first one does nothing but pass signals on
to it, take in who has ended, and end as it does.
"""

import contextlib
import os
import signal

SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}


def leave_first_place() -> None:
    """Where this process has pid 1, goes on in a child. To be called before there are threads."""
    if os.getpid() != 1:
        return
    waited = SIGNALS | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    os._exit(_attend(child, waited))


def _attend(child: int, waited: set[signal.Signals]) -> int:
    """Until the child has ended; the exit status, as a shell tells it."""
    while True:
        received = signal.sigwaitinfo(waited)
        if received.si_signo != signal.SIGCHLD:
            if received.si_code <= 0:  # those of a terminal, from the kernel itself, the child gets as well
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, received.si_signo)
            continue
        while True:  # one signal may stand for several
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            if pid == 0:
                break
