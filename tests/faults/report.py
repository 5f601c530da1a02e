"""Which part of the fault matrix runs, and what came of it, as a table for people and as JSON lines."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.faults.cases import STAGES, Case, Stage
from tests.faults.run import Outcome

REPEATS = int(os.environ.get("KVRELAY_FAULTS", "0"))  # of the whole matrix; 0: the quick part of it, once
LINES = Path(os.environ.get("KVRELAY_FAULTS_REPORT", "build/faults.jsonl"))

whole_matrix = pytest.mark.skipif(not REPEATS, reason="make faults: a cheaper layer has a test for each change")


def selected(everything: Sequence[Case], quick: Sequence[Case]) -> list[Any]:
    """(case, turn) to parametrize a test with."""
    turns = [(case, turn) for turn in range(REPEATS) for case in everything] or [(c, i) for i, c in enumerate(quick)]
    return [pytest.param(case, turn, id=f"{case}, {turn}") for case, turn in turns]


class Record:
    """The outcomes of a module's cases; shown at its end where the whole matrix is asked for."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    @contextmanager
    def of(self, case: Case) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            self.outcomes.append(Outcome(case, f"failed: {error}".splitlines()[0], 0, 0.0, 0.0))
            raise

    def show(self) -> None:
        if REPEATS:
            print(f"\n{table(self.outcomes)}\n")
            LINES.parent.mkdir(parents=True, exist_ok=True)
            with LINES.open("a") as file:
                for outcome in self.outcomes:
                    file.write(f"{json.dumps(asdict(outcome))}\n")


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
    legend = "(result, longest stall of the answer / from the fault until all is ready, seconds; the worst of all runs)"
    return "\n".join([*lines, legend, f"{len(outcomes)} runs, {failed} failed"])


def _cell(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return "-"
    results = "/".join(sorted({one.result for one in outcomes}))
    return f"{results} {max(one.stall_s for one in outcomes):.1f}/{max(one.ready_s for one in outcomes):.1f}"
