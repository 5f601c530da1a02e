"""What tests against Redis share: quick deadlines, a record builder, a cache, waiting, and what was logged."""

import asyncio
import inspect
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest

from common.deadlines import Deadlines
from common.discovery.registry import WorkerRecord

# Quick heartbeats, but patience with a busy machine.
QUICK = Deadlines(heartbeat_s=0.05, suspect_s=0.5, dead_s=1.0, connect_s=10.0, rpc_s=10.0)


def a_record(**changes: Any) -> WorkerRecord:
    values: dict[str, Any] = {
        "role": "prefill",
        "worker_id": "worker-1",
        "address": "127.0.0.1:4000",
        "http_address": "127.0.0.1:4001",
        "epoch": 7,
        "fingerprint": "fingerprint",
        "model_revision": "revision",
        "served_model_name": "model",
        "max_model_len": 4096,
        "num_blocks": 100,
        "block_size": 16,
        "layout_id": "layout",
        "pid": 123,
        "version": "0.1.0",
    }
    return WorkerRecord(**(values | changes))


def a_hash(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Cache:
    """A worker's cache, as simple as it can be: the truth to compare with."""

    def __init__(self, num_blocks: int = 50) -> None:
        self.blocks: dict[bytes, None] = {}
        self.num_blocks = num_blocks
        self.next = 0

    def step(self, rng: random.Random, most: int = 8) -> tuple[list[bytes], list[bytes]]:
        """What one step stores and removes: new blocks, and some that were there before."""
        stored: dict[bytes, None] = {}
        removed: dict[bytes, None] = {}
        for _ in range(rng.randint(0, most)):
            self.next += 1
            block = a_hash(rng.randint(0, self.next))
            if block in self.blocks:
                continue
            if len(self.blocks) == self.num_blocks:
                oldest = next(iter(self.blocks))
                del self.blocks[oldest]
                removed[oldest] = None
            self.blocks[block] = None
            stored[block] = None
        return [b for b in stored if b in self.blocks], [b for b in removed if b not in self.blocks]

    def snapshot(self) -> list[bytes]:
        return list(self.blocks)


async def eventually(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    """Waits until the condition (or what it awaits) is true; fails after timeout_s."""
    async with asyncio.timeout(timeout_s):
        while True:
            result = condition()
            if inspect.isawaitable(result):
                result = await result
            if result:
                return
            await asyncio.sleep(0.005)


def lines_of(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    """What was logged from `level` on."""
    return [record.getMessage() for record in caplog.records if record.levelno >= level]
