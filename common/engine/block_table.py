"""A sequence's blocks: found by prefix, grown, copied before a write to a shared one, published, freed."""

from dataclasses import dataclass

from common.block_hash import block_hashes
from common.engine.block_pool import BlockPool
from common.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks for a prompt whose KV comes from elsewhere; the caller's until admitted or cancelled, once."""

    forks: tuple[Sequence, ...]  # equal but for their last token, whose KV is still to be computed
    block_ids: tuple[int, ...]
    num_cached_blocks: int  # leading ones, whose KV is here already


class BlockTables:
    """Everything that changes a sequence's block_ids. Not thread-safe: the engine's lock guards it."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.block_size = pool.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def extend_hashes(self, sequence: Sequence) -> None:
        done = len(sequence.block_hashes)
        if (done + 1) * self.block_size <= sequence.num_tokens:
            parent = sequence.block_hashes[-1] if done else sequence.root
            rest = sequence.token_ids[done * self.block_size :]
            sequence.block_hashes += block_hashes(parent, rest, self.block_size)

    def find_prefix(self, sequence: Sequence) -> None:
        """Takes cached blocks for a waiting sequence; the last token is always computed, for its logits.

        Where log-probabilities of the prompt are still to come, all are computed, as in vLLM.
        """
        self.extend_hashes(sequence)
        if sequence.num_unscored_tokens or sequence.uncached:
            return
        sequence.block_ids = self.pool.match(sequence.block_hashes[: (sequence.num_tokens - 1) // self.block_size])
        sequence.num_computed_tokens = len(sequence.block_ids) * self.block_size

    def make_room(self, sequence: Sequence, count: int, copies: dict[Sequence, tuple[int, int]]) -> bool:
        """Blocks of its own for the next `count` tokens: new ones, and a copy of a shared one it would write to.

        The reference on the copy's source lasts until the step that copies it has ended.
        """
        size = self.block_size
        first = sequence.num_computed_tokens // size
        partial = sequence.num_computed_tokens % size > 0
        shared = partial and self.pool.references(sequence.block_ids[first]) > 1
        needed = self.blocks_for(sequence.num_computed_tokens + count) - len(sequence.block_ids)
        fresh = self.pool.allocate(max(needed, 0) + shared)
        if fresh is None:
            return False
        if shared:
            source, copy = sequence.block_ids[first], fresh.pop()
            copies[sequence] = (source, copy)
            sequence.block_ids[first] = copy
        sequence.block_ids += fresh
        return True

    def publish(self, sequence: Sequence, num_published_tokens: int) -> None:
        size = self.block_size
        for index in range(num_published_tokens // size, sequence.num_computed_tokens // size):
            self.pool.publish(sequence.block_ids[index], sequence.block_hashes[index])

    def unpublish(self, sequence: Sequence) -> None:
        """No later sequence finds a block with these tokens, whoever computed it."""
        for block_hash in sequence.block_hashes:
            self.pool.unpublish(block_hash)

    def free(self, sequence: Sequence) -> None:
        self.pool.free(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed_tokens = 0
