"""Pieces of the pool are the bytes asked for, in order and as long as they can be."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.copying import pieces


@given(data=st.data(), block_ids=st.lists(st.integers(0, 9), min_size=1, max_size=8), block_bytes=st.integers(1, 7))
def test_pieces_are_the_bytes_asked_for_and_neighbours_are_joined(data, block_ids, block_bytes):
    places = [block * block_bytes + i for block in block_ids for i in range(block_bytes)]
    offset = data.draw(st.integers(0, len(places)))
    size = data.draw(st.integers(0, len(places) - offset))
    found = list(pieces(block_ids, block_bytes, offset, size))
    assert [at for start, length in found for at in range(start, start + length)] == places[offset : offset + size]
    assert all(length > 0 for _, length in found)
    assert all(start + length != after for (start, length), (after, _) in itertools.pairwise(found))
