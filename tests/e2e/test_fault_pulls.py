"""Faults in the middle of a pull, which here goes over the network: the answer is a healthy cluster's."""

import pytest
from faults.cases import PULLS, QUICK_PULLS, Case
from faults.cluster import FaultCluster
from faults.report import Record, selected
from faults.run import run_case
from process_tools import linux

WORKER_FLAGS = ("--transport=grpc",)
pytestmark = [linux, pytest.mark.asyncio(loop_scope="module")]
pytest_plugins = ("faults.fixtures",)


@pytest.mark.parametrize(("case", "turn"), selected(PULLS, QUICK_PULLS))
async def test_an_answer_survives(cluster: FaultCluster, record: Record, case: Case, turn: int) -> None:
    with record.of(case):
        record.outcomes.append(await run_case(cluster, case, turn))
