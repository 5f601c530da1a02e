"""A Redis that answers need not do: at start each role tries what it will ask of it later."""

import asyncio
import secrets

from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.deadlines import Deadlines
from common.discovery.config import RedisConfig
from common.discovery.redis_client import endpoint_of, reason_of
from common.errors import RedisUnreachable

PROBE_LIFE_MS = 10_000  # of what a lost connection leaves behind


async def prove_access(redis: Redis, settings: RedisConfig, deadlines: Deadlines, *, writes: bool) -> None:
    """Raises RedisUnreachable where the namespace can't be read or, if that is wanted, written."""
    probe = f"{settings.redis_namespace}:probe:{secrets.token_hex(8)}"
    tried = "written"
    try:
        async with asyncio.timeout(deadlines.connect_s):
            if writes:
                await _write(redis, probe)
            tried = "read"
            await _read(redis, probe)
    except (RedisError, OSError) as error:
        where = endpoint_of(settings.redis_url)
        problem = f"Redis at {where} answers, but can't be {tried}: {reason_of(error)}"
        raise RedisUnreachable(problem, field="redis_url") from error


async def _write(redis: Redis, probe: str) -> None:
    """What the registry and the publisher of cache events use, and in one transaction, as they do."""
    text, members, stream = f"{probe}:text", f"{probe}:set", f"{probe}:stream"
    async with redis.pipeline(transaction=True) as pipe:
        pipe.set(text, "", px=PROBE_LIFE_MS)
        pipe.sadd(members, "")
        pipe.srem(members, "")
        pipe.xadd(stream, {"": ""})
        pipe.pexpire(stream, PROBE_LIFE_MS)
        pipe.xtrim(stream, minid="1-0", approximate=False)
        pipe.delete(text, members, stream)
        await pipe.execute()


async def _read(redis: Redis, probe: str) -> None:
    await redis.smembers(f"{probe}:set")
    await redis.mget([f"{probe}:text", f"{probe}:other"])
    await redis.getrange(f"{probe}:text", 0, 1)
    await redis.xread({f"{probe}:stream": "0"}, count=1)
