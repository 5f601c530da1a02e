"""Workers introduce themselves in Redis; routers read who there is.

    <namespace>:workers                      set of "<worker id>:<epoch>"
    <namespace>:worker:<worker id>:<epoch>   JSON of a WorkerRecord, expires when it is no longer refreshed

Each key has one writer, for life. Redis only introduces: a record that is missing (expired, flushed, Redis frozen
or restarted) says nothing about its worker. A router drops a worker for its goodbye (`leaving`), for a new epoch
at its address, or for its failed health over gRPC, and for nothing that it fails to find here.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, cast

from redis.asyncio import Redis

from common.address import is_address
from common.cluster_key import ClusterKey
from common.deadlines import Deadlines
from common.discovery.redis_client import Outage, raise_if_cancelled
from common.discovery.signed_records import BadSignature, check, signed
from common.errors import RedisUnreachable
from common.log import get_logger, log_event

LOGGER = get_logger("registry")
RECORD_LIFE = 3  # times dead_s
ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """What a router has to know of a worker before the first contact."""

    role: str  # prefill or decode
    worker_id: str
    address: str  # host:port, gRPC
    http_address: str  # host:port of /metrics and /health
    epoch: int  # 64 bits, new at each start
    fingerprint: str
    model_revision: str  # root of its block hashes
    served_model_name: str
    max_model_len: int
    num_blocks: int
    block_size: int
    layout_id: str
    pid: int
    version: str
    max_num_seqs: int = 0  # sequences it runs at once; 0: not told
    tokenizer: str = ""  # SHA-256 of its content; empty: not told
    leaving: bool = False  # it said goodbye
    numerics: str = ""  # workers with equal ones round alike

    @property
    def member(self) -> str:
        """This life of this worker, as a part of key names."""
        return f"{self.worker_id}:{self.epoch:016x}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "WorkerRecord":
        """Ignores fields it doesn't know (a newer version's). Raises ValueError that names the field."""
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError("not an object")
        values: dict[str, Any] = {}
        for item in fields(cls):
            if item.name not in data and item.default is not MISSING:
                continue
            values[item.name] = value = data.get(item.name)
            if type(value) is not item.type:
                raise ValueError(f"{item.name} is {_short(value)}")
            if isinstance(value, str):
                value.encode()  # JSON can spell half a character, which no key name could hold
        record = cls(**values)
        record._check()
        return record

    def _check(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role is {_short(self.role)}")
        if not self.worker_id:
            raise ValueError("worker_id is empty")
        if not 0 <= self.epoch < 2**64:
            raise ValueError(f"epoch is {_short(self.epoch)}, not a 64-bit number")
        for name in ("address", "http_address"):
            if not is_address(getattr(self, name)):
                raise ValueError(f"{name} is {_short(getattr(self, name))}, not host:port")
        for name in ("max_model_len", "num_blocks", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {_short(getattr(self, name))}")


def _short(value: object) -> str:
    return f"{value!r:.100}"


class Registry:
    """One cluster's workers. With a key records are signed, and those that are not are ignored."""

    def __init__(
        self,
        redis: Redis,
        namespace: str,
        deadlines: Deadlines,
        outage: Outage | None = None,
        *,
        key: ClusterKey | None = None,
    ) -> None:
        self.outage = outage or Outage()
        self._cluster_key = key
        self._redis = redis
        self._namespace = namespace
        self._deadlines = deadlines
        self._life_ms = max(1, round(deadlines.dead_s * RECORD_LIFE * 1000))
        self._left: set[str] = set()  # who said goodbye through this object stays gone
        self._malformed: set[str] = set()  # reported already

    async def announce(self, record: WorkerRecord) -> None:
        """Says once that this worker is there. Raises RedisUnreachable."""
        if record.member in self._left:
            record = replace(record, leaving=True)
        text, key = record.to_json(), self._cluster_key
        text = text if key is None else signed(text, self._namespace, key)
        with self.outage.noticed("registry"):
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.set(self._key(record.member), text, px=self._life_ms)
                pipe.sadd(f"{self._namespace}:workers", record.member)
                pipe.pexpire(f"{self._namespace}:workers", self._life_ms)
                await pipe.execute()

    async def keep_announced(self, record: WorkerRecord) -> None:
        """Announces with every heartbeat until it is cancelled, whatever happens to Redis."""
        cleared = False
        while True:
            raise_if_cancelled()
            with contextlib.suppress(RedisUnreachable):  # logged by the outage; the next heartbeat tries again
                if not cleared:
                    await self._clear_earlier_lives(record)
                    cleared = True
                await self.announce(record)
            await asyncio.sleep(self._deadlines.heartbeat_s)

    async def goodbye(self, record: WorkerRecord) -> None:
        """Tells routers to send nothing more; keep_announced repeats it from now on. Raises RedisUnreachable."""
        self._left.add(record.member)
        await self.announce(record)

    async def workers(self) -> list[WorkerRecord]:
        """All records there are now, those of leaving workers included. Raises RedisUnreachable."""
        return sorted((await self._records()).values(), key=lambda record: record.member)

    async def keep_listed(self, seen: Callable[[list[WorkerRecord]], None]) -> None:
        """Calls `seen` with all records, every heartbeat that Redis answers, until it is cancelled."""
        while True:
            raise_if_cancelled()
            with contextlib.suppress(RedisUnreachable):
                seen(await self.workers())
            await asyncio.sleep(self._deadlines.heartbeat_s)

    def _key(self, member: str) -> str:
        return f"{self._namespace}:worker:{member}"

    async def _members(self) -> dict[str, bytes | None]:
        """Every member with its record's JSON; None where that has expired."""
        with self.outage.noticed("registry"):
            names = cast(set[bytes], await self._redis.smembers(f"{self._namespace}:workers"))
            members = [name.decode(errors="replace") for name in names]
            keys = [self._key(member) for member in members]
            texts = cast(list[bytes | None], await self._redis.mget(keys)) if keys else []
        return dict(zip(members, texts, strict=True))

    async def _records(self) -> dict[str, WorkerRecord]:
        texts = await self._members()
        self._malformed &= texts.keys()
        records = {member: self._parsed(member, text) for member, text in texts.items() if text is not None}
        return {member: record for member, record in records.items() if record is not None}

    def _parsed(self, member: str, text: bytes) -> WorkerRecord | None:
        try:
            if self._cluster_key is not None:
                check(text, self._namespace, self._cluster_key)
            record = WorkerRecord.from_json(text)
        except (ValueError, RecursionError) as error:
            if member not in self._malformed:
                self._malformed.add(member)
                what = "ignored a forged record" if isinstance(error, BadSignature) else "skipped a malformed record"
                log_event(LOGGER, logging.WARNING, what, worker=member, reason=str(error))
            return None
        self._malformed.discard(member)
        return record

    async def _clear_earlier_lives(self, record: WorkerRecord) -> None:
        """Removes records of this worker's or this address's earlier epochs, and members whose record expired."""

        def earlier(other: WorkerRecord) -> bool:
            same = other.worker_id == record.worker_id or other.address == record.address
            return same and other.epoch != record.epoch

        expired = [member for member, text in (await self._members()).items() if text is None]
        gone = expired + [member for member, other in (await self._records()).items() if earlier(other)]
        if not gone:
            return
        with self.outage.noticed("registry"):
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.delete(*map(self._key, gone))
                pipe.srem(f"{self._namespace}:workers", *gone)
                await pipe.execute()
