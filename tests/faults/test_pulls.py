"""Faults in the middle of a pull, which here goes over the network: the answer is a healthy cluster's."""

import pytest

from tests.faults.cases import PULLS, QUICK_PULLS, Case
from tests.faults.cluster import FaultCluster
from tests.faults.report import Record, selected
from tests.faults.run import run_case
from tests.support.process_tools import linux

WORKER_FLAGS = ("--transport=grpc",)
pytestmark = [linux, pytest.mark.asyncio(loop_scope="module")]
pytest_plugins = ("tests.faults.fixtures",)


@pytest.mark.parametrize(("case", "turn"), selected(PULLS, QUICK_PULLS))
async def test_an_answer_survives(cluster: FaultCluster, record: Record, case: Case, turn: int) -> None:
    with record.of(case):
        record.outcomes.append(await run_case(cluster, case, turn))
