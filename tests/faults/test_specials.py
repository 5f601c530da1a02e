"""What a fault must not lead to: a stranger's KV, work for a router that is gone, a request that Redis can stop."""

import asyncio
import secrets
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis

from common.errors import EpochMismatch
from kvtransfer.holder_client import HolderClient
from tests.faults.cases import BODIES, COMPANIONS, GREEDY, LONG_PROMPT, PAIRS, Stage
from tests.faults.client import BROKEN, Answer, Asked
from tests.faults.cluster import FaultCluster
from tests.faults.processes import DEADLINES, WORKERS
from tests.faults.proxy import BLACKHOLE, Traffic
from tests.faults.report import whole_matrix
from tests.faults.tools import Disturbed, eventually, met, undisturbed
from tests.support.process_tools import linux

pytestmark = [linux, pytest.mark.asyncio(loop_scope="module")]
pytest_plugins = ("tests.faults.fixtures",)
PREFILL, DECODE = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
STREAM = BODIES[Stage.STREAM]
LONG_STREAM = STREAM | {"max_tokens": 800}  # takes longer than a router that is gone is missed
CONNECT = {"prompt": LONG_PROMPT, "max_tokens": 2, **GREEDY}  # several: decode workers get to know their holders
STRANGERS = [{"prompt": f"{index} Somebody else's secret. " * 50, "max_tokens": 4, **GREEDY} for index in range(8)]


async def answers(cluster: FaultCluster, *bodies: dict[str, Any]) -> list[Answer]:
    return [await one.answer() for one in [cluster.ask(body) for body in bodies]]


async def references(cluster: FaultCluster, *bodies: dict[str, Any]) -> list[Answer]:
    return [await cluster.reference(body) for body in bodies]


async def stream_beside_others(cluster: FaultCluster, events: int = 30) -> list[Asked]:
    """A stream that has brought so many events, and three other requests."""
    asked = [cluster.ask(body) for body in (STREAM, *COMPANIONS)]
    await asked[0].reached(events)
    return asked


async def have_survived(cluster: FaultCluster, asked: list[Asked]) -> list[int]:
    """Every answer is the one of a healthy cluster; attempts of each."""
    assert [await one.answer() for one in asked] == await references(cluster, STREAM, *COMPANIONS)
    return [one.report["attempts"] for one in asked]


@pytest.mark.parametrize("way", [pytest.param("up", marks=whole_matrix), "down"])
async def test_a_reader_that_wakes_after_its_lease_answers_with_nobody_elses_kv(
    cluster: FaultCluster, way: str
) -> None:
    """Stopped while its claim (up), or the holder's answer to it (down), is on the way; then the pool gets other KV.

    Where the two have just met, it is the handshake before the claim.
    """
    wanted, strangers = await cluster.reference(BODIES[Stage.TOKEN_0]), await references(cluster, *STRANGERS)

    async def claimed() -> tuple[dict[str, Any], Asked, str, str]:
        """A request whose claim is stuck, its holder and its reader."""
        body = {**BODIES[Stage.TOKEN_0], "cache_salt": secrets.token_hex(8)}
        await cluster.heal()
        await answers(cluster, *[CONNECT] * 4)
        await cluster.quiet()
        for prefill, decode in PAIRS:
            cluster.proxies[prefill].shape(Traffic(**{way: False}), owner=decode)
        submitted = cluster.submitted()
        asked = cluster.ask(body)
        try:
            holder, reader = await cluster.at_work("prefill", submitted), await cluster.at_work("decode", submitted)

            async def on_its_way() -> bool:
                return cluster.proxies[holder].held[reader, way] > 0

            await met(on_its_way, "bytes between them are held")
        except Disturbed:
            asked.cancel()
            raise
        return body, asked, holder, reader

    body, asked, holder, reader = await undisturbed(claimed)
    cluster.freeze(reader)
    for prefill in PREFILL:
        await cluster.proxies[prefill].heal()
    await cluster.quiet(holder)  # the lease is over
    for other, stranger in zip(STRANGERS, strangers, strict=True):  # one by one: half of the pool is away
        assert await cluster.ask(other).answer() == stranger
    cluster.thaw(reader)
    assert await asked.answer() == wanted
    await cluster.heal()
    for _ in range(4):  # as likely as not by the reader, with what it has in its cache
        assert await cluster.ask(body).answer() == wanted
    await cluster.quiet()


@whole_matrix
async def test_a_frozen_routers_sequences_end_and_its_clients_get_the_same_tokens_when_it_wakes(
    cluster: FaultCluster,
) -> None:
    wanted = await cluster.reference(LONG_STREAM)
    asked = cluster.ask(LONG_STREAM)
    await asked.reached(30)
    cluster.freeze("router")
    await cluster.quiet(*WORKERS)
    cluster.thaw("router")
    assert await asked.answer() == wanted
    assert asked.report["attempts"] > 1


@whole_matrix
async def test_a_killed_routers_sequences_end_and_its_clients_hear_of_it_at_once(cluster: FaultCluster) -> None:
    asked = cluster.ask(LONG_STREAM)
    await asked.reached(30)
    await cluster.kill("router")
    assert (await asked.answer()).error == BROKEN
    await cluster.quiet(*WORKERS)
    await cluster.heal()
    assert await answers(cluster, STREAM) == await references(cluster, STREAM)


@pytest.mark.parametrize("worker", ["prefill-0", pytest.param("decode-0", marks=whole_matrix)])
async def test_a_worker_comes_back_as_another_one(cluster: FaultCluster, worker: str) -> None:
    """With a new epoch; handles of the old one are refused, and nothing in Redis tells of it any more."""
    wanted = await references(cluster, STREAM)
    old = cluster.epoch(worker)
    await cluster.kill(worker)
    await cluster.start(worker)
    assert cluster.epoch(worker) != old
    async with Redis.from_url(cluster.redis_url) as redis:

        async def forgotten() -> bool:
            members = await redis.smembers(f"{cluster.namespace}:workers")
            keys = await redis.keys(f"{cluster.namespace}:*{old:016x}*")
            return not keys and f"{worker}:{old:016x}".encode() not in members

        await eventually(forgotten, "Redis knows the old life no more")
    await cluster.ready()
    assert await answers(cluster, STREAM) == wanted
    if worker in PREFILL:
        address = f"127.0.0.1:{cluster.proxies[worker].port}"
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(EpochMismatch):
                await HolderClient(channel, address, DEADLINES).renew(bytes(16), old, 1)


@pytest.mark.parametrize(
    "what",
    [pytest.param("killed", marks=whole_matrix), "frozen", pytest.param("flushed", marks=whole_matrix), "replaced"],
)
async def test_requests_run_on_whatever_becomes_of_redis(cluster: FaultCluster, what: str) -> None:
    """And when it is back, empty, all workers are in it again."""
    await undisturbed(lambda: _run_while_redis_is(cluster, what))


async def _run_while_redis_is(cluster: FaultCluster, what: str) -> None:
    asked = await stream_beside_others(cluster)
    if what == "frozen":
        cluster.freeze("redis")
        await asyncio.sleep(DEADLINES.rpc_s + DEADLINES.dead_s)
    elif what == "flushed":
        async with Redis.from_url(cluster.redis_url) as redis:
            await redis.flushall()
    else:
        await cluster.kill("redis")
        if what == "replaced":
            await cluster.start("redis")
    asked.append(cluster.ask(STREAM))
    assert await asked.pop().answer() == await cluster.reference(STREAM)
    attempts = await have_survived(cluster, asked)
    await cluster.heal()
    if max(attempts) > 1:
        raise Disturbed(f"attempts: {attempts}")
    async with Redis.from_url(cluster.redis_url) as redis:

        async def listed() -> bool:
            return len(await redis.keys(f"{cluster.namespace}:worker:*")) == len(WORKERS)

        await eventually(listed, "all workers are in Redis")
    assert await cluster.metric("router", "workers", state="ready") == len(WORKERS)


@whole_matrix
async def test_without_prefill_workers_decode_workers_compute_prompts(cluster: FaultCluster) -> None:
    """Also of the request that was at one of them."""
    wanted = await references(cluster, STREAM)
    submitted = cluster.submitted()
    asked = cluster.ask(STREAM)
    await cluster.at_work("prefill", submitted)
    await asyncio.gather(*map(cluster.kill, PREFILL))
    assert await asked.answer() == wanted[0]
    asked = cluster.ask(STREAM)
    assert await asked.answer() == wanted[0]
    assert asked.report["prefill_worker"] in DECODE
    await cluster.heal()
    asked = cluster.ask(STREAM)
    assert await asked.answer() == wanted[0]
    assert asked.report["prefill_worker"] in PREFILL


async def test_without_decode_workers_streams_wait_and_go_on_and_a_new_one_gets_a_status(cluster: FaultCluster) -> None:
    """However long they are away: the refusal comes before a keep-alive, which is before the queue deadline."""
    asked = await stream_beside_others(cluster)
    for worker in DECODE:
        cluster.freeze(worker)

    async def unreachable() -> bool:
        return await cluster.metric("router", "workers", worker_role="decode", state="ready") == 0

    await eventually(unreachable, "the router has lost both")
    assert (await cluster.ask(STREAM).answer()).error == "503 no_worker"
    for worker in DECODE:
        cluster.thaw(worker)
    assert (await have_survived(cluster, asked))[0] > 1
    assert await cluster.ask(STREAM).answer() == await cluster.reference(STREAM)


@pytest.mark.parametrize("holders", [("prefill-0",), pytest.param(PREFILL, marks=whole_matrix)])
async def test_a_holder_that_readers_cannot_reach_is_done_without(
    cluster: FaultCluster, holders: tuple[str, ...]
) -> None:
    """The router reaches both sides all the time: another prefill worker's KV is taken, or none."""
    wanted = await references(cluster, STREAM, *COMPANIONS)
    for holder in holders:
        for reader in DECODE:
            cluster.proxies[holder].shape(BLACKHOLE, owner=reader)
            cluster.proxies[holder].cut(reader)
    assert await answers(cluster, STREAM, *COMPANIONS) == wanted
    assert await cluster.metric("router", "workers", state="ready") == len(WORKERS)


@whole_matrix
async def test_a_stream_that_is_cut_again_and_again_loses_nothing(cluster: FaultCluster) -> None:
    """And none of the processes keeps a file open for it."""
    wanted = await references(cluster, STREAM)

    async def files() -> dict[str, int]:
        await cluster.quiet()
        return {name: await cluster.open_files(name) for name in ("router", *WORKERS)}

    async def cut_thrice() -> None:
        asked = cluster.ask(STREAM)
        for events in (20, 60, 100):
            await asked.reached(events)
            for worker in (*PREFILL, *DECODE):
                cluster.proxies[worker].cut()
        assert await asked.answer() == wanted[0]
        await cluster.ready()

    await cut_thrice()
    before = await files()
    for _ in range(2):
        await cut_thrice()

    async def no_more() -> bool:
        return all(count <= before[name] + 2 for name, count in (await files()).items())

    await eventually(no_more, "as many files are open as before")
