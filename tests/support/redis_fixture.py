"""A real redis-server for tests: ask for `redis`."""

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from common.discovery.redis_client import connect
from tests.support.redis_process import RedisServer
from tests.support.redis_tools import QUICK


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """Shared by all tests of a run; not to be stopped or frozen."""
    with RedisServer() as server:
        yield server


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    """A client of the shared server, which is empty at the test's start."""
    client = await connect(redis_server.url, QUICK)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
def own_redis_server() -> Iterator[RedisServer]:
    """One for this test alone, to stop, freeze and start again on the same port."""
    with RedisServer() as first:
        port = first.port
    with RedisServer(port=port) as server:
        yield server
