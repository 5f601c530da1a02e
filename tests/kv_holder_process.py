"""A holder in a process of its own, for tests: says where it is, then obeys lines on stdin until that ends.

`hold 3 4 9` answers a handle in hex; `state` answers held leases, held blocks and the freed blocks.
"""

import asyncio
import hashlib
import json
import secrets
import sys
import time
from dataclasses import replace

from kv_fakes import FAST, FINGERPRINT, LAYOUT, FakePool

from common.grpc_server import GrpcServer
from common.rpc import kv_pb2_grpc
from kvtransfer.holder import KVHolder
from kvtransfer.lease import LeaseTable
from kvtransfer.shm import ShmHolder


def say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def digests(memory: memoryview) -> list[str]:
    size = LAYOUT.block_bytes
    return [hashlib.sha256(memory[start : start + size]).hexdigest() for start in range(0, len(memory), size)]


def real_pool() -> object:
    """The engine's own pool, with random bytes in it."""
    from common.engine.kv_cache import KVPool

    pool = KVPool(LAYOUT, 16, shared=True)
    pool.memory[:] = secrets.token_bytes(len(pool.memory))
    return pool


async def main(port: int, epoch: int, lease_s: float, kind: str) -> None:
    freed: list[int] = []
    pool = real_pool() if kind == "real" else FakePool()
    table = LeaseTable(time.monotonic, replace(FAST, lease_s=lease_s), epoch, freed.extend)
    service = KVHolder(
        table,
        fingerprint=FINGERPRINT,
        layout_id=LAYOUT.layout_id,
        transports=[ShmHolder(pool)],
        clock=time.monotonic,
    )
    server = GrpcServer("127.0.0.1", port, FAST)
    kv_pb2_grpc.add_KVServicer_to_server(service, server.server)
    await server.start()
    expiring = asyncio.create_task(service.run())
    say({"port": server.port, "blocks": digests(pool.memory)})
    while words := (await asyncio.to_thread(sys.stdin.readline)).split():
        if words[0] == "hold":
            block_ids = [int(word) for word in words[1:]]
            lease = table.hold("sequence", block_ids, 16 * len(block_ids))
            handle = service.handle(lease, address=server.address, request_id="r1", attempt=1)
            say(handle.to_proto().SerializeToString().hex())
        else:
            say({"held": table.num_held, "held_blocks": table.held_blocks, "freed": freed})
    expiring.cancel()
    await server.stop()


asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]))
