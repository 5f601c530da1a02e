"""The test's side of a holder in another process: starts it, asks it, freezes it and kills it."""

import asyncio
import hashlib
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import asynccontextmanager

from common.rpc.pb import kv_pb2
from kvtransfer.handle import KVHandle
from tests.support.kv_fakes import EPOCH, FAST, LAYOUT
from tests.support.paths import ROOT

PATIENCE_S = 30


class HolderProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.port = 0
        self.digests: list[str] = []

    async def answer(self):
        line = await asyncio.wait_for(self.process.stdout.readline(), PATIENCE_S)
        return json.loads(line)

    async def ask(self, line: str):
        self.process.stdin.write(line.encode() + b"\n")
        return await self.answer()

    async def hold(self, *block_ids: int) -> KVHandle:
        data = await self.ask("hold " + " ".join(map(str, block_ids or (3, 4, 9))))
        return KVHandle.from_proto(kv_pb2.KVHandle.FromString(bytes.fromhex(data)))

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        self.process.kill()
        await asyncio.wait_for(self.process.wait(), PATIENCE_S)


@asynccontextmanager
async def holder_process(
    *,
    port: int = 0,
    epoch: int = EPOCH,
    lease_s: float = FAST.lease_s,
    scale: float = 0.1,
    kind: str = "fake",
    transport: str = "auto",
    num_blocks: int = 16,
    block_bytes: int = LAYOUT.block_bytes,
    prefix: Sequence[str] = (),
):
    """`scale` is of its deadlines, all but the lease; `prefix` comes in front of the command that starts it."""
    options = {
        "port": port,
        "epoch": epoch,
        "lease_s": lease_s,
        "scale": scale,
        "kind": kind,
        "transport": transport,
        "num_blocks": num_blocks,
        "block_bytes": block_bytes,
    }
    process = await asyncio.create_subprocess_exec(
        *prefix,
        sys.executable,
        "-m",
        "tests.support.kv_holder_process",
        json.dumps(options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**20,
        cwd=ROOT,
    )
    holder = HolderProcess(process)
    try:
        hello = await holder.answer()
        holder.port, holder.digests = hello["port"], hello["blocks"]
        yield holder
    finally:
        if process.returncode is None:
            holder.thaw()
            await holder.kill()


def digest(block: bytes) -> str:
    return hashlib.sha256(block).hexdigest()
