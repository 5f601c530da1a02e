"""The table of operations that a decoder is written over, and what one step hands to it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from common.compute.linear_weight import LinearWeight
from common.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step as tensors: T tokens of N chunks, a chunk's tokens in successive rows; all int64."""

    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    token_blocks: torch.Tensor  # [T], the block that gets the token's KV, at position % 16
    row_starts: tuple[int, ...]  # [N + 1], the first row of each chunk, and T
    contexts: tuple[int, ...]  # [N], tokens that the chunk's last token sees, itself included
    block_ids: torch.Tensor  # [B], of all chunks' tables, one behind the other
    table_starts: tuple[int, ...]  # [N + 1], the first entry of each chunk's table, and B
    sample_rows: torch.Tensor  # [S], rows whose logits are wanted
    adapters: torch.Tensor | None = None  # [T], of each row the id of its adapter (LoRA); None: no row has one


Prepare = Callable[[StepInput, ModelConfig, torch.dtype], Any]
MatMul = Callable[[torch.Tensor, LinearWeight, torch.Tensor | None, torch.Tensor | None], torch.Tensor]
AddNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


class UnknownWeight(TypeError):
    """An op table was given a weight that it can't multiply with: a defect of choosing, not of a request."""


@dataclass(frozen=True, slots=True)
class Ops:
    """Rows are tokens, [T, ...]; weights of norms are tensors, all others LinearWeights. A backend replaces what it
    does better, and raises UnknownWeight for a kind or an adapter that it has no product for.

    Every operation answers a row with the same bits whatever other rows there are. `cache` is the whole pool
    [block, layer, K/V, kv head, 16, head dim]. `prepare` makes what rotary_and_store and attention of the same
    backend need in every layer; the three are replaced together.
    """

    name: str
    embedding: Callable[[torch.Tensor, LinearWeight], torch.Tensor]  # ids [T], weight -> [T, hidden]
    linear: MatMul  # x [T, in], weight, bias [out] or None, adapters [T] or None -> [T, out]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]  # x, weight, eps
    # A weight of a norm may be float32 where x is not; then all of the norm is, and its answer is rounded once.
    add_rms_norm: AddNorm  # x, residual, weight, eps -> norm(x + residual), x + residual
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]  # gate and up [T, 2 * inner] -> [T, inner]
    gelu_and_mul: Callable[[torch.Tensor], torch.Tensor]  # the same with GELU's tanh approximation
    soft_cap: Callable[[torch.Tensor, float], torch.Tensor]  # float32 x, cap -> cap * tanh(x / cap)
    logits: Callable[[torch.Tensor, LinearWeight], torch.Tensor]  # x [S, hidden], head -> float32 [S, vocab]
    prepare: Prepare  # step, model, dtype of activations and cache
    rotary_and_store: Callable[[torch.Tensor, torch.Tensor, int, Any], torch.Tensor]
    # qkv [T, (heads + 2 * kv heads) * head dim], cache, layer, prepared -> rotated q [T, heads, head dim]
    attention: Callable[[torch.Tensor, torch.Tensor, int, Any], torch.Tensor]
    # q [T, heads, head dim], cache, layer, prepared -> [T, heads * head dim]
