"""KV blocks: who refers to them, which tokens they hold, which to take next.

A block is in one of three states: used (references > 0), cached (no references, but findable by its
hash), unused. Free blocks, cached or not, wait in one least-recently-used queue.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.block_hash import BLOCK_SIZE


@dataclass(slots=True)
class CacheEvents:
    """Block hashes that entered and left the prefix cache since the last drain, in order within each list."""

    stored: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)


class BlockPool:
    """Reference-counted blocks with an LRU prefix cache. Not thread-safe: the engine's lock guards it."""

    def __init__(self, num_blocks: int, *, enable_caching: bool = True, block_size: int = BLOCK_SIZE) -> None:
        """block_size: tokens a block; another than BLOCK_SIZE is for tests of the scheduler, which need no memory."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_caching = enable_caching
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next to take first
        self._events = CacheEvents()

    @property
    def num_free(self) -> int:
        """Blocks that allocate() can hand out, cached ones included."""
        return len(self._free)

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def cached_hashes(self) -> list[bytes]:
        """All hashes that match() would find."""
        return list(self._block_of)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix, each with one more reference."""
        found = [self._block_of[h] for h in self._cached_prefix(hashes)]
        self.share(found)
        return found

    def _cached_prefix(self, hashes: Sequence[bytes]) -> Iterable[bytes]:
        for block_hash in hashes:
            if block_hash not in self._block_of:
                return
            yield block_hash

    def share(self, block_ids: Iterable[int]) -> None:
        """One more reference on each block."""
        for block in block_ids:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, their old content forgotten; None when there are not enough."""
        if count > len(self._free):
            return None
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def free(self, block_ids: Sequence[int]) -> None:
        """One reference less on each; the blocks of a prefix are to be given in its order.

        A prefix is useless without its beginning, so its last blocks are taken first; blocks that
        nothing can find again are taken before any cached one.
        """
        for block in reversed(block_ids):
            if self._references[block] <= 0:
                raise AssertionError(f"block {block} is freed more often than referenced")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Makes a full, computed block findable. The first block with a hash keeps it."""
        if not self.enable_caching or block_hash in self._block_of or self._hash_of[block_id] is not None:
            return
        self._hash_of[block_id] = block_hash
        self._block_of[block_hash] = block_id
        self._events.stored.append(block_hash)

    def unpublish(self, block_hash: bytes) -> None:
        """Nobody finds the block with this hash any more; who has it keeps it."""
        block = self._block_of.get(block_hash)
        if block is not None:
            self._forget(block)
            if self._references[block] == 0:
                self._free.move_to_end(block, last=False)

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            self._hash_of[block] = None
            del self._block_of[block_hash]
            self._events.removed.append(block_hash)

    def drain_events(self) -> CacheEvents:
        """Hashes stored and removed since the last call.

        A hash that came and went (or went and came) in between is only in the list that says how it is now.
        """
        events, self._events = self._events, CacheEvents()
        if not events.stored or not events.removed:
            return events
        removed = dict.fromkeys(events.removed)
        stored = dict.fromkeys(events.stored)
        return CacheEvents(
            stored=[h for h in stored if h in self._block_of],
            removed=[h for h in removed if h not in self._block_of],
        )
