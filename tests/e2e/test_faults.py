"""Real processes are killed, frozen and cut off at every stage of a request: its answer is a healthy cluster's."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.cases import ALL, QUICK, Case, Outcome, run_case
from faults.cluster import FaultCluster
from faults.report import table, write_lines
from process_tools import linux

REPEATS = int(os.environ.get("KVRELAY_FAULTS", "0"))  # of the whole matrix; 0: the quick part of it, once
CASES = [(case, turn) for turn in range(REPEATS) for case in ALL] if REPEATS else [(c, i) for i, c in enumerate(QUICK)]
pytest_plugins = ("faults.fixtures",)
pytestmark = [linux, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def outcomes() -> Iterator[list[Outcome]]:
    """All of the matrix, shown at the end where the whole of it is asked for."""
    found: list[Outcome] = []
    yield found
    if REPEATS:
        print(f"\n{table(found)}")
        write_lines(found, Path(os.environ.get("KVRELAY_FAULTS_REPORT", "build/faults.jsonl")))


@pytest.mark.parametrize(("case", "turn"), CASES, ids=[f"{case}, {turn}" for case, turn in CASES])
async def test_an_answer_survives(cluster: FaultCluster, outcomes: list[Outcome], case: Case, turn: int) -> None:
    try:
        outcomes.append(await run_case(cluster, case, turn))
    except AssertionError as error:
        outcomes.append(Outcome(case, f"failed: {error}".splitlines()[0], 0, 0.0, 0.0))
        raise
