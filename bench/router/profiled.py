"""One of our roles under cProfile, by the CPU time of its main thread: waiting takes none.

python -m bench.router.profiled FILE MODULE [FLAG ...]: counts from the signal BEGIN on; FILE is written when
MODULE.main ends.
"""

import cProfile
import importlib
import pstats
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from cluster.children import ChildSpec
from cluster.plan import Stages

BEGIN = signal.SIGUSR1
Place = tuple[str, int, str]  # file, line, function


def profiled(stages: Stages, name: str, file: Path) -> Stages:
    """The same processes, but one of them under the profile. Its command is `python -P -m MODULE FLAG ...`."""

    def wrapped(spec: ChildSpec) -> ChildSpec:
        if spec.name != name:
            return spec
        python, *options, module = spec.command[:4]
        return replace(spec, command=(python, *options, __name__, str(file), module, *spec.command[4:]))

    return tuple(tuple(map(wrapped, stage)) for stage in stages)


def top(file: Path, count: int, tokens: int) -> list[dict[str, Any]]:
    """The functions that took most of their own, with their microseconds and calls a token."""
    stats = cast(Mapping[Place, tuple[Any, ...]], cast(Any, pstats.Stats(str(file))).stats)
    total_s = sum(own_s for _, _, own_s, *_ in stats.values()) or 1.0
    rows = sorted(stats.items(), key=lambda row: row[1][2], reverse=True)[:count]
    return [
        {
            "function": describe(place),
            "share": round(own_s / total_s, 3),
            "us_token": round(own_s / tokens * 1e6, 2),
            "calls_token": round(calls / tokens, 3),
        }
        for place, (_, calls, own_s, *_) in rows
    ]


def describe(place: Place) -> str:
    """The last two parts of its file's path, its line and name; of a built-in the name alone."""
    file, line, name = place
    return f"{'/'.join(Path(file).parts[-2:])}:{line} {name}" if line else name


def main(argv: Sequence[str]) -> int:
    file, module, *flags = argv
    profile = cProfile.Profile(time.thread_time)
    role = importlib.import_module(f"{module}.__main__")
    signal.signal(BEGIN, lambda *_: profile.clear())
    profile.enable()
    try:
        status: int = role.main(flags)
        return status
    finally:
        profile.disable()
        profile.dump_stats(file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
