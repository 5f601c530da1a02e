"""Settings and fixtures of all tests, which of them are fast, and what runs beside what."""

import os
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

pytest_plugins = ("tests.support.logging_fixture", "tests.support.redis_fixture", "tests.support.text_fixture")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch, here and in child processes: tests share the cores
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # where a test takes more threads, they don't spin for a busy core

SLOW_FOLDERS = ("faults", "e2e", "bench", "sim")
# Clusters of real processes, with deadlines that a busy machine would miss: one after another, in this order.
ONE_BY_ONE = ("faults/test_specials.py", "faults/test_matrix.py", "faults/test_pulls.py", "e2e/test_pressure.py",
              "e2e/test_cluster.py", "e2e/test_models.py", "common/worker/test_process.py")  # fmt: skip


def place_of(nodeid: str) -> str:
    """A test's file, below tests/."""
    return nodeid.split("::")[0].removeprefix("tests/")


class ByFile(LoadFileScheduling):
    """A file's tests run in one process, those of ONE_BY_ONE all in the same one, and what takes long comes first."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        place = place_of(nodeid)
        return ONE_BY_ONE[0] if place in ONE_BY_ONE else place


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if place_of(item.nodeid).split("/")[0] in SLOW_FOLDERS or item.get_closest_marker("model"):
            item.add_marker("slow")

    def rank(item: pytest.Item) -> int:
        place = place_of(item.nodeid)
        if place in ONE_BY_ONE:
            return ONE_BY_ONE.index(place)
        return len(ONE_BY_ONE) + (item.get_closest_marker("slow") is None)

    items.sort(key=rank)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The real model's directory; tests that ask for it are marked `model`."""
    from cluster.model_fetch import ensure_demo_model

    return ensure_demo_model()
