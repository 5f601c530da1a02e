"""Chained hashes of full blocks: equal hash, equal tokens from the start on, equal model and salt."""

import array
import hashlib
import sys
from collections.abc import Sequence

BLOCK_SIZE = 16  # tokens
HASH_BYTES = 16
SCHEME = "sha256-16/u32le"  # part of the fingerprint


def root_hash(model_revision: str, adapter: str = "", cache_salt: str = "") -> bytes:
    """Parent of every first block; parts are length-prefixed so that no two tuples collide."""
    digest = hashlib.sha256()
    for part in (model_revision, adapter, cache_salt):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()[:HASH_BYTES]


def block_hashes(parent: bytes, token_ids: Sequence[int], block_size: int = BLOCK_SIZE) -> list[bytes]:
    """Hashes of the full blocks of token_ids, which start right after the block that `parent` names."""
    hashes = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        tokens = array.array("I", token_ids[start : start + block_size])
        if sys.byteorder == "big":
            tokens.byteswap()
        parent = hashlib.sha256(parent + tokens.tobytes()).digest()[:HASH_BYTES]
        hashes.append(parent)
    return hashes
