"""A Redis that answers and can't be used is refused at start, in one line that says what it would not do."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from cluster.redis_server import free_port
from common.discovery.config import RedisConfig
from common.discovery.redis_access import prove_access
from common.discovery.redis_client import connect
from common.errors import RedisUnreachable
from tests.support.redis_process import RedisServer
from tests.support.redis_tools import QUICK


async def full(redis: Redis) -> None:
    await redis.config_set("maxmemory", 1)


async def replica(redis: Redis) -> None:
    await redis.replicaof("127.0.0.1", 1)


async def proved(url: str, *, writes: bool) -> str:
    """Empty, or why not."""
    settings = RedisConfig(redis_url=url, redis_namespace="probed")
    client = await connect(url, QUICK)
    try:
        await prove_access(client, settings, QUICK, writes=writes)
        return ""
    except RedisUnreachable as error:
        return error.message
    finally:
        await client.aclose()


async def test_what_can_be_written_is_taken_and_nothing_is_left(redis: Redis, redis_server: RedisServer) -> None:
    assert await proved(redis_server.url, writes=True) == ""
    assert await redis.keys("*") == []


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (full, "command not allowed when used memory > 'maxmemory'."),
        (replica, "You can't write against a read only replica."),
    ],
)
async def test_a_redis_that_takes_no_writes_does_for_routers_only(
    own_redis_server: RedisServer, spoil: Callable[[Redis], object], reason: str
) -> None:
    client = await connect(own_redis_server.url, QUICK)
    await spoil(client)  # type: ignore[misc]
    await client.aclose()
    where = f"redis://127.0.0.1:{own_redis_server.port}/0"
    refusal = await proved(own_redis_server.url, writes=True)
    assert refusal == f"Redis at {where} answers, but can't be written: {reason}"
    assert await proved(own_redis_server.url, writes=False) == ""


@pytest.mark.parametrize(
    ("keys", "commands", "worker", "router"),
    [
        ("*", "+@read +@connection", "can't be written: .*multi", ""),
        ("other:*", "+@all", "can't be written: .*keys", "can't be read: .*keys"),
        ("probed:*", "+@write +@connection +@transaction", "can't be read: .*smembers", "can't be read: .*smembers"),
        ("probed:*", "+@write +@read +@connection +@transaction", "", ""),
    ],
    ids=["reader", "others' keys", "writer", "enough"],
)
async def test_rights_that_are_missing_are_told_without_the_password(
    redis: Redis, redis_server: RedisServer, keys: str, commands: str, worker: str, router: str
) -> None:
    user = {"enabled": True, "passwords": ["+s3cret"], "keys": [keys], "commands": commands.split(), "reset": True}
    await redis.acl_setuser("probing", **user)  # type: ignore[arg-type]
    try:
        url = redis_server.url.replace("//", "//probing:s3cret@")
        for writes, wanted in ((True, worker), (False, router)):
            refusal = await proved(url, writes=writes)
            assert re.search(wanted, refusal) if wanted else not refusal, refusal
            assert "s3cret" not in refusal
            assert "\n" not in refusal
    finally:
        await redis.acl_deluser("probing")


async def test_a_cluster_of_redis_is_refused(tmp_path: Path) -> None:
    port = next(port for port in iter(free_port, 0) if port < 50_000)  # its bus is at 10,000 above
    options = ["--cluster-enabled", "yes", "--cluster-config-file", str(tmp_path / "nodes.conf")]
    refusal = pytest.raises(RedisUnreachable, match="it runs as cluster, a standalone one is needed")
    with RedisServer(port=port, options=options) as server, refusal:
        await connect(server.url, QUICK)
