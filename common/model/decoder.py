"""The forward pass of the Llama family, written once over a table of operations."""

import torch

from common.model.config import ModelConfig
from common.model.weights import ModelWeights
from common.ops import Ops, StepInput


class Decoder:
    """Weights and operations; it keeps nothing from step to step."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, ops: Ops) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    def forward(self, step: StepInput, cache: torch.Tensor) -> torch.Tensor:
        """Writes the step's KV into the cache; float32 logits [sample rows, vocab]."""
        ops, weights, eps = self.ops, self.weights, self.config.rms_norm_eps
        prepared = ops.prepare(step, self.config, self.dtype)
        # Each layer's second norm ends with the next one's first, so that it goes with the addition before it.
        next_norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.norm]
        x = ops.embedding(step.token_ids, weights.embedding)
        normed = ops.rms_norm(x, weights.layers[0].input_norm, eps)
        for i, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
            q = ops.rotary_and_store(ops.linear(normed, layer.qkv), cache, i, prepared)
            if next_norm is weights.norm and len(step.sample_rows) == 0:
                break
            attended = ops.attention(q, cache, i, prepared)
            if next_norm is weights.norm:  # after the last layer's attention only these rows matter
                attended, x = attended[step.sample_rows], x[step.sample_rows]
            normed, x = ops.add_rms_norm(ops.linear(attended, layer.out), x, layer.post_norm, eps)
            mlp = ops.silu_and_mul(ops.linear(normed, layer.gate_up))
            normed, x = ops.add_rms_norm(ops.linear(mlp, layer.down), x, next_norm, eps)
        return ops.logits(normed[: len(step.sample_rows)], weights.head)
