"""From a submission to its first token a request passes the files that docs/architecture.md lists, twelve at most."""

import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest

from common.worker.relay import RelayServer
from kvtransfer.lease import ROUTER
from tests.support.checkpoints import make_random_checkpoint
from tests.support.in_process_cluster import local_cluster
from tests.support.paths import ROOT
from tests.support.redis_process import RedisServer
from tests.support.worker_stream import QUICK_HEARTBEAT, stream_to

MOST = 12
SECTION = "## A request's way through a worker, file by file"
OURS = ("common", "kvtransfer", "prefill_svc")
SILENT = replace(QUICK_HEARTBEAT, heartbeat_s=60.0)  # so that nothing else happens meanwhile


class Trail:
    """The files whose functions are called, in any thread, between a submission's arrival and `end`."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.ended = False
        self._began = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or self.ended:
            return
        self._began = self._began or frame.f_code is RelayServer._submit.__code__
        if self._began:
            self.files.add(frame.f_code.co_filename)

    def ours(self) -> set[str]:
        """Those of the repository, without leaves and what is generated."""
        found = {Path(file).relative_to(ROOT) for file in self.files if Path(file).is_relative_to(ROOT)}
        found = {path for path in found if path.parts[0] in OURS and path.parent != Path("common")}
        return {str(path) for path in found if "pb" not in path.parts}


@pytest.fixture
def trail() -> Iterator[Trail]:
    """To be set in the loop's thread; threads that begin from here on have it."""
    trail = Trail()
    threading.setprofile(trail)
    yield trail
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]


def listed(item: str) -> list[str]:
    """What a list of the section names: each of its items begins with a path in backticks."""
    section = (ROOT / "docs/architecture.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
    return re.findall(rf"^{item} `([^`]+)`", section, re.MULTILINE)


async def test_a_prompt_passes_the_files_that_are_listed(
    tmp_path: Path, redis_server: RedisServer, trail: Trail
) -> None:
    way, asked = listed(r"\d+\."), listed("-")
    async with (
        local_cluster(make_random_checkpoint(tmp_path), redis_server.url, decode=0, deadlines=SILENT) as cluster,
        stream_to(cluster.local[0]) as stream,
    ):
        sys.setprofile(trail)
        await stream.submit(list(range(3, 40)))
        first = await stream.event("first_tokens")
        trail.ended = True
        cluster.local[0].service.leases.release(first.handle.id, first.handle.epoch, ROUTER)
    passed = {file for file in trail.ours() if not file.startswith(tuple(asked))}
    assert passed == set(way)
    assert len(way) <= MOST


def test_what_is_listed_is_there() -> None:
    assert [path for path in listed(r"(?:\d+\.|-)") if not (ROOT / path).exists()] == []
