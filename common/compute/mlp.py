"""What a layer does after attention: a gated MLP, or another thing of the same shape, such as a mixture of experts."""

from dataclasses import dataclass
from typing import Protocol

import torch

from common.compute.linear_weight import LinearWeight
from common.compute.ops.table import Ops


class Mlp(Protocol):
    """x [T, hidden] -> [T, hidden], without norms and residual. `adapters` as in StepInput, of the rows of x."""

    def forward(self, x: torch.Tensor, ops: Ops, activation: str, adapters: torch.Tensor | None) -> torch.Tensor: ...

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All memory that its weights take."""
        ...


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x)), gate and up in one matrix."""

    gate_up: LinearWeight  # [2 * intermediate, hidden]
    down: LinearWeight  # [hidden, intermediate]
    gate_up_bias: torch.Tensor | None = None  # [2 * intermediate]
    down_bias: torch.Tensor | None = None  # [hidden]

    def forward(self, x: torch.Tensor, ops: Ops, activation: str, adapters: torch.Tensor | None) -> torch.Tensor:
        gated = ops.silu_and_mul if activation == "silu" else ops.gelu_and_mul
        inner = gated(ops.linear(x, self.gate_up, self.gate_up_bias, adapters))
        return ops.linear(inner, self.down, self.down_bias, adapters)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        biases = (bias for bias in (self.gate_up_bias, self.down_bias) if bias is not None)
        return (*self.gate_up.tensors, *self.down.tensors, *biases)
