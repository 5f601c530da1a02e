"""One long-lived cluster a test module, healthy before and after each test."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.faults.cluster import FaultCluster
from tests.faults.report import Record
from tests.faults.tools import tiny_model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[FaultCluster]:
    """A module may name flags of its workers: WORKER_FLAGS."""
    directory, flags = tmp_path_factory.mktemp("faults"), getattr(request.module, "WORKER_FLAGS", ())
    with (directory / "log").open("w+") as log:
        async with FaultCluster(tiny_model(directory), log, worker_flags=flags) as cluster:
            yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared: FaultCluster) -> AsyncIterator[FaultCluster]:
    """What its processes say during a test is shown if it fails."""
    shared.mark_log()
    yield shared
    await shared.heal()
    await shared.quiet()
    print(shared.logged())


@pytest.fixture(scope="module")
def record() -> Iterator[Record]:
    found = Record()
    yield found
    found.show()
