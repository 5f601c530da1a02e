"""The `kvrelay` command. Only the module of the subcommand that is asked for gets imported."""

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence

from cli.first_process import leave_first_place
from common.errors import KVRelayError
from common.version import VERSION

COMMANDS = {
    "up": "a cluster on this machine: Redis, workers and the router",
    "router": "one router in this process",
    "prefill": "one prefill worker in this process",
    "decode": "one decode worker in this process",
    "model": "fetch a model, or show what it is",
    "chat": "talk to a running cluster",
    "demo": "a cluster, one short chat, and where its time went",
    "bench": "measures steps, hand-over, serving, router and batching",
}
ROLES = ("router", "prefill", "decode")  # each has a parser of its own
INTERRUPTED = 130
BROKEN_PIPE = 141


def _parser(wanted: str | None) -> argparse.ArgumentParser:
    """All subcommands with their help; the flags only of the wanted one."""
    parser = argparse.ArgumentParser(
        prog="kvrelay", description="Disaggregated LLM serving: prefill and decode in separate pools."
    )
    parser.add_argument("--version", action="version", version=f"kvrelay {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        if name == wanted:
            importlib.import_module(f"cli.{name}").add_parser(commands)
        else:
            commands.add_parser(name, help=text, add_help=name not in ROLES)
    return parser


def _run(argv: Sequence[str]) -> int:
    command = argv[0] if argv else None
    if command in ROLES:
        from cli import roles

        return roles.run(command, argv[1:])
    arguments = _parser(command).parse_args(argv)
    status: int = importlib.import_module(f"cli.{arguments.command}").run(arguments)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    leave_first_place()
    try:
        status = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except KVRelayError as error:
        print(f"error: {' '.join(error.message.split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        with contextlib.suppress(OSError):  # nothing more can be written at the interpreter's end, either
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return status


if __name__ == "__main__":
    sys.exit(main())
