"""The memory of the KV pool: shared with readers on this host, or anonymous with huge pages."""

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
from collections.abc import Iterable
from typing import Protocol

import torch

from common.engine.memory import available_memory
from common.errors import StartupError
from common.layout import KVLayout

HEADER_BYTES = 4096  # in front of a shared pool's blocks
NONCE_BYTES = 32  # at the very start of the header
HUGE_PAGE = 2 * 2**20
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1


class KVPool(Protocol):
    """The KV memory that a model computes on, wherever it is; what others may read of it is the transports' matter."""

    layout: KVLayout
    num_blocks: int
    blocks: torch.Tensor  # [num_blocks, layer, K/V, kv head, 16, head dim]

    @property
    def num_bytes(self) -> int: ...

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies (source, destination) blocks, one after the other."""
        ...

    def close(self) -> None:
        """Lets go of the memory."""
        ...


class HostKVPool:
    """A KVPool in this machine's memory: `num_blocks` blocks of a layout, every page of them present.

    A shared pool is a memfd that others may open for reading (through /proc or a Unix socket): `nonce` at its start,
    the blocks from `blocks_offset` on. It is gone with its last user, also after a kill.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, *, shared: bool) -> None:
        if num_blocks < 1:
            raise StartupError(f"a KV pool needs at least one block, got {num_blocks}", field="kv_cache_memory")
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_bytes = layout.block_bytes
        self.fd: int | None = None
        self.nonce = secrets.token_bytes(NONCE_BYTES) if shared else b""
        size = num_blocks * self.block_bytes
        available = available_memory()
        if size > available:
            raise StartupError(
                f"a KV pool of {num_blocks} blocks takes {size / 2**20:.0f} MiB, but only {available / 2**20:.0f} MiB "
                "of memory are available",
                field="kv_cache_memory",
            )
        try:
            mapping, self.blocks_offset = self._shared(size) if shared else self._anonymous(size)
            _prefault(mapping, self.blocks_offset, size)
        except (OSError, OverflowError, ValueError) as error:
            self._close_fd()
            raise StartupError(f"no memory for a KV pool of {size} bytes: {error}", field="kv_cache_memory") from error
        self.memory = memoryview(mapping)[self.blocks_offset : self.blocks_offset + size]
        dtype: torch.dtype = getattr(torch, layout.dtype)
        self.blocks = torch.frombuffer(self.memory, dtype=dtype).view(num_blocks, *layout.shape)

    def _shared(self, size: int) -> tuple[mmap.mmap, int]:
        self.fd = os.memfd_create("kvrelay-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, HEADER_BYTES + size)
        memory = mmap.mmap(self.fd, HEADER_BYTES + size, flags=mmap.MAP_SHARED)
        memory[:NONCE_BYTES] = self.nonce
        # A reader can neither cut the file short, which would kill the holder, nor write to it.
        for seals in (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, _F_SEAL_FUTURE_WRITE):
            with contextlib.suppress(OSError):  # an older kernel lacks the second
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        return memory, HEADER_BYTES

    @staticmethod
    def _anonymous(size: int) -> tuple[mmap.mmap, int]:
        memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        offset = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory, offset

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies (source, destination) blocks, one after the other."""
        for source, destination in pairs:
            self.blocks[destination] = self.blocks[source]

    def close(self) -> None:
        """Lets go of the memory, which is unmapped with the last tensor or view of it. May be called twice."""
        self.blocks = torch.empty(0)
        self.memory = memoryview(b"")
        self._close_fd()

    def _close_fd(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def _prefault(memory: mmap.mmap, offset: int, size: int) -> None:
    """Gives every page its memory now, so that no step waits for the kernel."""
    first = offset - offset % mmap.PAGESIZE
    try:
        memory.madvise(_MADV_POPULATE_WRITE, first, offset + size - first)
    except OSError:  # an older kernel: touch each page
        for at in range(offset, offset + size, mmap.PAGESIZE):
            memory[at] = 0
