"""The connection to Redis: time-outs on every command, and what to say when it is gone."""

import asyncio
import contextlib
import logging
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from common.address import Address
from common.deadlines import Deadlines
from common.errors import ConfigError, RedisUnreachable
from common.log import get_logger, log_event

LOGGER = get_logger("redis")
CLOSED_HANDLE = "the handler is closed"  # uvloop's RuntimeError where the peer has reset the connection
STANDALONE = "standalone"
OLDEST_REDIS = (6, 2)  # XTRIM MINID


class Outage:
    """One log line when Redis goes and one when it is back, however many parts of a process notice."""

    def __init__(self) -> None:
        self._failing: set[str] = set()
        self._kind = ""

    @property
    def active(self) -> bool:
        return bool(self._failing)

    def told_with(self, reason: str) -> str:
        """The reason for a readiness, and Redis's state where it has one; without addresses, anybody may ask."""
        return f"{reason}; {self._kind}" if self.active else reason

    @contextlib.contextmanager
    def noticed(self, part: str) -> Iterator[None]:
        """Around commands: whatever goes wrong with Redis in it leaves as RedisUnreachable."""
        try:
            yield
        except (RedisError, OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and CLOSED_HANDLE not in str(error):
                raise
            reason = reason_of(error)
            state = "redis refuses commands" if isinstance(error, ResponseError) else "redis is gone"
            self._kind = f"{state} ({type(error).__name__})"
            if not self._failing:
                log_event(LOGGER, logging.WARNING, f"{state}, going on without", part=part, reason=reason)
            self._failing.add(part)
            raise RedisUnreachable(f"Redis can't be used: {reason}") from error
        if part in self._failing:
            self._failing.discard(part)
            if not self._failing:
                log_event(LOGGER, logging.WARNING, "redis is back", part=part)


def reason_of(error: Exception) -> str:
    """Its text, without the command that redis-py puts before it."""
    text = str(error).rpartition("caused error: ")[2]
    return text.removeprefix("(").removesuffix(",)").strip("'\"") or type(error).__name__


def raise_if_cancelled() -> None:
    """At the top of endless loops: a cancellation that a command swallowed still ends the loop.

    redis-py sends with asyncio.wait_for, which before Python 3.12 drops a cancellation that comes in the same
    turn as its result.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def connect(redis_url: str, deadlines: Deadlines) -> Redis:
    """A client whose every command has a time-out, after one that worked. Raises RedisUnreachable or ConfigError.

    The URL may hold a password: it goes into no message as a whole.
    """
    endpoint = endpoint_of(redis_url)
    try:
        client = Redis.from_url(
            redis_url,
            socket_timeout=deadlines.rpc_s,
            socket_connect_timeout=deadlines.connect_s,
            retry=Retry(NoBackoff(), 0),  # who calls decides whether to try again
            protocol=2,
        )
        client.connection_pool.make_connection()  # type: ignore[no-untyped-call]  # only checks the options
    except (ValueError, TypeError):  # its text may quote the URL
        raise ConfigError(f"redis_url ({endpoint}) has a bad option", field="redis_url") from None
    try:
        async with asyncio.timeout(deadlines.connect_s):
            await client.ping()
            await _check_server(client)
    except (RedisError, OSError, UnicodeError) as error:
        await client.aclose()
        reason = str(error) or f"no answer within {deadlines.connect_s:g} s"
        raise RedisUnreachable(f"no usable Redis at {endpoint}: {reason}", field="redis_url") from error
    except BaseException:
        await client.aclose()
        raise
    return client


def endpoint_of(redis_url: str) -> str:
    """Where the URL points, without user and password. Raises ConfigError that doesn't quote it."""
    usage = "redis_url must be redis://[user:password@]host:port/database (or rediss:// or unix://)"
    try:
        parts = urlsplit(redis_url)
        place = parts.netloc.rpartition("@")[2]
        address = Address.parse(place if parts.port is not None else f"{place or 'localhost'}:6379")
    except ValueError:
        raise ConfigError(usage, field="redis_url") from None
    # A password with /, # or ? in it, not percent-encoded, ends the host early: the rest shows up behind it.
    if parts.fragment or "@" in parts.path + parts.query:
        raise ConfigError(usage, field="redis_url")
    if parts.scheme == "unix" and parts.path:
        return f"unix://{parts.path}"
    if parts.scheme not in ("redis", "rediss") or not (parts.path.strip("/") or "0").isdecimal():
        raise ConfigError(usage, field="redis_url")
    return f"{parts.scheme}://{address}{parts.path}"


async def _check_server(client: Redis) -> None:
    try:
        info = await client.info("server")
        version, mode = str(info["redis_version"]), info.get("redis_mode", STANDALONE)
    except (ResponseError, KeyError):  # not permitted, or not Redis itself
        return
    if mode != STANDALONE:  # transactions are over keys that a cluster would put in several places
        raise RedisError(f"it runs as {mode}, a {STANDALONE} one is needed")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and tuple(map(int, numbers.groups())) < OLDEST_REDIS:
        raise RedisError(f"version {version} is too old, 6.2 is needed")
