"""Workers on hosts of their own hand over by grpc, and answers survive links that go down or are slow."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.faults.cases import BODIES, COMPANIONS, STREAM_EVENTS, Stage
from tests.faults.namespaces import INSIDE, NamespacedCluster, missing, run_inside
from tests.faults.processes import DEADLINES, WORKERS
from tests.faults.report import REPEATS
from tests.faults.tools import tiny_model

inside = pytest.mark.skipif(INSIDE not in os.environ, reason="runs in a network namespace of its own")
outside = pytest.mark.skipif(INSIDE in os.environ, reason="has started this one")
in_module = pytest.mark.asyncio(loop_scope="module")
REQUESTS = (BODIES[Stage.STREAM], *COMPANIONS)


@outside
def test_in_namespaces() -> None:
    if not REPEATS:
        pytest.skip("a part of `make faults`")
    if reason := missing():
        pytest.skip(reason)
    assert run_inside(sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", __file__) == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NamespacedCluster]:
    directory = tmp_path_factory.mktemp("faults")
    with (directory / "log").open("w+") as log:
        async with NamespacedCluster(tiny_model(directory), log) as cluster:
            yield cluster


@inside
@in_module
async def test_kv_goes_over_the_network(cluster: NamespacedCluster) -> None:
    asked = cluster.ask(BODIES[Stage.STREAM])
    assert await asked.answer() == await cluster.reference(BODIES[Stage.STREAM])
    assert (asked.report["transport"], asked.report["handover_bytes"] > 0) == ("grpc", True)


@inside
@in_module
@pytest.mark.parametrize("down_s", [1.5 * DEADLINES.dead_s, DEADLINES.lease_s + DEADLINES.dead_s])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_answer_survives_a_partition(cluster: NamespacedCluster, role: str, down_s: float) -> None:
    wanted = [await cluster.reference(body) for body in REQUESTS]
    asked = [cluster.ask(REQUESTS[0])]
    worker = await cluster.busy(role)
    asked += [cluster.ask(body) for body in COMPANIONS]
    if role == "decode":
        await asked[0].reached(STREAM_EVENTS[Stage.STREAM])
    cluster.link(worker, up=False)
    await asyncio.sleep(down_s)
    cluster.link(worker, up=True)
    assert [await one.answer() for one in asked] == wanted
    assert asked[0].report["attempts"] > 1
    await cluster.heal()
    await cluster.quiet()


@inside
@in_module
async def test_an_answer_survives_slow_links(cluster: NamespacedCluster) -> None:
    wanted = [await cluster.reference(body) for body in REQUESTS]
    kinds = {cluster.slow(worker) for worker in WORKERS}
    if kinds == {""}:
        pytest.skip("this kernel can't shape traffic")
    print(f"links are slow: {kinds}")
    asked = [cluster.ask(body) for body in REQUESTS]
    assert [await one.answer() for one in asked] == wanted
    await cluster.quiet()
