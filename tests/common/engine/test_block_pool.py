"""The block pool counts references, takes the least recently used block and finds what is cached, as a plain model."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.engine.block_pool import BlockPool, CacheEvents


def hashes(names: str) -> list[bytes]:
    return [name.encode() for name in names]


def filled(pool: BlockPool, names: str) -> list[int]:
    """Blocks with one reference, published under one-letter hashes."""
    blocks = pool.allocate(len(names))
    assert blocks is not None
    for block, block_hash in zip(blocks, hashes(names), strict=True):
        pool.publish(block, block_hash)
    return blocks


@pytest.mark.parametrize(("count", "given"), [(0, True), (3, True), (4, True), (5, False)])
def test_a_pool_of_four_gives_at_most_four_blocks(count, given):
    pool = BlockPool(4)
    blocks = pool.allocate(count)
    assert (blocks is not None) == given
    assert pool.num_free == (4 - count if given else 4)
    assert blocks is None or len(set(blocks)) == count


def test_a_block_is_free_only_after_its_last_reference():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.free([block])
    assert (pool.references(block), pool.num_free) == (1, 1)
    pool.free([block])
    assert (pool.references(block), pool.num_free) == (0, 2)


def test_freeing_more_often_than_referenced_is_refused():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="more often"):
        pool.free(blocks)


@pytest.mark.parametrize(
    ("asked", "found"), [("abc", 3), ("abx", 2), ("axc", 1), ("xbc", 0), ("", 0), ("abcd", 3), ("ab", 2)]
)
def test_only_an_unbroken_prefix_is_found(asked, found):
    pool = BlockPool(8)
    blocks = filled(pool, "abc")
    assert pool.match(hashes(asked)) == blocks[:found]
    assert [pool.references(block) for block in blocks] == [2] * found + [1] * (3 - found)


def test_the_end_of_a_prefix_is_taken_before_its_beginning():
    pool = BlockPool(3)
    pool.free(filled(pool, "abc"))
    for left in ("ab", "a", ""):
        pool.allocate(1)
        assert pool.cached_hashes() == hashes(left)


def test_the_prefix_used_last_is_taken_last():
    pool = BlockPool(4)
    pool.free(filled(pool, "ab"))
    pool.free(filled(pool, "cd"))
    pool.free(pool.match(hashes("ab")))
    pool.allocate(2)
    assert sorted(pool.cached_hashes()) == hashes("ab")


def test_a_block_that_nothing_can_find_is_taken_before_any_cached_one():
    pool = BlockPool(4)
    pool.free(filled(pool, "abc"))
    plain = pool.allocate(1)
    pool.free(plain)
    assert pool.allocate(1) == plain
    assert sorted(pool.cached_hashes()) == hashes("abc")


def test_the_first_block_with_a_hash_keeps_it():
    pool = BlockPool(4)
    (first,), (second,) = filled(pool, "a"), filled(pool, "a")
    pool.free([second])
    pool.free([first])
    assert pool.match(hashes("a")) == [first]
    assert pool.drain_events() == CacheEvents(stored=hashes("a"))


def test_a_block_keeps_its_first_hash():
    pool = BlockPool(2)
    (block,) = filled(pool, "a")
    pool.publish(block, b"b")
    assert pool.cached_hashes() == [b"a"]


def test_without_caching_nothing_is_found():
    pool = BlockPool(2, enable_caching=False)
    pool.free(filled(pool, "ab"))
    assert pool.match(hashes("ab")) == []
    assert pool.drain_events() == CacheEvents()


def test_a_hash_that_came_and_went_is_gone_for_who_replays_the_events():
    pool = BlockPool(1)
    pool.free(filled(pool, "a"))
    pool.allocate(1)
    events = pool.drain_events()
    assert (events.stored, events.removed) == ([], [b"a"])


def test_a_hash_that_went_and_came_back_is_there_for_who_replays_the_events():
    pool = BlockPool(1)
    pool.free(filled(pool, "a"))
    pool.drain_events()
    pool.free(filled(pool, "a"))
    events = pool.drain_events()
    assert (events.stored, events.removed) == ([b"a"], [])


def test_what_is_unpublished_is_found_no_more_and_taken_first():
    pool = BlockPool(4)
    first, second = filled(pool, "ab")
    pool.free([first, second])
    pool.drain_events()
    for _ in range(2):
        pool.unpublish(b"a")
    assert (pool.match(hashes("a")), pool.drain_events().removed) == ([], [b"a"])
    assert pool.allocate(3) == [first, 2, 3]
    assert pool.cached_hashes() == [b"b"]


class PoolMachine(RuleBasedStateMachine):
    """The pool beside a model of lists and counters. `held` are the references given out, in prefix order."""

    @initialize(size=st.integers(1, 7), caching=st.sampled_from([True, True, False]))
    def start(self, size: int, caching: bool) -> None:
        self.pool = BlockPool(size, enable_caching=caching)
        self.caching = caching
        self.queue = list(range(size))  # free blocks, next to take first
        self.hash_of: dict[int, bytes] = {}
        self.held: list[list[int]] = []
        self.replayed: set[bytes] = set()

    def counts(self) -> Counter[int]:
        return Counter(block for blocks in self.held for block in blocks)

    def take(self, blocks: list[int]) -> None:
        self.queue = [block for block in self.queue if block not in blocks]
        self.held.append(blocks)

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        expected = self.queue[:count] if count <= len(self.queue) else None
        blocks = self.pool.allocate(count)
        assert blocks == expected
        if blocks is not None:
            assert not set(blocks) & set(self.counts())
            for block in blocks:
                self.hash_of.pop(block, None)
            self.take(blocks)

    @rule(names=st.text("abcdef", max_size=5))
    def match(self, names: str) -> None:
        block_of = {block_hash: block for block, block_hash in self.hash_of.items()}
        expected: list[int] = []
        for block_hash in hashes(names):
            if block_hash not in block_of:
                break
            expected.append(block_of[block_hash])
        assert self.pool.match(hashes(names)) == expected
        self.take(expected)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = list(data.draw(st.sampled_from(self.held or [[]])))
        self.pool.share(blocks)
        self.held.append(blocks)

    @rule(data=st.data(), name=st.sampled_from("abcdef"))
    def publish(self, data: st.DataObject, name: str) -> None:
        blocks = sorted(self.counts())
        if not blocks:
            return
        block = data.draw(st.sampled_from(blocks))
        self.pool.publish(block, name.encode())
        if self.caching and block not in self.hash_of and name.encode() not in self.hash_of.values():
            self.hash_of[block] = name.encode()

    @rule(name=st.sampled_from("abcdef"))
    def unpublish(self, name: str) -> None:
        self.pool.unpublish(name.encode())
        for block in [block for block, block_hash in self.hash_of.items() if block_hash == name.encode()]:
            del self.hash_of[block]
            if block in self.queue:
                self.queue.remove(block)
                self.queue.insert(0, block)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if not self.held:
            return
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.free(blocks)
        self.release(blocks)

    def release(self, blocks: list[int]) -> None:
        remaining = self.counts()
        for index, block in reversed(list(enumerate(blocks))):
            if block in remaining or block in blocks[:index]:
                continue
            if block in self.hash_of:
                self.queue.append(block)
            else:
                self.queue.insert(0, block)

    @rule()
    def drain(self) -> None:
        events = self.pool.drain_events()
        assert not set(events.stored) & set(events.removed)
        self.replayed = (self.replayed - set(events.removed)) | set(events.stored)
        assert self.replayed == set(self.hash_of.values())

    @invariant()
    def agrees_with_the_model(self) -> None:
        counts = self.counts()
        assert [self.pool.references(block) for block in range(self.pool.num_blocks)] == [
            counts[block] for block in range(self.pool.num_blocks)
        ]
        assert self.pool.num_free == len(self.queue) == self.pool.num_blocks - len(counts)
        assert sorted(self.pool.cached_hashes()) == sorted(self.hash_of.values())

    def teardown(self) -> None:
        for blocks in self.held:
            self.pool.free(blocks)
        assert self.pool.num_free == self.pool.num_blocks


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
