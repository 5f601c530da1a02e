"""A tiny GGUF of a Llama with a byte-level BPE tokenizer, as a converter from Hugging Face would write it."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from tokenizers import pre_tokenizers

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS = 4, 2, 16, 64, 128, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w")
TOKENS = (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES))
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
VALUES: dict[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.context_length": 512,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.vocab_size": len(TOKENS),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
}


def tensors() -> dict[str, np.ndarray]:
    """Under their GGUF names, in float32."""
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (HIDDEN,),
            f"blk.{i}.attn_q": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_output": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{i}.ffn_norm": (HIDDEN,),
            f"blk.{i}.ffn_gate": (INNER, HIDDEN),
            f"blk.{i}.ffn_up": (INNER, HIDDEN),
            f"blk.{i}.ffn_down": (HIDDEN, INNER),
        }
    random = np.random.default_rng(0)
    return {f"{name}.weight": random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    drop: str = "",
    extra: str = "",
    quantized: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """drop and extra are names of tensors; matrices are quantized where a type is given."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in VALUES.items():
        writer.add_uint32(name, value)
    writer.add_float32("llama.rope.freq_base", 100000.0)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(TOKENS))
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_merges(list(MERGES))
    writer.add_chat_template(TEMPLATE)
    for name, tensor in (tensors() | ({extra: np.ones(4, np.float32)} if extra else {})).items():
        if name == drop:
            continue
        if quantized is not None and tensor.ndim == 2:
            writer.add_tensor(name, quantize(tensor, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
