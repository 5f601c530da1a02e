"""Real processes are killed, frozen and cut off at every stage of a request: its answer is a healthy cluster's."""

import pytest
from faults.cases import ALL, QUICK, Case
from faults.cluster import FaultCluster
from faults.report import Record, selected
from faults.run import run_case
from process_tools import linux

pytestmark = [linux, pytest.mark.asyncio(loop_scope="module")]
pytest_plugins = ("faults.fixtures",)


@pytest.mark.parametrize(("case", "turn"), selected(ALL, QUICK))
async def test_an_answer_survives(cluster: FaultCluster, record: Record, case: Case, turn: int) -> None:
    with record.of(case):
        record.outcomes.append(await run_case(cluster, case, turn))
