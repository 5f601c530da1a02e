"""A Llama GGUF as a Hugging Face model directory: bf16 safetensors, tokenizer.json, chat template, configs."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from common.errors import ModelError

_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of special tokens
_ALIGNMENT = 64  # of the data section, so that mapped tensors start on cache lines

# Hugging Face name to GGUF name, in the order in which they are written: q, k, v and gate, up are neighbours,
# so that common/model/weights.py can map each of the two groups as one matrix.
_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

Progress = Callable[[int, int], None]  # tensors done, tensors in all


def convert_gguf(path: Path, directory: Path, *, progress: Progress = lambda done, total: None) -> None:
    """Writes a model directory from a GGUF of a Llama with a byte-level BPE tokenizer. Raises ModelError."""
    try:
        reader = gguf.GGUFReader(path)
        values = {name: field.contents() for name, field in reader.fields.items()}
        _write_json(directory / "config.json", _config(values))
        _write_tokenizer(directory, values)
        _write_weights(directory / "model.safetensors", reader, values, progress)
    except (KeyError, ValueError, IndexError) as error:
        raise ModelError(f"{path.name} can't be converted: {error!r}", field="model") from error


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(values: dict[str, Any]) -> dict[str, Any]:
    if values["general.architecture"] != "llama" or values["tokenizer.ggml.model"] != "gpt2":
        raise ValueError("only a llama with a byte-level BPE tokenizer is supported")
    hidden_size, num_heads = values["llama.embedding_length"], values["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": values["llama.vocab_size"],
        "hidden_size": hidden_size,
        "intermediate_size": values["llama.feed_forward_length"],
        "num_hidden_layers": values["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": float(f"{values['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # undo float32 rounding
        "rope_theta": values["llama.rope.freq_base"],
        "max_position_embeddings": values["llama.context_length"],
        "tie_word_embeddings": True,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
        "pad_token_id": values["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(directory: Path, values: dict[str, Any]) -> None:
    if values["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"the pre-tokenizer {values['tokenizer.ggml.pre']!r} is not supported")
    tokens: list[str] = values["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = values["tokenizer.ggml.token_type"]
    specials = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.save(str(directory / "tokenizer.json"))

    template: str = values["tokenizer.chat_template"]
    bos, eos, pad, unknown = (
        values[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding", "unknown")
    )
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[bos],
            "eos_token": tokens[eos],
            "pad_token": tokens[pad],
            "unk_token": tokens[unknown],
            "additional_special_tokens": specials,
            "add_bos_token": values["tokenizer.ggml.add_bos_token"],
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": values["llama.context_length"],
            "chat_template": template,
        },
    )
    _write_json(directory / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad})


def _write_weights(path: Path, reader: gguf.GGUFReader, values: dict[str, Any], progress: Progress) -> None:
    """Dequantizes one tensor at a time; the norms and the tied embedding come first and last."""
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = {"model.embed_tokens.weight": "token_embd.weight"}
    for i in range(values["llama.block_count"]):
        names |= {
            f"model.layers.{i}.{ours}.weight": f"blk.{i}.{theirs}.weight" for ours, theirs in _LAYER_TENSORS.items()
        }
    names["model.norm.weight"] = "output_norm.weight"
    if set(names.values()) != set(tensors):
        raise ValueError(f"unexpected tensors {sorted(set(names.values()) ^ set(tensors))[:3]}")

    heads = {".attn_q.": values["llama.attention.head_count"], ".attn_k.": values["llama.attention.head_count_kv"]}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for ours, theirs in names.items():
        shape = [int(size) for size in reversed(tensors[theirs].shape)]  # GGUF writes the fastest dimension first
        num_bytes = 2 * int(np.prod(shape))
        header[ours] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + num_bytes]}
        at += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for i, (ours, theirs) in enumerate(names.items()):
            weight = dequantize(tensors[theirs].data, tensors[theirs].tensor_type).reshape(header[ours]["shape"])
            for part, count in heads.items():
                if part in theirs:
                    weight = _halves_from_pairs(weight, count)
            file.write(to_bfloat16(weight).tobytes())
            progress(i + 1, len(names))


def _halves_from_pairs(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of a head from GGUF's rotary order (pairs 0,1 2,3 ...) to Hugging Face's (two halves: 0,2,... 1,3,...)."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounds to nearest, ties to even; values are finite. numpy has no bfloat16: the bits come as uint16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
