"""Child processes that are bound to some of this process's cores, and answer with lines of JSON."""

import asyncio
import functools
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

from cluster.children import describe_exit
from cluster.parent_death import die_with_parent
from common.errors import ConfigError, KVRelayError

ERROR = "error"  # the key of an answer that is one
THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def cpus(cores: int) -> tuple[int, ...]:
    """The last of those that this process may use: interrupts tend to go to the first."""
    allowed = sorted(os.sched_getaffinity(0))
    if cores > len(allowed):
        raise ConfigError(f"this process may use {len(allowed)} cores, not {cores}", field="cores")
    return tuple(allowed[-cores:])


async def run_pinned(command: Sequence[str], cores: int, timeout_s: float, stdin: str = "") -> list[dict[str, Any]]:
    """The JSON objects among the lines that the command prints; its errors go to standard error.

    To be called in the main thread, whose end is the child's.
    """
    shown = shlex.join(command)
    shown = shown if len(shown) <= 120 else f"{shown[:117]}..."
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {name: str(cores) for name in THREAD_SETTINGS},
            preexec_fn=functools.partial(_prepare, os.getpid(), cpus(cores)),
        )
    except (OSError, ValueError) as error:
        raise KVRelayError(f"can't run {shown!r}: {error}") from error
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate(stdin.encode())
    except TimeoutError as error:
        raise KVRelayError(f"{shown} has not ended within {timeout_s:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    rows = [row for line in output.splitlines() if (row := _object(line)) is not None]
    for row in rows:
        if ERROR in row:
            raise KVRelayError(str(row[ERROR]))
    if process.returncode:
        raise KVRelayError(f"{shown}: {describe_exit(process.returncode)}")
    return rows


def run_child(main: Callable[[], None]) -> None:
    """The main function of a child of ours: an error of ours is its last answer."""
    try:
        main()
    except KVRelayError as error:
        print(json.dumps({ERROR: error.message}), flush=True)


def _prepare(parent: int, places: tuple[int, ...]) -> None:
    die_with_parent(parent)
    os.sched_setaffinity(0, places)


def module_command(module: str, options: dict[str, Any] | None = None) -> list[str]:
    """Runs a module of ours, with its options as JSON if there are any."""
    return [sys.executable, "-P", "-m", module, *([] if options is None else [json.dumps(options)])]


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
