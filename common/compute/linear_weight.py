"""The matrix of a linear operation, in whatever form it is kept; the op tables know what to do with each kind."""

from dataclasses import dataclass
from typing import Protocol

import torch


class LinearWeight(Protocol):
    """A matrix [out, in]. An embedding and an LM head are one, too: they may be the same."""

    @property
    def kind(self) -> str:
        """What an op table knows it by, such as dense."""
        ...

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations that it is multiplied with."""
        ...

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All memory that it takes."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight:
    """A LinearWeight as a plain matrix."""

    tensor: torch.Tensor  # [out, in]

    @property
    def kind(self) -> str:
        return "dense"

    @property
    def out_features(self) -> int:
        return self.tensor.shape[0]

    @property
    def in_features(self) -> int:
        return self.tensor.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.tensor,)
