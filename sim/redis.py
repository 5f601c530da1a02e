"""The few commands of Redis that the registry uses, with expiry in virtual time, and Redis's ways to fail."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

Command = Callable[[], Any]


class SimRedis:
    """A server and every client of it."""

    def __init__(self, clock: Callable[[], float], rng: random.Random, timeout_s: float) -> None:
        self.state = "up"  # or "down", or "frozen"
        self._clock = clock
        self._rng = rng
        self._timeout_s = timeout_s
        self._values: dict[str, tuple[bytes | set[bytes], float | None]] = {}

    def flush(self) -> None:
        self._values.clear()

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        """A round trip."""
        await asyncio.sleep(0.001 * self._rng.random())
        if self.state == "frozen":
            await asyncio.sleep(self._timeout_s)
            raise RedisTimeoutError("Timeout reading from socket")
        if self.state == "down":
            raise RedisConnectionError("Connection refused")
        return [command() for command in commands]

    def pipeline(self, transaction: bool = True) -> "SimPipeline":
        return SimPipeline(self)

    async def smembers(self, key: str) -> set[bytes]:
        return (await self.run([lambda: set(self._get(key) or ())]))[0]

    async def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        return (await self.run([lambda: [self._get(key) for key in keys]]))[0]

    def _get(self, key: str) -> Any:
        value, ends_at = self._values.get(key, (None, None))
        if ends_at is not None and ends_at <= self._clock():
            del self._values[key]
            return None
        return value

    def _expiry(self, px: int) -> float:
        return self._clock() + px / 1000

    def do_set(self, key: str, value: str, px: int) -> None:
        self._values[key] = (value.encode(), self._expiry(px))

    def do_sadd(self, key: str, *members: str) -> None:
        known = self._get(key) or set()
        self._values[key] = (known | {member.encode() for member in members}, self._values.get(key, (None, None))[1])

    def do_pexpire(self, key: str, px: int) -> None:
        if (value := self._get(key)) is not None:
            self._values[key] = (value, self._expiry(px))

    def do_delete(self, *keys: str) -> None:
        for key in keys:
            self._values.pop(key, None)

    def do_srem(self, key: str, *members: str) -> None:
        if (value := self._get(key)) is not None:
            self._values[key] = (value - {member.encode() for member in members}, self._values[key][1])


class SimPipeline:
    """Collects commands until execute()."""

    def __init__(self, redis: SimRedis) -> None:
        self._redis = redis
        self._commands: list[Command] = []

    async def __aenter__(self) -> "SimPipeline":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._commands.clear()

    def __getattr__(self, name: str) -> Callable[..., "SimPipeline"]:
        method = getattr(self._redis, f"do_{name}")

        def queue(*args: Any, **options: Any) -> "SimPipeline":
            self._commands.append(lambda: method(*args, **options))
            return self

        return queue

    async def execute(self) -> list[Any]:
        return await self._redis.run(self._commands)
