"""The least time that a step can take on this machine: its bytes at the streaming rate, or its products at the peak."""

from dataclasses import dataclass

from common.layout import DTYPE_BYTES
from common.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Work:
    """What a step has to do, however it is done."""

    bytes: int  # of weights and of KV that is read
    flops: int  # of matrix products, attention's included

    def floor_ms(self, stream_gb_s: float, matmul_gflop_s: float) -> tuple[float, str]:
        """The larger of both times, and which one it is: "bytes" or "flops"."""
        times = {"bytes": self.bytes / stream_gb_s / 1e6, "flops": self.flops / matmul_gflop_s / 1e6}
        bound = max(times, key=lambda name: times[name])
        return times[bound], bound


def layer_parameters(model: ModelConfig) -> int:
    """Elements of the matrices of one layer."""
    query_width, kv_width = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = model.hidden_size * (query_width + 2 * kv_width) + query_width * model.hidden_size
    return attention + 3 * model.hidden_size * model.intermediate_size


def weight_bytes(model: ModelConfig, dtype: str) -> int:
    """What every step reads: the matrices and norms of all layers, and the LM head; not the embedding."""
    norms = (2 * model.num_layers + 1) * model.hidden_size
    head = model.vocab_size * model.hidden_size
    return (model.num_layers * layer_parameters(model) + norms + head) * DTYPE_BYTES[dtype]


def step_work(model: ModelConfig, dtype: str, *, sampled: int, new_tokens: int, seen: int, cached: int) -> Work:
    """`seen`: tokens that the new ones look at, summed over them. `cached`: tokens whose KV is read from memory."""
    query_width = model.num_heads * model.head_dim
    products = new_tokens * model.num_layers * layer_parameters(model) + sampled * model.vocab_size * model.hidden_size
    attention = 2 * seen * model.num_layers * query_width  # scores, and the sum of the values
    layout = model.kv_layout(dtype)
    return Work(
        bytes=weight_bytes(model, dtype) + cached * layout.block_bytes // layout.block_size,
        flops=2 * (products + attention),
    )


def prefill_work(model: ModelConfig, dtype: str, tokens: int) -> Work:
    """One prompt, in one step; each token sees those before it and itself."""
    return step_work(model, dtype, sampled=1, new_tokens=tokens, seen=tokens * (tokens + 1) // 2, cached=tokens)


def decode_work(model: ModelConfig, dtype: str, batch: int, context: int) -> Work:
    """A token each for `batch` sequences that have `context` tokens in the cache."""
    seen = batch * (context + 1)
    return step_work(model, dtype, sampled=batch, new_tokens=batch, seen=seen, cached=batch * context)
