"""A context's hashes are those of its tokens, however it came about, and each block is hashed once."""

import pytest

from common.block_hash import BLOCK_SIZE, block_hashes, root_hash
from router.fleet import hashed_tokens as module
from router.fleet.hashed_tokens import HashedTokens

TOKENS = list(range(5 * BLOCK_SIZE))


@pytest.mark.parametrize("first", [0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE])
@pytest.mark.parametrize("more", [0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, 2 * BLOCK_SIZE])
@pytest.mark.parametrize("salt", ["", "salt"])
def test_an_extended_context_has_the_hashes_of_all_its_tokens(first: int, more: int, salt: str) -> None:
    context = HashedTokens(TOKENS[:first], salt).extended(TOKENS[first : first + more])
    for revision in ("one", "two"):
        whole = block_hashes(root_hash(revision, cache_salt=salt), TOKENS[: first + more])
        assert context.hashes(revision) == whole
    assert len(context) == first + more


def test_each_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counting(parent: bytes, token_ids: list[int]) -> list[bytes]:
        hashed.append(len(token_ids) // BLOCK_SIZE)
        return block_hashes(parent, token_ids)

    monkeypatch.setattr(module, "block_hashes", counting)
    prompt = HashedTokens(TOKENS[: 3 * BLOCK_SIZE])
    for context in (prompt, prompt, prompt.extended(TOKENS[:BLOCK_SIZE]), prompt.extended(TOKENS[:1])):
        context.hashes("one")
    assert hashed == [3, 1, 0]
