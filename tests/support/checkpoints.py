"""Small random checkpoints on which everything runs: weights, config, tokenizer, chat template, defaults."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1 and 2
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# Of each family: architecture, model_type, and what its config.json has beside or instead of Llama's keys.
FAMILIES: dict[str, tuple[str, str, dict[str, object]]] = {
    "llama": ("LlamaForCausalLM", "llama", {}),
    "mistral": ("MistralForCausalLM", "mistral", {"sliding_window": 40}),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", {"use_sliding_window": False, "sliding_window": 40, "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", {"attention_bias": False, "use_sliding_window": False}),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3", {"no_rope_layers": [1, 0] * 8, "pad_token_id": 2}),
    "phi3": ("Phi3ForCausalLM", "phi3", {"original_max_position_embeddings": 2048, "pad_token_id": 2}),
    "gemma": ("GemmaForCausalLM", "gemma", {"hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "gemma2",
        {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "sliding_window": 40}
        | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "gemma3_text",
        {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "sliding_window": 40}
        | {"layer_types": ["sliding_attention", "full_attention"] * 8, "rope_local_base_freq": 500.0},
    ),
}
ABSENT = object()
LISTS = ("layer_types", "no_rope_layers")  # keys with an entry a layer, cut to the number of layers


def make_random_checkpoint(
    directory: Path,
    family: str = "llama",
    *,
    vocab_size: int = 288,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    intermediate_size: int = 128,
    max_position_embeddings: int = 2048,
    tie_word_embeddings: bool = True,
    dtype: str = "float32",
    seed: int = 0,
    shards: int = 1,
    **config_keys: object,
) -> Path:
    """A model in Hugging Face's layout; further keys go into its config.json, ABSENT takes one out.

    Weights are so wide that logits have a clear order.
    """
    directory.mkdir(parents=True, exist_ok=True)
    architecture, model_type, family_keys = FAMILIES[family]
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": dtype,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config |= family_keys | config_keys
    config |= {key: config[key][:num_layers] for key in LISTS if isinstance(config.get(key), list)}
    config = {key: value for key, value in config.items() if value is not ABSENT}
    _write(directory / "config.json", config)
    _write(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    _write_tokenizer(directory)
    weights = _weights(family, config, torch.Generator().manual_seed(seed))
    _save(directory, {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}, shards)
    return directory


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _write_tokenizer(directory: Path) -> None:
    """Byte-level BPE without merges: every text encodes, a token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "pad_token": SPECIAL[2], "chat_template": TEMPLATE}
    _write(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named})


def _weights(family: str, config: dict[str, object], generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, inner, vocab = (int(config[k]) for k in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads = (int(config[k]) * int(config["head_dim"]) for k in ("num_attention_heads", "num_key_value_heads"))

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5

    def vector(size: int, middle: float = 0.0) -> torch.Tensor:
        return middle + 0.1 * torch.randn(size, generator=generator)

    middle = 0.0 if family.startswith("gemma") else 1.0  # of a norm: Gemma adds 1
    shapes = {"q": (heads, hidden), "k": (kv_heads, hidden), "v": (kv_heads, hidden), "o": (hidden, heads)}
    attention_bias = "qkvo" if config.get("attention_bias") else "qkv" if family == "qwen2" else ""
    norms = ["input_layernorm", "post_attention_layernorm"]
    if family in ("gemma2", "gemma3"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    weights = {"model.embed_tokens.weight": matrix(vocab, hidden), "model.norm.weight": vector(hidden, middle)}
    for i in range(int(config["num_hidden_layers"])):
        layer = f"model.layers.{i}"
        mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        part = {f"self_attn.{name}_proj.weight": matrix(*shape) for name, shape in shapes.items()}
        part |= {f"mlp.{name}_proj.weight": matrix(*shape) for name, shape in mlp.items()}
        part |= {f"{name}.weight": vector(hidden, middle) for name in norms}
        part |= {f"self_attn.{name}_proj.bias": 5 * vector(shapes[name][0]) for name in attention_bias}
        if config.get("mlp_bias"):
            part |= {f"mlp.{name}_proj.bias": vector(shape[0]) for name, shape in mlp.items()}
        if family in ("qwen3", "gemma3"):
            part |= {f"self_attn.{name}_norm.weight": vector(int(config["head_dim"]), middle) for name in "qk"}
        if family == "phi3":
            for fused, names in (("self_attn.qkv", ("q", "k", "v")), ("mlp.gate_up", ("gate", "up"))):
                parts = [part.pop(f"{fused.split('.')[0]}.{name}_proj.weight") for name in names]
                part[f"{fused}_proj.weight"] = torch.cat(parts)
        weights |= {f"{layer}.{name}": tensor for name, tensor in part.items()}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(vocab, hidden)
    return weights


def _save(directory: Path, weights: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(weights, directory / "model.safetensors")
        return
    names = list(weights)
    index = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        save_file({name: weights[name] for name in part}, directory / file)
        index |= dict.fromkeys(part, file)
    _write(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
