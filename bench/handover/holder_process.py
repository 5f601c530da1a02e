"""The holder of `kvrelay bench handover`, in a process of its own, and the caller's side of it.

python -m bench.handover.holder_process JSON says where its pool is; then it answers each line (a number of tokens,
block ids) with a handle in hex, until standard input ends.
"""

import asyncio
import json
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import uvloop

from bench.handover.loopback import Loopback, serve
from bench.pinned import ERROR, module_command, run_child
from cluster.parent_death import dying_with_parent
from common.deadlines import Deadlines
from common.engine.kv_pool import HostKVPool
from common.errors import KVRelayError
from common.layout import KVLayout
from common.rpc.channel import GrpcServer
from common.rpc.pb import kv_pb2, kv_pb2_grpc, types_pb2
from common.tasks import end
from kvtransfer.handle import KVHandle
from kvtransfer.holder import KVHolder
from kvtransfer.lease import LeaseTable
from kvtransfer.transport import choose, holders

FINGERPRINT = "bench"
EPOCH = 1
ANSWER_S = 60.0  # at most, for the first one, too


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


async def hold(layout: KVLayout, num_blocks: int, transport: str) -> None:
    deadlines = replace(Deadlines(), lease_s=600.0)  # a measurement may take long between two hand-overs
    pool = HostKVPool(layout, num_blocks, shared=True)
    pool.blocks[0].normal_()
    pool.blocks[1:] = pool.blocks[0]
    table = LeaseTable(time.monotonic, deadlines, EPOCH, lambda block_ids: None)
    service = KVHolder(
        table,
        fingerprint=FINGERPRINT,
        layout_id=layout.layout_id,
        transports=holders(choose(transport), pool),
        deadlines=deadlines,
        clock=time.monotonic,
    )
    server = GrpcServer("127.0.0.1", 0, deadlines)
    server.bind()
    kv_pb2_grpc.add_KVServicer_to_server(service, server.server)  # type: ignore[no-untyped-call]
    await server.start()
    expiry = asyncio.create_task(service.run())
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(listener, pool.memory), daemon=True).start()
    say({"fd": pool.fd, "blocks_offset": pool.blocks_offset, "socket_port": listener.getsockname()[1]})
    while words := (await asyncio.to_thread(sys.stdin.readline)).split():
        block_ids = [int(word) for word in words[1:]]
        lease = table.hold("bench", block_ids, int(words[0]))
        key = types_pb2.AttemptKey(request_id=f"r{table.num_granted}", attempt=1)
        handle = service.handle(lease, address=server.address, key=key)
        say({"handle": handle.SerializeToString().hex()})
    await end(expiry)
    await server.stop()
    pool.close()


def main() -> None:
    options = json.loads(sys.argv[1])
    uvloop.run(hold(KVLayout(**options["layout"]), options["num_blocks"], options["transport"]))


class Holder:
    """That process, and the caller's own view of its memory."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.memory: np.ndarray[Any, np.dtype[np.uint8]]
        self.loopback: Loopback

    async def open(self) -> None:
        where = await self._answer()
        fd = os.open(f"/proc/{self._process.pid}/fd/{where['fd']}", os.O_RDONLY)
        try:
            mapped = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self.memory = np.frombuffer(mapped, np.uint8)[where["blocks_offset"] :]
        self.loopback = Loopback(where["socket_port"], ANSWER_S)

    def close(self) -> None:
        self.loopback.close()

    async def hold(self, num_tokens: int, block_ids: Sequence[int]) -> KVHandle:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, (num_tokens, *block_ids))).encode() + b"\n")
        answer = await self._answer()
        return KVHandle.from_proto(kv_pb2.KVHandle.FromString(bytes.fromhex(answer["handle"])))

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(ANSWER_S):
            line = await self._process.stdout.readline()
        if not line:
            raise KVRelayError("the holder's process has ended")
        answer: dict[str, Any] = json.loads(line)
        if ERROR in answer:
            raise KVRelayError(answer[ERROR])
        return answer


@asynccontextmanager
async def running_holder(layout: KVLayout, num_blocks: int, transport: str) -> AsyncIterator[Holder]:
    """A holder of random KV."""
    options = {"layout": asdict(layout), "num_blocks": num_blocks, "transport": transport}
    process = await asyncio.create_subprocess_exec(
        *dying_with_parent(module_command("bench.handover.holder_process", options)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**20,
    )
    try:
        holder = Holder(process)
        await holder.open()
        with closing(holder):
            yield holder
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


if __name__ == "__main__":
    run_child(main)
