"""The reader copies exactly the blocks asked for out of another process's memory, and refuses memory not proven."""

import asyncio
import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import HandoverError, TransportUnavailable
from kvtransfer.transport import Offer, Ticket
from kvtransfer.transports import shm
from kvtransfer.transports.shm import ShmHolder, ShmReader
from tests.support.kv_fakes import FakePool, memfds_mapped
from tests.support.paths import ROOT

TICKET = Ticket(bytes(16), 1, 5)  # shared memory asks for none
CHANNEL = None  # and needs no channel

FOREIGN_HOLDER = """
import json, sys
from tests.support.kv_fakes import FakePool
from kvtransfer.transports.shm import ShmHolder
pool = FakePool(4)
print(json.dumps(dict(ShmHolder(pool).offer().params)), flush=True)
print(pool.nonce.hex(), flush=True)
print(pool.block(2).hex(), flush=True)
sys.stdin.read()
"""


def start_holder() -> subprocess.Popen[str]:
    """Prints its offer, nonce and block 2; ends with its stdin."""
    command = [sys.executable, "-c", FOREIGN_HOLDER]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


@pytest.fixture
def executor():
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
def source():
    pool = FakePool(12)
    yield pool
    pool.close()


@pytest.fixture
def target():
    pool = FakePool(10)
    yield pool
    pool.close()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def ignore(done: int) -> None:
    pass


@settings(max_examples=40, deadline=None)
@given(data=st.data(), slice_bytes=st.sampled_from([1000, 8192, 20000]))
def test_the_named_blocks_are_copied_and_no_others_touched(data, slice_bytes):
    sources = data.draw(st.lists(st.integers(0, 11), max_size=10))
    targets = data.draw(st.permutations(range(10)))[: len(sources)]
    if data.draw(st.booleans()):
        sources, targets = sorted(sources), sorted(targets)  # long runs
    pairs = list(zip(sources, targets, strict=True))
    source, target, moved = FakePool(12), FakePool(10), []
    expected = target.blocks()
    for source_id, target_id in pairs:
        expected[target_id] = source.block(source_id)

    async def copy() -> None:
        with ThreadPoolExecutor(1) as executor, pytest.MonkeyPatch.context() as patch:
            patch.setattr(shm, "SLICE_BYTES", slice_bytes)
            reader = ShmReader(executor, CHANNEL)
            assert await reader.open(ShmHolder(source).offer()) == source.nonce
            await reader.pull(TICKET, pairs, target, moved.append)
            reader.close()

    asyncio.run(copy())
    assert target.blocks() == expected
    assert moved[0] == 0
    assert moved[-1] == len(pairs) * target.block_bytes
    assert all(0 < after - before <= slice_bytes for before, after in itertools.pairwise(moved))
    source.close()
    target.close()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_runs_are_the_pairs_again_and_as_long_as_they_can_be(pairs):
    runs = list(shm._runs(pairs))
    assert [(source + i, target + i) for source, target, count in runs for i in range(count)] == pairs
    for (source, target, count), after in itertools.pairwise(runs):
        assert (source + count, target + count) != after[:2]


def test_only_the_nonce_of_this_pool_is_a_proof(source, target):
    holder = ShmHolder(source)
    assert holder.verify(source.nonce)
    for wrong in (b"", target.nonce, source.nonce[:-1], source.nonce + b"\0"):
        assert not holder.verify(wrong)


async def test_memory_of_another_process_is_read_and_unreachable_once_it_is_killed(executor, target):
    child = start_holder()
    try:
        offer = Offer("shm", json.loads(child.stdout.readline()))
        nonce, block = (bytes.fromhex(child.stdout.readline()) for _ in range(2))
        reader = ShmReader(executor, CHANNEL)
        assert await reader.open(offer) == nonce
        child.kill()
        child.wait(10)
        await reader.pull(TICKET, [(2, 5)], target, ignore)  # the map outlives its owner; the holder's word is missing
        assert target.block(5) == block
        reader.close()
        with pytest.raises(TransportUnavailable):
            await ShmReader(executor, CHANNEL).open(offer)
    finally:
        child.kill()
        child.communicate(timeout=10)


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": str(2**22 + 1)},
        {"fd": "9999"},
        {"started": "1"},
        {"size": "4096"},
        {"size": "0"},
        {"num_blocks": "13"},
        {"block_bytes": "0"},
        {"block_bytes": str(10**18)},
        {"nonce_bytes": "0"},
        {"nonce_bytes": "4097"},
        {"nonce_bytes": "33", "blocks_offset": "32"},
        {"pid": ""},
        {"pid": "self"},
        {"pid": "-1"},
        {"fd": "../../../etc/passwd"},
        {"fd": "1.0"},
        {"fd": "²"},
        {"size": "9" * 30},
    ],
)
async def test_an_offer_that_leads_elsewhere_is_unavailable_and_leaves_nothing_open(executor, source, changes):
    offer = ShmHolder(source).offer()
    before = open_fds()
    with pytest.raises(TransportUnavailable):
        await ShmReader(executor, CHANNEL).open(Offer("shm", {**offer.params, **changes}))
    assert open_fds() == before


@pytest.mark.parametrize("name", shm.PARAMS)
async def test_a_missing_parameter_is_named(executor, source, name):
    params = dict(ShmHolder(source).offer().params)
    del params[name]
    with pytest.raises(TransportUnavailable) as caught:
        await ShmReader(executor, CHANNEL).open(Offer("shm", params))
    assert caught.value.field == f"offer.{name}"


async def test_a_memfd_that_could_shrink_under_the_reader_is_refused(executor):
    pool = FakePool(2, sealed=False)
    with pytest.raises(TransportUnavailable, match="cut short"):
        await ShmReader(executor, CHANNEL).open(ShmHolder(pool).offer())
    pool.close()


async def test_an_fd_that_is_no_memfd_is_not_even_opened(executor, source, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    fd = os.open(fifo, os.O_RDWR)
    try:
        params = {**ShmHolder(source).offer().params, "fd": str(fd)}
        with pytest.raises(TransportUnavailable, match="not a memfd"):
            await asyncio.wait_for(ShmReader(executor, CHANNEL).open(Offer("shm", params)), 5)
    finally:
        os.close(fd)


async def test_an_fd_number_reused_by_another_pool_gives_another_proof(executor, source, target):
    params = {**ShmHolder(source).offer().params, "fd": str(target.fd), "size": str(os.fstat(target.fd).st_size)}
    reader = ShmReader(executor, CHANNEL)
    proof = await reader.open(Offer("shm", {**params, "num_blocks": "10"}))
    assert not ShmHolder(source).verify(proof)
    reader.close()


async def test_the_holders_memory_cannot_be_written_and_is_let_go(executor, source):
    before, fds = memfds_mapped(), open_fds()
    reader = ShmReader(executor, CHANNEL)
    await reader.open(ShmHolder(source).offer())
    assert memfds_mapped() == before + 1
    with pytest.raises(TypeError):
        reader._map[5000] = 1
    reader.close()
    reader.close()
    assert (memfds_mapped(), open_fds()) == (before, fds)


async def test_a_copy_that_fails_raises_its_error_and_the_map_still_closes(executor, source, target):
    def fail(done: int) -> None:
        raise HandoverError("stop here")

    reader, before = ShmReader(executor, CHANNEL), memfds_mapped()
    await reader.open(ShmHolder(source).offer())
    with pytest.raises(HandoverError, match="stop here") as caught:
        await reader.pull(TICKET, [(0, 0)], target, fail)
    reader.close()
    assert memfds_mapped() == before
    assert caught.value.__traceback__ is not None
