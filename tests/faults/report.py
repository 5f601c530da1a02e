"""The fault matrix as a table for people and as JSON lines."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from faults.cases import STAGES, Case, Outcome, Stage


def table(outcomes: Sequence[Outcome]) -> str:
    """A row a target and fault, a column a stage: result, longest stall of the answer, time until all is ready."""
    stages = [stage for stage in (*STAGES, Stage.PULL) if any(one.case.stage is stage for one in outcomes)]
    rows = [["", *stages]]
    for target, fault in dict.fromkeys((one.case.target, one.case.fault) for one in outcomes):
        cells = [_cell([one for one in outcomes if one.case == Case(target, fault, stage)]) for stage in stages]
        rows.append([f"{target}: {fault}", *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    failed = sum(one.result.startswith("failed") for one in outcomes)
    return "\n".join(
        [
            *lines,
            "(result, longest stall / all ready again, seconds; the worst of all runs)",
            f"{len(outcomes)} runs, {failed} failed",
        ]
    )


def _cell(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return "-"
    results = "/".join(sorted({one.result for one in outcomes}))
    return f"{results} {max(one.stall_s for one in outcomes):.1f}/{max(one.ready_s for one in outcomes):.1f}"


def write_lines(outcomes: Sequence[Outcome], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(one.case) | {k: v for k, v in asdict(one).items() if k != "case"}) for one in outcomes]
    path.write_text("".join(f"{line}\n" for line in lines))
