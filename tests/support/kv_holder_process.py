"""A holder in a process of its own, for tests: says where it is, then obeys lines on stdin until that ends.

`hold 3 4 9` answers a handle in hex; `expire` ends all leases; `state` answers held leases, held blocks and the freed
blocks; `pulls` answers how many streams of blocks are running.
"""

import asyncio
import hashlib
import json
import secrets
import sys
import time
from dataclasses import replace

from common.deadlines import Deadlines
from common.rpc.channel import GrpcServer
from common.rpc.pb import kv_pb2_grpc, types_pb2
from kvtransfer.holder import KVHolder
from kvtransfer.lease import LeaseTable
from kvtransfer.transport import choose, holders
from tests.support.kv_fakes import FINGERPRINT, LAYOUT, FakePool


class PullsHolder(KVHolder):
    """Knows how many pulls are running."""

    num_pulls = 0

    async def Pull(self, request, context):
        self.num_pulls += 1
        try:
            await super().Pull(request, context)
        finally:
            self.num_pulls -= 1


def say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def digests(pool) -> list[str]:
    size = pool.block_bytes
    return [hashlib.sha256(pool.memory[at : at + size]).hexdigest() for at in range(0, len(pool.memory), size)]


def make_pool(kind: str, num_blocks: int, block_bytes: int) -> object:
    """`fake`, or the engine's own pool with random bytes in it: `shared` or `unshared`."""
    if kind == "fake":
        return FakePool(num_blocks, block_bytes)
    from common.engine.kv_pool import HostKVPool

    pool = HostKVPool(LAYOUT, num_blocks, shared=kind == "shared")
    pool.memory[:] = secrets.token_bytes(len(pool.memory))
    return pool


async def main(
    *, port: int, epoch: int, lease_s: float, scale: float, kind: str, transport: str, num_blocks: int, block_bytes: int
) -> None:
    deadlines = replace(Deadlines().scaled(scale), lease_s=lease_s)
    freed: list[int] = []
    pool = make_pool(kind, num_blocks, block_bytes)
    table = LeaseTable(time.monotonic, deadlines, epoch, freed.extend)
    service = PullsHolder(
        table,
        fingerprint=FINGERPRINT,
        layout_id=LAYOUT.layout_id,
        transports=holders(choose(transport), pool),
        deadlines=deadlines,
        clock=time.monotonic,
    )
    server = GrpcServer("127.0.0.1", port, deadlines)
    kv_pb2_grpc.add_KVServicer_to_server(service, server.server)
    await server.start()
    expiring = asyncio.create_task(service.run())
    say({"port": server.port, "blocks": digests(pool)})
    while words := (await asyncio.to_thread(sys.stdin.readline)).split():
        match words[0]:
            case "hold":
                block_ids = [int(word) for word in words[1:]]
                lease = table.hold("sequence", block_ids, 16 * len(block_ids))
                key = types_pb2.AttemptKey(request_id="r1", attempt=1)
                say(service.handle(lease, address=server.address, key=key).SerializeToString().hex())
            case "expire":
                table.expire(time.monotonic() + lease_s)
                say(table.num_held)
            case "pulls":
                say(service.num_pulls)
            case "state":
                say({"held": table.num_held, "held_blocks": table.held_blocks, "freed": freed})
    expiring.cancel()
    await server.stop()


asyncio.run(main(**json.loads(sys.argv[1])))
