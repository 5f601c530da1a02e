"""Small random models of transformers, written as GGUF the way llama.cpp's converter does: names from the gguf package,
Llama's Q and K in rotary pairs, Gemma's norms with 1 added."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf.quants import quantize
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

Kind = gguf.GGMLQuantizationType
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "1 2")
WORDS = (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES))
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
GEMMA = {"head_dim": 256, "sliding_window": 8, "tie_word_embeddings": True, "query_pre_attn_scalar": 256}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
# GGUF architecture to the transformers config's class and what differs from SIZES.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 128}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "phi3": ("Phi3", {}),
    "gemma2": ("Gemma2", GEMMA | CAPS),
    "gemma3": ("Gemma3", GEMMA | {"num_hidden_layers": 7}),
}


def random_model(architecture: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """In float32, its norms and biases random, too."""
    family, differences = MODELS[architecture]
    text = "TextConfig" if family == "Gemma3" else "Config"
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}{text}")(**(SIZES | differences | changes))
    config._attn_implementation = "eager"
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[1] ** 0.5)
            assert parameter.isfinite().all(), name
    return model


def gguf_tensors(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    """The model's tensors under GGUF's names, with its conventions."""
    config = model.config
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if architecture in ("llama", "smollm3") and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            values = values + 1
        base, suffix = name.rsplit(".", 1)
        theirs = names.get_name(base)
        assert theirs is not None, name
        found[f"{theirs}.{suffix}"] = values
    return found


def write_model(
    path: Path,
    architecture: str,
    model: PreTrainedModel,
    *,
    kind: Kind = Kind.F32,
    tokenizer: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Matrices are of `kind`, vectors of F32. tokenizer: metadata by key, instead of a byte-level one."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if architecture != "gemma2":
        rope = config.rope_parameters
        writer.add_rope_freq_base((rope.get("full_attention") or rope)["rope_theta"])
    if architecture in ("qwen3", "gemma2", "gemma3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    add_tokenizer(writer, byte_level() if tokenizer is None else tokenizer)
    for name, tensor in (gguf_tensors(model, architecture) | (extra or {})).items():
        if tensor.ndim < 2 or kind == Kind.F32:
            writer.add_tensor(name, np.ascontiguousarray(tensor, dtype=np.float32))
        elif kind == Kind.F16:
            writer.add_tensor(name, tensor.astype(np.float16))
        else:
            writer.add_tensor(name, packed(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def packed(values: np.ndarray, kind: Kind) -> np.ndarray:
    """Blocks of a type: the values' own, or random ones where the gguf package can't quantize."""
    try:
        return quantize(np.ascontiguousarray(values, dtype=np.float32), kind)
    except NotImplementedError:
        return random_blocks(values.shape, kind)


SCALES = {
    Kind.Q2_K: slice(80, 84),
    Kind.Q3_K: slice(108, 110),
    Kind.Q4_K: slice(0, 4),
    Kind.Q5_K: slice(0, 4),
    Kind.Q6_K: slice(208, 210),
}


def random_blocks(shape: tuple[int, ...], kind: Kind, seed: int = 0) -> np.ndarray:
    """Valid blocks: any bits with small scales."""
    per_block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // per_block, num_bytes), dtype=np.uint8)
    if kind == Kind.IQ1_M:  # its scale lies in the upper four bits of each of the last four words
        blocks[..., 49::2] = blocks[..., 49::2] & 0x0F | np.array([0x00, 0x00, 0x40, 0x10], np.uint8)
    else:
        scales = np.array([0.001, 0.002], np.float16).view(np.uint8)
        place = SCALES.get(kind, slice(0, 2))
        blocks[..., place] = scales[: place.stop - place.start]
    return blocks.reshape(*shape[:-1], -1)


def byte_level(pre: str = "smollm", **changes: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(WORDS),
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in WORDS],
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
        **changes,
    }


def add_tokenizer(writer: gguf.GGUFWriter, values: dict[str, Any]) -> None:
    """A value of None is left out."""
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)


PIECES = (
    "▁",
    "▁h",
    "e",
    "l",
    "he",
    "ll",
    "▁he",
    "lo",
    "▁hell",
    "▁hello",
    "o",
    "h",
    "w",
    "▁w",
    "or",
    "r",
    "ld",
    "d",
    "▁wor",
)
SPM = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<think>", "<|user|>")


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """Llama 2's kind, without merges: they follow from the scores."""
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4, 3]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": list(SPM),
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(PIECES))] + [0.0, 0.0],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
        **changes,
    }


def split_file(path: Path, count: int, first: int = 1) -> Path:
    """Cuts a file into several beside it, as gguf-split does: metadata in the first, tensors in the others.

    `first` is the number in the name of the first. Returns its path.
    """
    reader = gguf.GGUFReader(path)
    names = [f"{path.stem}-{number + first:05}-of-{count:05}.gguf" for number in range(count)]
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(path.with_name(name), reader.fields["general.architecture"].contents())
        if number == 0:
            for key, field in reader.fields.items():
                if not key.startswith("GGUF.") and key != "general.architecture":
                    writer.add_key_value(key, field.contents(), *[*field.types, None][:2])
        writer.add_key_value("split.no", number, gguf.GGUFValueType.UINT16)
        writer.add_key_value("split.count", count, gguf.GGUFValueType.UINT16)
        writer.add_key_value("split.tensors.count", len(reader.tensors), gguf.GGUFValueType.INT32)
        for tensor in reader.tensors[number - 1 :: count - 1] if number else ():
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path.with_name(names[0])
