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


def make_random_checkpoint(
    directory: Path,
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
) -> Path:
    """A Llama in Hugging Face's layout. Weights are so wide that logits have a clear order."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
    _write(directory / "config.json", config)
    _write(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    _write_tokenizer(directory)
    weights = _weights(config, torch.Generator().manual_seed(seed))
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


def _weights(config: dict[str, object], generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, inner, vocab = (int(config[k]) for k in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads = (int(config[k]) * int(config["head_dim"]) for k in ("num_attention_heads", "num_key_value_heads"))

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(hidden, generator=generator)

    weights = {"model.embed_tokens.weight": matrix(vocab, hidden), "model.norm.weight": norm()}
    for i in range(int(config["num_hidden_layers"])):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.input_layernorm.weight": norm(),
            f"{layer}.self_attn.q_proj.weight": matrix(heads, hidden),
            f"{layer}.self_attn.k_proj.weight": matrix(kv_heads, hidden),
            f"{layer}.self_attn.v_proj.weight": matrix(kv_heads, hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, heads),
            f"{layer}.post_attention_layernorm.weight": norm(),
            f"{layer}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.down_proj.weight": matrix(hidden, inner),
        }
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
