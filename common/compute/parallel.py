"""The workers that share one model's layers between them (https://arxiv.org/abs/1909.08053)."""

from typing import Protocol

import torch


class ParallelGroup(Protocol):
    """Collective operations of a group; every member calls them in the same order."""

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all members' x [T, hidden]: of the rows of `out`, of `down` and of a divided embedding."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All members' x [S, vocab / size] side by side, in order: of a divided LM head."""
        ...


class Alone:
    """A ParallelGroup of one."""

    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x
