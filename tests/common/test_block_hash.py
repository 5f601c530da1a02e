"""Block hashes are those of the written scheme, and equal only for equal tokens after an equal start."""

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.block_hash import BLOCK_SIZE, HASH_BYTES, block_hashes, root_hash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)
PART = st.text(max_size=6)


def by_the_scheme(parent: bytes, token_ids: list[int], block_size: int) -> list[bytes]:
    hashes = []
    while len(token_ids) >= block_size:
        block, token_ids = token_ids[:block_size], token_ids[block_size:]
        parent = hashlib.sha256(parent + struct.pack(f"<{block_size}I", *block)).digest()[:16]
        hashes.append(parent)
    return hashes


def test_block_and_hash_sizes_are_those_of_the_wire():
    assert (BLOCK_SIZE, HASH_BYTES) == (16, 16)


def test_root_of_a_revision_is_a_known_value():
    parts = b"".join(struct.pack("<Q", len(part)) + part for part in (b"model@1", b"", b"salt"))
    assert root_hash("model@1", cache_salt="salt") == hashlib.sha256(parts).digest()[:16]


def test_first_block_of_a_known_prompt_has_a_known_hash():
    assert block_hashes(bytes(16), range(16))[0].hex() == "41f37273f5dcb9d417f8541c20d382ed"


@pytest.mark.parametrize(("count", "blocks"), [(0, 0), (1, 0), (15, 0), (16, 1), (17, 1), (31, 1), (32, 2), (33, 2)])
def test_only_full_blocks_have_a_hash(count, blocks):
    hashes = block_hashes(root_hash("m"), list(range(count)))
    assert len(hashes) == blocks
    assert all(len(block_hash) == HASH_BYTES for block_hash in hashes)


@given(TOKENS, st.integers(1, 20), st.binary(min_size=16, max_size=16))
@settings(max_examples=60, deadline=None)
def test_hashes_follow_the_scheme(token_ids, block_size, parent):
    assert block_hashes(parent, token_ids, block_size) == by_the_scheme(parent, token_ids, block_size)


@given(TOKENS, st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_hashing_may_go_on_from_any_full_block(token_ids, done):
    root = root_hash("m")
    whole = block_hashes(root, token_ids, 4)
    done = min(done, len(whole))
    rest = block_hashes(whole[done - 1] if done else root, token_ids[done * 4 :], 4)
    assert whole[:done] + rest == whole


@given(TOKENS, st.data())
@settings(max_examples=60, deadline=None)
def test_a_changed_token_changes_its_block_and_all_after_it(token_ids, data):
    blocks = len(token_ids) // 4
    if not blocks:
        return
    at = data.draw(st.integers(0, blocks * 4 - 1))
    changed = list(token_ids)
    changed[at] ^= 1
    before, after = (block_hashes(root_hash("m"), ids, 4) for ids in (token_ids, changed))
    assert [a == b for a, b in zip(before, after, strict=True)] == [block < at // 4 for block in range(blocks)]


@given(st.tuples(PART, PART, PART), st.tuples(PART, PART, PART))
@settings(max_examples=50, deadline=None)
def test_roots_are_equal_only_for_equal_parts(parts, others):
    assert (root_hash(*parts) == root_hash(*others)) == (parts == others)


@pytest.mark.parametrize(
    ("parts", "others"), [(("ab", "", ""), ("a", "b", "")), (("a", "b", ""), ("a", "", "b")), (("", "", "a"), ("a",))]
)
def test_parts_of_a_root_do_not_run_together(parts, others):
    assert root_hash(*parts) != root_hash(*others)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_beyond_32_bits_is_refused_not_wrapped(token):
    with pytest.raises(OverflowError):
        block_hashes(root_hash("m"), [token] * 16)
