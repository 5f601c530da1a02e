"""Tensor names of GGUF and of Hugging Face, and how their numbers differ.

GGUF's names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "Standardized tensor names".
"""

import re
from dataclasses import dataclass

from common.model.gguf.header import GgufFile, GgufTensor
from common.model.gguf.rope_scaling import ROPE_TENSORS

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = {**_ATTENTION, "ffn_norm": "post_attention_layernorm", **_MLP}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_PHI3 = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    **_ATTENTION,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    **_MLP,
}
_LAYERS = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA | _HEAD_NORMS,
    "smollm3": _LLAMA,
    "phi3": _PHI3,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA | _HEAD_NORMS,
}
_ROTATES_PAIRS = ("llama", "smollm3")
_NORMS_FROM_ONE = ("gemma2", "gemma3")
_IGNORED = re.compile(r"blk\.\d+\.(attn_rot_embd|rope_freqs)(\.weight)?")  # constants of old files
_LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor under its Hugging Face name, and what makes its numbers Hugging Face's."""

    name: str
    source: GgufTensor
    pair_heads: int = 0  # its rows are this many heads of rotary pairs (0,1 2,3 ...), not halves (0,2,... 1,3,...)
    plus_one: bool = False  # it holds 1 + w, where Hugging Face has w


def named_tensors(file: GgufFile) -> dict[str, NamedTensor]:
    """All tensors by their Hugging Face names. Raises ModelError for one that the architecture doesn't have."""
    architecture = file.get("general.architecture", str)
    layers, named = _LAYERS[architecture], {}
    heads = file.get(f"{architecture}.attention.head_count", int, list)
    kv_heads = file.optional(f"{architecture}.attention.head_count_kv", int, list) or heads
    pair_heads = {"attn_q": heads, "attn_k": kv_heads} if architecture in _ROTATES_PAIRS else {}
    for tensor in file.tensors.values():
        if tensor.name in ROPE_TENSORS or _IGNORED.fullmatch(tensor.name):
            continue
        match = _LAYER.fullmatch(tensor.name)
        part = match[2] if match else ""
        name = f"model.layers.{int(match[1])}.{layers[part]}.{match[3]}" if match and part in layers else None
        name = name or _OUTSIDE.get(tensor.name)
        if name is None or name in named:
            raise file.error(f"tensor {tensor.name[:60]!r}", f"is no part of a {architecture} model")
        count = pair_heads.get(part, 0)
        count = count[0] if isinstance(count, list) else count
        if count and tensor.shape[0] % (2 * count):
            raise file.error(tensor.name, f"of {list(tensor.shape)} does not hold {count} heads")
        plus_one = architecture in _NORMS_FROM_ONE and name.endswith("norm.weight")
        named[name] = NamedTensor(name, tensor, count, plus_one)
    return named
