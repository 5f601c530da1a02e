"""The tokens that a worker is to have before it can go on, and what they are called in prefix caches."""

from collections.abc import Sequence

from common.block_hash import BLOCK_SIZE, block_hashes, root_hash


class HashedTokens:
    """Tokens of one request, with their block hashes: each block is hashed once, however often they are asked for."""

    def __init__(self, token_ids: Sequence[int], cache_salt: str = "", before: "HashedTokens | None" = None) -> None:
        """`before` is a context of the same request that these tokens begin with."""
        self.token_ids = token_ids
        self.cache_salt = cache_salt
        self._before = before
        self._hashes: dict[str, list[bytes]] = {}  # by model revision

    def __len__(self) -> int:
        return len(self.token_ids)

    def extended(self, output_ids: Sequence[int]) -> "HashedTokens":
        """With these tokens behind."""
        if not output_ids:
            return self
        return HashedTokens((*self.token_ids, *output_ids), self.cache_salt, before=self)

    def hashes(self, model_revision: str) -> list[bytes]:
        """Block hashes as the caches of workers with this model have them."""
        known = self._hashes.get(model_revision)
        if known is None:
            begun = [] if self._before is None else self._before.hashes(model_revision)
            parent = begun[-1] if begun else root_hash(model_revision, cache_salt=self.cache_salt)
            known = begun + block_hashes(parent, self.token_ids[len(begun) * BLOCK_SIZE :])
            self._hashes[model_revision] = known
        return known
