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
    """What every step reads: all layers' matrices and two norms each, and the LM head. Biases are left out as small."""
    norms = (2 * model.num_layers + 1) * model.hidden_size
    head = model.vocab_size * model.hidden_size
    return (model.num_layers * layer_parameters(model) + norms + head) * DTYPE_BYTES[dtype]


def prefill_work(model: ModelConfig, dtype: str, tokens: int) -> Work:
    """One prompt, in one step; each token sees those before it and itself, as far as a layer's window goes."""
    windows = [min(layer.window or tokens, tokens) for layer in model.layers]
    seen = [window * (window + 1) // 2 + (tokens - window) * window for window in windows]
    return _work(model, dtype, new_tokens=tokens, sampled=1, seen=sum(seen), read=tokens * model.num_layers)


def decode_work(model: ModelConfig, dtype: str, batch: int, context: int) -> Work:
    """A token each for `batch` sequences that have `context` tokens in the cache."""
    seen = sum(min(layer.window or context + 1, context + 1) for layer in model.layers)
    read = seen - model.num_layers  # a token's own keys and values are at hand
    return _work(model, dtype, new_tokens=batch, sampled=batch, seen=batch * seen, read=batch * read)


def _work(model: ModelConfig, dtype: str, *, new_tokens: int, sampled: int, seen: int, read: int) -> Work:
    """`seen`: keys that queries meet, `read`: tokens whose keys and values come from memory; both over all layers."""
    products = new_tokens * model.num_layers * layer_parameters(model) + sampled * model.vocab_size * model.hidden_size
    attention = 2 * seen * model.num_heads * model.head_dim  # scores, and the sum of the values
    kv_bytes = 2 * model.num_kv_heads * model.head_dim * DTYPE_BYTES[dtype]
    return Work(bytes=weight_bytes(model, dtype) + read * kv_bytes, flops=2 * (products + attention))
