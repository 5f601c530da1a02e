"""The forward pass of a decoder-only model, written once over a table of operations for all families."""

import torch

from common.compute.ops.choose import Ops, StepInput
from common.compute.parallel import Alone, ParallelGroup
from common.compute.weights import LayerWeights, ModelWeights
from common.model.config import ModelConfig


class Decoder:
    """Weights and operations; it keeps nothing from step to step."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, ops: Ops, group: ParallelGroup | None = None
    ) -> None:
        """`group`: the workers that each have a part of the weights; None: all of them are here."""
        self.config = config
        self.weights = weights
        self.ops = ops
        self.group = group or Alone()

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    def forward(self, step: StepInput, cache: torch.Tensor) -> torch.Tensor:
        """Writes the step's KV into the cache; float32 logits [sample rows, vocab]."""
        ops, weights, config, eps = self.ops, self.weights, self.config, self.config.rms_norm_eps
        group, adapters = self.group, step.adapters
        prepared = ops.prepare(step, config, self.dtype)
        # A norm goes with the addition before it, so a layer ends with the norm that the next one begins with.
        next_norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.norm]
        last = len(weights.layers) - 1
        x = self._embed(step.token_ids)
        normed = ops.rms_norm(x, weights.layers[0].input_norm, eps)
        for i, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
            qkv = self._norm_heads(ops.linear(normed, layer.qkv, layer.qkv_bias, adapters), layer)
            q = ops.rotary_and_store(qkv, cache, i, prepared)
            if i == last and len(step.sample_rows) == 0:
                return torch.empty(0, config.vocab_size)
            attended = ops.attention(q, cache, i, prepared)
            if i == last:  # from here on only these rows matter
                attended, x = attended[step.sample_rows], x[step.sample_rows]
                adapters = None if adapters is None else adapters[step.sample_rows]
            added = group.all_reduce(ops.linear(attended, layer.out, layer.out_bias, adapters))
            added = self._norm(added, layer.out_norm)
            normed, x = ops.add_rms_norm(added, x, layer.post_norm, eps)
            added = group.all_reduce(layer.mlp.forward(normed, ops, config.activation, adapters))
            added = self._norm(added, layer.down_norm)
            normed, x = ops.add_rms_norm(added, x, next_norm, eps)
        logits = group.all_gather(ops.logits(normed, weights.head))
        return logits if config.logit_softcap is None else ops.soft_cap(logits, config.logit_softcap)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        x = self.group.all_reduce(self.ops.embedding(token_ids, self.weights.embedding))
        # As transformers does it, the scale is rounded to the dtype, too.
        return x if self.config.embedding_scale == 1 else x * x.new_tensor(self.config.embedding_scale)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else self.ops.rms_norm(x, weight, self.config.rms_norm_eps)

    def _norm_heads(self, qkv: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """Each head of Q and K by itself."""
        if layer.q_norm is None:
            return qkv
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        q, k, v = qkv.view(len(qkv), -1, self.config.head_dim).tensor_split((heads, heads + kv_heads), 1)
        q, k = self._norm(q.contiguous(), layer.q_norm), self._norm(k.contiguous(), layer.k_norm)
        return torch.cat([q, k, v], 1).flatten(1)
