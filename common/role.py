"""How every role starts and ends: flags, logs, an event loop, and one clear line when it can't."""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import uvloop

from common.errors import KVRelayError
from common.log import setup_logging
from common.settings import add_arguments


def run_role(
    role: str,
    configs: Sequence[type],
    main: Callable[[argparse.Namespace], Coroutine[Any, Any, int]],
    argv: Sequence[str] | None,
) -> int:
    """Parses the configs' flags and runs main; returns the exit status."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # what matters of its news, our own log tells
    parser = argparse.ArgumentParser(prog=f"kvrelay {role}", description=f"Runs one {role} process.")
    try:
        add_arguments(parser, *configs)
        arguments = parser.parse_args(argv)
        setup_logging(arguments.log_level, role, getattr(arguments, "worker_id", ""))
        return uvloop.run(main(arguments))
    except KVRelayError as error:
        print(f"error: {error.message}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130


def announce_ready(role: str, address: str, **details: Any) -> None:
    """The one line on stdout, for whoever started this process."""
    print(f"ready {role} {address} {json.dumps(details)}", flush=True)


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets; a second one ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop
