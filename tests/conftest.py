"""Settings and fixtures of all tests."""

import os
from pathlib import Path

import pytest

pytest_plugins = ("tests.support.redis_fixture", "tests.support.text_fixture")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch, here and in child processes: tests share the cores


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The real model's directory; tests that ask for it are marked `model`."""
    from cluster.model_fetch import ensure_demo_model

    return ensure_demo_model()
