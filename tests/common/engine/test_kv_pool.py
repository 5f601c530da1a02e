"""The pool is what its layout says, shared only with readers, gone when it is closed, and refused if memory lacks."""

import gc
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.engine import kv_pool
from common.engine.kv_pool import HEADER_BYTES, HUGE_PAGE, HostKVPool
from common.errors import StartupError
from common.layout import KVLayout

pytestmark = pytest.mark.slow

LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=8, dtype="bfloat16")


def make_pool(num_blocks: int = 5, *, shared: bool = False, layout: KVLayout = LAYOUT) -> HostKVPool:
    return HostKVPool(layout, num_blocks, shared=shared)


@pytest.fixture(params=[True, False], ids=["shared", "anonymous"])
def pool(request: pytest.FixtureRequest):
    pool = make_pool(shared=request.param)
    yield pool
    pool.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_blocks_are_tensors_over_the_memory(dtype: str):
    layout = KVLayout(2, 3, 8, dtype)
    pool = make_pool(shared=True, layout=layout)
    assert pool.blocks.shape == (5, 2, 2, 3, 16, 8)
    assert pool.blocks.dtype == getattr(torch, dtype)
    assert (len(pool.memory), pool.block_bytes) == (5 * layout.block_bytes, layout.block_bytes)
    assert (pool.blocks == 0).all()
    pool.blocks[3, 1, 0, 2, 15, 7] = 1.5
    one = torch.tensor([1.5], dtype=getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
    last_of_head = 3 * layout.block_bytes + (((1 * 2 + 0) * 3 + 2) * 16 * 8 + 15 * 8 + 7) * len(one)
    assert pool.memory[last_of_head : last_of_head + len(one)] == one
    pool.close()


def test_a_copy_is_of_the_whole_block_and_in_order(pool: HostKVPool):
    for block in range(5):
        pool.blocks[block] = block
    pool.copy_blocks([(0, 1), (1, 2), (4, 0)])
    assert [pool.blocks[block].unique().tolist() for block in range(5)] == [[4], [0], [0], [3], [4]]


def test_anonymous_memory_starts_at_a_huge_page():
    pool = make_pool()
    assert pool.blocks.data_ptr() % HUGE_PAGE == 0
    assert (pool.fd, pool.nonce) == (None, b"")
    pool.close()


@pytest.mark.parametrize("shared", [True, False])
def test_every_page_is_there_from_the_start(shared: bool):
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    layout, before = KVLayout(8, 8, 64, "float32"), resident()
    pool = HostKVPool(layout, 64, shared=shared)
    assert resident() - before >= 64 * layout.block_bytes
    pool.close()


@pytest.mark.parametrize("works", [True, False], ids=["populate", "write"])
def test_memory_is_prefaulted_with_or_without_the_kernels_help(works: bool, monkeypatch: pytest.MonkeyPatch):
    if not works:
        monkeypatch.setattr(kv_pool, "_MADV_POPULATE_WRITE", 9999)  # what an older kernel says to it: EINVAL
    pool = make_pool(300)
    assert (pool.blocks == 0).all()
    pool.close()


def test_another_process_reads_the_nonce_and_the_blocks():
    pool = make_pool(shared=True)
    pool.blocks.fill_(2)
    path = f"/proc/{os.getpid()}/fd/{pool.fd}"
    program = f"data = open({path!r}, 'rb').read(); import sys; sys.stdout.buffer.write(data)"
    data = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30, check=True).stdout
    assert data[: len(pool.nonce)] == pool.nonce
    assert len(pool.nonce) == 32
    assert pool.blocks_offset == HEADER_BYTES
    assert data[pool.blocks_offset :] == pool.memory.tobytes()
    pool.close()


def test_nonces_differ():
    pools = [make_pool(shared=True) for _ in range(3)]
    assert len({pool.nonce for pool in pools}) == 3
    for pool in pools:
        pool.close()


def test_a_reader_can_neither_write_nor_cut():
    pool = make_pool(shared=True)
    fd = os.open(f"/proc/self/fd/{pool.fd}", os.O_RDWR)
    try:
        for harm in (lambda: os.ftruncate(fd, 0), lambda: os.pwrite(fd, b"x", 0), lambda: mmap.mmap(fd, 0)):
            with pytest.raises(PermissionError):
                harm()
        assert len(mmap.mmap(fd, 0, prot=mmap.PROT_READ)) == HEADER_BYTES + len(pool.memory)
    finally:
        os.close(fd)
    pool.blocks.fill_(1)  # its owner still can
    pool.close()


@pytest.mark.parametrize("shared", [True, False])
def test_closing_gives_memory_and_descriptors_back(shared: bool):
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    gc.collect()
    descriptors, before = set(os.listdir("/proc/self/fd")), mapped()
    pool = HostKVPool(KVLayout(8, 8, 64, "float32"), 64, shared=shared)
    size, kept = len(pool.memory), pool.blocks[7]
    pool.close()
    pool.close()
    assert (kept == 0).all()  # a view that is still in use keeps the memory
    assert mapped() - before >= size
    del kept
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    assert mapped() - before < size / 2


def test_nothing_is_left_after_a_kill():
    program = (
        "import os, time; from common.engine.kv_pool import HostKVPool; from common.layout import KVLayout\n"
        "pool = HostKVPool(KVLayout(2, 3, 8, 'bfloat16'), 5, shared=True); print('up', flush=True); time.sleep(60)"
    )
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"up\n"
        child.send_signal(signal.SIGKILL)
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("num_blocks", [2**40, 2**60])
def test_a_pool_beyond_memory_is_refused_before_it_is_taken(num_blocks: int, shared: bool):
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(StartupError, match="MiB of memory are available") as caught:
        make_pool(num_blocks, shared=shared)
    assert caught.value.field == "kv_cache_memory"
    assert set(os.listdir("/proc/self/fd")) == before


def test_what_the_kernel_refuses_is_one_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kv_pool, "available_memory", lambda: 2**80)
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    for shared in (True, False):
        with pytest.raises(StartupError, match="no memory for a KV pool"):
            make_pool(2**45, shared=shared)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_an_empty_pool_is_refused(num_blocks: int):
    with pytest.raises(StartupError, match="at least one block"):
        make_pool(num_blocks)
