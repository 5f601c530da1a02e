"""A split request works under a key, under TLS and under both; and a decode worker calls nobody who isn't a worker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from prometheus_client import generate_latest

from common.cluster_key import ClusterKey
from common.deadlines import Deadlines
from common.rpc.channel import open_channel
from common.rpc.pb import decode_pb2_grpc, kv_pb2
from common.rpc.security import Security, Tls
from common.sampling import SamplingParams
from tests.support.certificates import pem_files
from tests.support.checkpoints import make_random_checkpoint
from tests.support.in_process_cluster import local_cluster
from tests.support.recompute import Recompute, prompt
from tests.support.redis_process import RedisServer
from tests.support.redis_tools import eventually
from tests.support.worker_stream import stream_to

KEY = "the key of this cluster"
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("model"))


def secured(folder: Path, *, key: bool, tls: bool) -> Security:
    pem = pem_files(folder, "127.0.0.1")
    contents = (Path(path).read_bytes() for path in (pem.chain, pem.key, pem.ca))
    return Security(ClusterKey(KEY) if key else None, Tls(*contents) if tls else None)


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize(("key", "tls"), [(True, False), (False, True), (True, True)])
async def test_a_split_request_is_answered_as_ever(
    model: Path,
    redis_server: RedisServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    key: bool,
    tls: bool,
    transport: str,
) -> None:
    caplog.set_level("INFO")
    security = secured(tmp_path, key=key, tls=tls)
    async with local_cluster(model, redis_server.url, transport=transport, security=security) as cluster:
        answered = await cluster.answer(prompt(40), GREEDY)
        assert answered.tokens == [Recompute.of(model, "float32")(prompt(40), GREEDY)]
        assert (answered.report.transport, answered.report.handover_bytes > 0) == (transport, True)
        await cluster.assert_all_free()
        pages = [generate_latest(one.worker.metrics.registry).decode() for one in cluster.local]
    assert not [text for text in [*pages, caplog.text, repr(security)] if KEY in text or "PRIVATE KEY" in text]


async def test_a_router_without_the_key_is_refused_and_the_worker_says_so(
    model: Path, redis_server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    security = secured(tmp_path, key=True, tls=False)
    async with local_cluster(model, redis_server.url, prefill=0, security=security) as cluster:
        channel = open_channel(cluster.local[0].worker.info.address, Deadlines())
        async with channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await decode_pb2_grpc.DecodeStub(channel).Relay(timeout=10).read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert any(record.getMessage() == "refused" for record in caplog.records)


@pytest.mark.parametrize("holder", ["known", "unknown"])
async def test_with_redis_gone_the_first_hand_over_works_with_whom_decode_knows(
    model: Path, own_redis_server: RedisServer, holder: str
) -> None:
    """Whom it doesn't know it can't tell from a stranger: the request resumes, on the decode worker alone."""
    async with local_cluster(model, own_redis_server.url) as cluster:
        known = cluster.local[1].worker.others._known
        await eventually(lambda: len(known) == 2)
        own_redis_server.stop()
        if holder == "unknown":
            known.clear()
        answered = await cluster.answer(prompt(40), GREEDY)
        assert answered.tokens == [Recompute.of(model, "float32")(prompt(40), GREEDY)]
        assert (answered.report.handover_bytes > 0) == (holder == "known")
        await cluster.assert_all_free()


@asynccontextmanager
async def ear() -> AsyncIterator[tuple[str, list[str]]]:
    """An address at which somebody only listens, and what happened there."""
    heard: list[str] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append("a connection")
        writer.close()

    listener = await asyncio.start_server(hear, "127.0.0.1", 0)
    async with listener:
        yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}", heard


@pytest.mark.parametrize("redis_is", ["there", "gone"])
async def test_a_handle_that_names_a_stranger_is_refused_before_a_connection(
    model: Path, redis_server: RedisServer, redis_is: str
) -> None:
    async with local_cluster(model, redis_server.url, prefill=0) as cluster, ear() as (address, heard):
        one = cluster.local[0]
        if redis_is == "gone":
            assert one.worker.others._registry is not None
            one.worker.others._registry.outage._failing.add("test")
        ids = prompt(20)
        handle = kv_pb2.KVHandle(
            id=bytes(16),
            address=address,
            epoch=7,
            fingerprint=one.worker.info.fingerprint,
            layout_id=one.worker.info.layout_id,
            block_ids=[0, 1],
            num_tokens=20,
            lease_s=30.0,
        )
        handle.key.request_id = "r"
        async with stream_to(one) as stream:
            await stream.submit(ids, forks=[(0, [5])], handle=handle)
            assert await stream.failure() == ("handover_failed", "handle.address")
        await cluster.assert_all_free()
    assert heard == []
