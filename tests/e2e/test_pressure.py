"""Real processes under pressure: more requests than room, clients that don't read, frozen workers, rolling restarts."""

import asyncio
import contextlib
import random
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from bench.options import ClusterOptions
from bench.own_cluster import own_cluster
from bench.processes import Processes
from bench.soak.request_mix import PlannedRequest, draw
from bench.soak.tally import Tally
from common.deadlines import Deadlines
from common.settings import Bytes
from tests.support.checkpoints import make_random_checkpoint
from tests.support.pressure import LARGE, LONG, START_S, WORKERS, Pressure, unread_stream
from tests.support.process_tools import linux

pytestmark = [linux, pytest.mark.asyncio(loop_scope="module")]
SCALE = 0.4
DEADLINES = Deadlines().scaled(SCALE)
SEATS = 8
QUEUED = 64


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pressure]:
    model: Path = make_random_checkpoint(tmp_path_factory.mktemp("pressure") / "tiny")
    options = ClusterOptions(model=str(model), kv_cache_memory=Bytes(16 * 2**20), deadline_scale=SCALE)
    async with own_cluster(options, SEATS, max_queued_requests=QUEUED) as cluster, Processes(cluster) as processes:
        pressure = Pressure(cluster, processes, model.name)
        await pressure.until_ready()
        await pressure.take_references()
        yield pressure
    assert cluster.unclean == []


@pytest_asyncio.fixture(loop_scope="module")
async def pressure(shared: Pressure) -> AsyncIterator[Pressure]:
    """Each test ends at rest: every gauge of work at zero within the lease and 5 s."""
    yield shared
    assert await shared.processes.at_rest(DEADLINES.lease_s + 5.0) == {}


async def test_a_burst_is_answered_or_refused_and_none_hangs(pressure: Pressure) -> None:
    capacity = SEATS * 2
    await pressure.answers(pressure.plans(capacity))
    before_mb = pressure.router_mb()
    tally = await pressure.answers(pressure.plans(10 * capacity))
    assert tally.wrong == 0
    assert tally.ends["answered"] + tally.ends["refused"] == 10 * capacity  # refused: with a Retry-After
    assert tally.ends["answered"] >= QUEUED
    assert set(tally.codes) <= {"429 overloaded"}
    assert pressure.router_mb() < before_mb + 32


async def test_a_thousand_clients_that_come_in_one_moment_are_let_in(pressure: Pressure) -> None:
    """The kernel keeps their connections while the router has no time for them, and resets none."""
    host, _, port = pressure.url.removeprefix("http://").rpartition(":")
    router = pressure.cluster.children["router"]
    with ExitStack() as stack:
        router.signal(signal.SIGSTOP)
        try:
            clients = [stack.enter_context(socket.create_connection((host, int(port)), START_S)) for _ in range(1000)]
            for client in clients:
                client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        finally:
            router.signal(signal.SIGCONT)
        statuses = await asyncio.to_thread(lambda: {client.recv(12) for client in clients})
    assert statuses == {b"HTTP/1.1 200"}


async def test_what_is_refused_is_taken_later(pressure: Pressure) -> None:
    """Room comes back: after the burst all are answered."""
    tally = await pressure.answers(pressure.plans(SEATS * 2))
    assert (dict(tally.ends), tally.wrong) == ({"answered": SEATS * 2}, 0)


async def test_clients_that_read_slowly_or_not_at_all_slow_nobody(pressure: Pressure) -> None:
    """More of them than the cluster has room for: others are answered while these are still there."""
    before_mb = pressure.router_mb()
    with ExitStack() as stack:
        asked = [("/v1/chat/completions", LARGE)] * 3 + [(LONG.path, LONG.body)] * (SEATS * 3)
        unread = [stack.enter_context(unread_stream(pressure, *one)) for one in asked]
        reading = asyncio.create_task(_read_slowly(unread[0]))
        tally = await pressure.answers([*pressure.plans(SEATS * 2), PlannedRequest(LONG, stream=True)])
        grown_mb = pressure.router_mb() - before_mb
        gauges = await pressure.processes.gauges("router")
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        for connection in unread[1:]:
            assert connection.recv(12) == b"HTTP/1.1 200"  # was there all the time
    assert (dict(tally.ends), tally.wrong) == ({"answered": SEATS * 2 + 1}, 0)
    assert gauges["num_requests_running"] > 0  # what the kernel's buffers don't take, the router keeps
    assert grown_mb < 200  # of 13,500 tokens with 20 logprobs each


async def _read_slowly(connection: socket.socket) -> None:
    """A byte at a time."""
    connection.setblocking(False)
    while True:
        await asyncio.get_running_loop().sock_recv(connection, 1)
        await asyncio.sleep(0.25)


async def test_a_frozen_worker_blocks_no_healthy_one(pressure: Pressure) -> None:
    """All are answered while it is still frozen, those that it had included."""
    victim = "decode-0"
    child = pressure.cluster.children[victim]
    async with asyncio.TaskGroup() as group:
        running = group.create_task(pressure.answers([PlannedRequest(LONG, stream=True)] * 4))
        assert await pressure.working("decode")
        child.signal(signal.SIGSTOP)
        try:
            tally = await pressure.answers(pressure.plans(SEATS * 2))
            later = await pressure.answers(pressure.plans(SEATS * 2))
            await running
        finally:
            child.signal(signal.SIGCONT)
    for one in (tally, later):
        assert (dict(one.ends), one.wrong) == ({"answered": SEATS * 2}, 0)
    assert (dict(running.result().ends), running.result().wrong) == ({"answered": 4}, 0)
    assert pressure.cluster.children[victim] is child
    await pressure.until_ready()


async def test_a_rolling_restart_loses_no_request_and_repeats_no_token(pressure: Pressure) -> None:
    tally, ended = Tally(pressure.references), asyncio.Event()

    async def load(number: int) -> None:
        numbers = random.Random(number)
        async with pressure.client() as client:
            while not ended.is_set():
                plan = (
                    PlannedRequest(LONG, stream=True) if number == 0 else draw(pressure.templates, numbers, aborts=0.0)
                )
                tally.take(await client.send(plan))

    async with asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(load(number))
        try:
            for name in WORKERS:
                child = pressure.cluster.children[name]
                child.signal(signal.SIGTERM)
                async with asyncio.timeout(START_S):
                    assert await asyncio.shield(child.exited) == 0
                await pressure.until_ready()
                assert pressure.cluster.children[name] is not child
        finally:
            ended.set()
    assert dict(tally.ends) == {"answered": tally.requests}
    assert tally.wrong == 0
    assert tally.requests > 6
