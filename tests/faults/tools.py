"""Small things that the fault tests share."""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.support.checkpoints import make_random_checkpoint

T = TypeVar("T")
MEET_S = 10.0  # for a stage of a request


def tiny_model(directory: Path) -> Path:
    """A random checkpoint of 5 ms a step and 6 KiB of KV a token."""
    return make_random_checkpoint(
        directory / "tiny",
        hidden_size=256,
        num_layers=6,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        intermediate_size=512,
    )


async def eventually(condition: Callable[[], Awaitable[Any]], what: str, timeout_s: float = 30.0) -> Any:
    """The condition's first true value."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not (value := await condition()):
        assert loop.time() < deadline, f"not so after {timeout_s:g} s: {what}"
        await asyncio.sleep(0.005)
    return value


def total(text: str, metric: str, **labels: str) -> float:
    """The sum of a metric's series that have these labels, in Prometheus' text."""
    result = 0.0
    for found in re.finditer(rf"^kvrelay:{metric}\{{(.*)\}} (\S+)$", text, re.MULTILINE):
        if all(f'{key}="{value}"' in found[1] for key, value in labels.items()):
            result += float(found[2])
    return result


class Disturbed(AssertionError):
    """What was to be seen was not: on a busy machine a worker may be missed for a moment, fault or no fault."""


async def met(condition: Callable[[], Awaitable[Any]], what: str) -> Any:
    """The condition's first true value; Disturbed if it does not come to that."""
    try:
        return await eventually(condition, what, MEET_S)
    except AssertionError as error:
        raise Disturbed(str(error)) from error


async def undisturbed(work: Callable[[], Awaitable[T]], tries: int = 3) -> T:
    """The work's result, at the first try that is not disturbed. Any other failure is one at once."""
    for _ in range(tries - 1):
        with contextlib.suppress(Disturbed):
            return await work()
    return await work()


def open_files(text: str) -> int:
    """A process's open file descriptors, in Prometheus' text."""
    found = re.search(r"^process_open_fds (\S+)", text, re.MULTILINE)
    assert found, "the process tells no metrics"
    return int(float(found[1]))
