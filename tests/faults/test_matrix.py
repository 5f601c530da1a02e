"""Real processes are killed, frozen and cut off at every stage of a request: its answer is a healthy cluster's."""

import pytest

from tests.faults.cases import ALL, QUICK, Case
from tests.faults.cluster import FaultCluster
from tests.faults.report import Record, selected
from tests.faults.run import run_case
from tests.support.process_tools import linux

pytestmark = [linux, pytest.mark.asyncio(loop_scope="module")]
pytest_plugins = ("tests.faults.fixtures",)


@pytest.mark.parametrize(("case", "turn"), selected(ALL, QUICK))
async def test_an_answer_survives(cluster: FaultCluster, record: Record, case: Case, turn: int) -> None:
    with record.of(case):
        record.outcomes.append(await run_case(cluster, case, turn))
