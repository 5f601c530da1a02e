"""A GGUF file's metadata as the content of config.json and generation_config.json.

What converters (llama.cpp's convert_hf_to_gguf.py) leave out of the file is filled in as llama.cpp itself does.
"""

from collections.abc import Callable

from common.model.gguf.header import GgufFile
from common.model.gguf.rope_scaling import HfConfig, as_written, rope_scaling, rope_theta

CONTROL = 3  # tokenizer.ggml.token_type of special tokens
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def gguf_config(file: GgufFile) -> HfConfig:
    """As config.json. Raises ModelError that names the key at fault."""
    architecture = file.get("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise file.error("general.architecture", f"{architecture[:60]!r} is none of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[architecture](file, architecture)


def _uniform(file: GgufFile, key: str) -> int:
    """A number that the format also allows to be one a layer."""
    value = file.get(key, int, list)
    if isinstance(value, list):
        if not value or any(type(item) is not int or item != value[0] for item in value):
            raise file.error(key, "differs from layer to layer, which is not supported")
        value = value[0]
    return int(value)


def _common(file: GgufFile, arch: str, name: str, model_type: str) -> HfConfig:
    hidden_size, num_heads = file.get(f"{arch}.embedding_length", int), _uniform(file, f"{arch}.attention.head_count")
    if not 0 < num_heads <= hidden_size:
        raise file.error(f"{arch}.attention.head_count", f"is {num_heads}, of {hidden_size} hidden elements")
    head_dim = file.optional(f"{arch}.attention.key_length", int) or hidden_size // num_heads
    if file.optional(f"{arch}.attention.value_length", int) not in (None, head_dim):
        raise file.error(f"{arch}.attention.value_length", f"differs from the key's {head_dim}: not supported")
    kv_key = f"{arch}.attention.head_count_kv"
    config = {
        "architectures": [name],
        "model_type": model_type,
        "dtype": _dtype(file),
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden_size,
        "intermediate_size": _uniform(file, f"{arch}.feed_forward_length"),
        "num_hidden_layers": _num_layers(file, arch),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _uniform(file, kv_key) if kv_key in file.metadata else num_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": as_written(file.get(f"{arch}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": rope_theta(file, arch),
        "max_position_embeddings": file.get(f"{arch}.context_length", int),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_token_ids(file),
    }
    rotated = file.optional(f"{arch}.rope.dimension_count", int)
    if rotated is not None and rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    scaling = rope_scaling(file, arch)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _dtype(file: GgufFile) -> str:
    """Of the checkpoint that the file was made from, as far as the file tells."""
    kinds = {tensor.type.name for tensor in file.tensors.values()}
    return {frozenset({"F32"}): "float32", frozenset({"F32", "F16"}): "float16"}.get(frozenset(kinds), "bfloat16")


def _vocab_size(file: GgufFile) -> int:
    """The embedding's rows; a few may be padding that no token has."""
    if "token_embd.weight" not in file.tensors:
        raise file.error("token_embd.weight", "is missing")
    rows, tokens = file.tensors["token_embd.weight"].shape[0], file.items("tokenizer.ggml.tokens", str) or []
    if len(tokens) > rows:
        raise file.error("tokenizer.ggml.tokens", f"has {len(tokens)} tokens, the embedding {rows} rows")
    return rows


def _num_layers(file: GgufFile, arch: str) -> int:
    count: int = file.get(f"{arch}.block_count", int)
    if not 0 < count <= len(file.tensors):
        raise file.error(f"{arch}.block_count", f"is {count}, the file has {len(file.tensors)} tensors")
    return count


def _token_ids(file: GgufFile) -> HfConfig:
    roles = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {name: file.optional(f"tokenizer.ggml.{role}_token_id", int) for name, role in roles.items()}
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def _llama(file: GgufFile, arch: str) -> HfConfig:
    if file.optional(f"{arch}.expert_count", int):
        raise file.error(f"{arch}.expert_count", "is not 0: mixtures of experts are not supported")
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return _common(file, arch, "LlamaForCausalLM", "llama") | {
        key: name in file.tensors for key, name in biases.items()
    }


def _smollm3(file: GgufFile, arch: str) -> HfConfig:
    """Every fourth layer has no positions, which the file does not say."""
    config = _common(file, arch, "SmolLM3ForCausalLM", "smollm3")
    rotated = [int((i + 1) % 4 != 0) for i in range(config["num_hidden_layers"])]
    return config | {"no_rope_layers": rotated, "no_rope_layer_interval": 4, "attention_bias": False, "mlp_bias": False}


def _qwen2(file: GgufFile, arch: str) -> HfConfig:
    return _common(file, arch, "Qwen2ForCausalLM", "qwen2") | {"use_sliding_window": False}


def _qwen3(file: GgufFile, arch: str) -> HfConfig:
    more = {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "use_sliding_window": False}
    return _common(file, arch, "Qwen3ForCausalLM", "qwen3") | more


def _phi3(file: GgufFile, arch: str) -> HfConfig:
    config = _common(file, arch, "Phi3ForCausalLM", "phi3")
    config["sliding_window"] = file.optional(f"{arch}.attention.sliding_window", int) or None
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "longrope":  # this model has it a level higher
        config["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return config


def _gemma(file: GgufFile, arch: str, name: str, model_type: str, largest: int) -> HfConfig:
    """largest: layers of the one model whose attention is scaled by the hidden size, not by head_dim."""
    config = _common(file, arch, name, model_type)
    del config["hidden_act"]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    config |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if config["num_hidden_layers"] == largest else config["head_dim"],
        "attention_bias": False,
        "sliding_window": file.get(f"{arch}.attention.sliding_window", int),
    }
    for kind in ("attn", "final"):
        cap = file.optional(f"{arch}.{kind}_logit_softcapping", float)
        config[f"{kind}_logit_softcapping"] = as_written(cap) if cap else None
    return config


def _layer_types(file: GgufFile, arch: str, num_layers: int, period: int) -> list[str]:
    """Every `period`-th layer sees everything, the others what is near; unless the file says otherwise."""
    key = f"{arch}.attention.sliding_window_pattern"
    told = file.optional(key, int, list)
    if isinstance(told, list):
        if len(told) != num_layers or any(type(slides) is not bool for slides in told):
            raise file.error(key, f"must say yes or no for each of {num_layers} layers")
        return [("full_attention", "sliding_attention")[slides] for slides in told]
    period = told or period
    return [("sliding_attention", "full_attention")[(i + 1) % period == 0] for i in range(num_layers)]


def _gemma2(file: GgufFile, arch: str) -> HfConfig:
    config = _gemma(file, arch, "Gemma2ForCausalLM", "gemma2", 46)
    return config | {"layer_types": _layer_types(file, arch, config["num_hidden_layers"], 2)}


def _gemma3(file: GgufFile, arch: str) -> HfConfig:
    config = _gemma(file, arch, "Gemma3ForCausalLM", "gemma3_text", 62)
    local = file.optional(f"{arch}.rope.freq_base_swa", float) or 10_000.0
    return config | {
        "layer_types": _layer_types(file, arch, config["num_hidden_layers"], 6),
        "rope_local_base_freq": as_written(local),
        "rope_theta": rope_theta(file, arch, 1_000_000.0),
    }


ARCHITECTURES: dict[str, Callable[[GgufFile, str], HfConfig]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}


def gguf_generation(file: GgufFile) -> HfConfig:
    """As generation_config.json: the ends that have a key, and the sampling that the authors recommend."""
    ids = _token_ids(file)
    ends = [file.optional(f"tokenizer.ggml.{role}_token_id", int) for role in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    ids["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    for theirs, ours in _SAMPLING.items():
        value = file.optional(f"general.sampling.{theirs}", int, float)
        if value is not None:
            ids[ours] = as_written(value) if isinstance(value, float) else value
    return ids
