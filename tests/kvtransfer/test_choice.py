"""Two processes find the best way that both of them want and can prove, by themselves."""

import shutil
import subprocess
import time

import pytest

from common.deadlines import Deadlines
from kvtransfer.reader import KVReader
from kvtransfer.transport import Offer, choose
from kvtransfer.transports.grpc import GrpcHolder
from kvtransfer.transports.shm import ShmHolder
from tests.support.kv_fakes import FAST, FINGERPRINT, LAYOUT, FakePool, running_holder
from tests.support.kv_processes import digest, holder_process

pytestmark = pytest.mark.slow


def can_unshare() -> bool:
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


async def transport_between(reader_kinds: str, **options) -> str:
    """Which transport the blocks went by, and right, between this process and a holder's."""
    pool = FakePool()
    reader = KVReader(pool, LAYOUT, FINGERPRINT, Deadlines(), time.monotonic, transports=choose(reader_kinds))
    async with holder_process(scale=1.0, lease_s=30.0, **options) as holder:
        async with reader.claimed(await holder.hold()) as claim:
            stats = await claim.pull([(3, 0), (4, 1), (9, 5)])
            await claim.confirm()
        assert [digest(pool.block(i)) for i in (0, 1, 5)] == [holder.digests[i] for i in (3, 4, 9)]
        await reader.close()
    pool.close()
    return stats.transport


@pytest.mark.parametrize(
    ("reader", "holder", "chosen"),
    [("auto", "auto", "shm"), ("grpc", "auto", "grpc"), ("auto", "grpc", "grpc"), ("grpc,shm", "auto", "grpc")],
)
async def test_the_best_way_that_both_sides_want_is_taken(reader, holder, chosen):
    assert await transport_between(reader, transport=holder) == chosen


async def test_a_pool_that_is_not_shared_goes_by_grpc():
    assert await transport_between("auto", kind="unshared") == "grpc"


@pytest.mark.skipif(not can_unshare(), reason="no new PID namespace here")
async def test_a_holder_in_another_pid_namespace_goes_by_grpc():
    prefix = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    assert await transport_between("auto", prefix=prefix) == "grpc"


class Lost(ShmHolder):
    """Says another process's number, as a holder of another host or namespace does."""

    def offer(self) -> Offer:
        offer = super().offer()
        return Offer(offer.name, {**offer.params, "pid": str(2**22 + 1)})


async def test_shared_memory_that_cannot_be_reached_gives_way_to_grpc():
    source, target = FakePool(), FakePool()
    reader = KVReader(target, LAYOUT, FINGERPRINT, FAST, time.monotonic)
    async with running_holder(transports=[Lost(source), GrpcHolder(source)]) as holder:
        async with reader.claimed(holder.hold((3, 4))) as claim:
            assert (await claim.pull([(3, 0), (4, 9)])).transport == "grpc"
            await claim.confirm()
        assert holder.freed == [3, 4]
        assert (target.block(0), target.block(9)) == (source.block(3), source.block(4))
        await reader.close()
    source.close()
    target.close()
