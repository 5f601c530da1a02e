"""A config means what it means to transformers; what a family does not have is refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from common.compute.readers.safetensors_reader import SafetensorsReader
from common.compute.weights import load_weights
from common.errors import ModelError
from common.model.families import FAMILIES as SUPPORTED
from tests.support.checkpoints import FAMILIES, make_random_checkpoint
from tests.support.model_files import load_config

REQUIRED = {
    "vocab_size": 288, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12, "rms_norm_eps": 1e-6,
    "num_attention_heads": 32, "max_position_embeddings": 4096, "torch_dtype": "float32",
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_that_says_little_means_what_it_means_to_transformers(family: str, tmp_path: Path):
    architecture, model_type, _ = FAMILIES[family]
    content = REQUIRED | {"architectures": [architecture], "model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(content))
    ours, theirs = load_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64 // 32)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert (
        ours.activation
        == {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}[
            getattr(theirs, "hidden_activation", None) or theirs.hidden_act
        ]
    )
    assert ours.attention_scale == getattr(theirs, "query_pre_attn_scalar", ours.head_dim) ** -0.5
    assert ours.attention_softcap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.logit_softcap == getattr(theirs, "final_logit_softcapping", None)
    window = getattr(theirs, "sliding_window", None)
    types = getattr(theirs, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * 12
    assert [layer.window for layer in ours.layers] == [
        window if kind == "sliding_attention" else None for kind in types
    ]
    ropes = [theirs.rope_parameters.get(kind, theirs.rope_parameters)["rope_theta"] for kind in types]
    turns = getattr(theirs, "no_rope_layers", [1] * 12)
    assert [layer.rope and layer.rope.theta for layer in ours.layers] == [
        rope if turn else None for rope, turn in zip(ropes, turns, strict=True)
    ]


@pytest.mark.parametrize(
    ("family", "keys", "problem"),
    [
        ("mistral", {"attention_bias": True}, "attention_bias true is not supported in a MistralForCausalLM"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types other than the same"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be a positive"),
        ("mistral", {"sliding_window": "40"}, "sliding_window must be an integer"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None, "layer_types": ["sliding_attention"] * 2},
         "layer_types has sliding_attention, but there is no sliding_window"),
        ("qwen2", {"use_mrope": True}, "use_mrope true is not supported"),
        ("qwen3", {"num_experts": 8}, "num_experts 8 is not supported"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must be a list with 0 or 1 for each layer"),
        ("smollm3", {"no_rope_layers": [1, 2]}, "no_rope_layers must be a list with 0 or 1"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 rotates 24 dimensions of 16"),
        ("gemma", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping must be above 0"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention true is not supported"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ("gemma3", {"rope_parameters": {"rope_theta": 1.0}}, "rope_parameters must have full_attention and"),
        ("gemma3", {"rope_parameters": {}, "rope_scaling": {}}, "rope_scaling beside rope_parameters"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_family_lacks_is_refused_by_name(family: str, keys: dict[str, Any], problem: str, tmp_path: Path):
    directory = make_random_checkpoint(tmp_path / "model", family, **keys)
    with pytest.raises(ModelError, match=f"config.json: {re.escape(problem)}"):
        load_config(directory)


@pytest.mark.parametrize(
    ("family", "other", "problem"),
    [
        ("qwen2", "mistral", "self_attn.k_proj.bias is no part of a MistralForCausalLM"),
        ("mistral", "qwen2", "self_attn.q_proj.bias is missing"),
        ("qwen3", "llama", "self_attn.k_norm.weight is no part of a LlamaForCausalLM"),
        ("phi3", "llama", "self_attn.q_proj.weight is missing"),
        ("llama", "phi3", "self_attn.qkv_proj.weight is missing"),
        ("gemma2", "gemma", "post_feedforward_layernorm.weight is no part of a GemmaForCausalLM"),
        ("gemma", "gemma3", "pre_feedforward_layernorm.weight is missing"),
    ],
)
def test_tensors_of_another_family_are_named(family: str, other: str, problem: str, tmp_path: Path):
    directory, another = make_random_checkpoint(tmp_path / "a", family), make_random_checkpoint(tmp_path / "b", other)
    with pytest.raises(ModelError, match=re.escape(problem)):
        load_weights(SafetensorsReader(directory), load_config(another), "float32")


def test_every_architecture_is_among_the_checkpoints():
    assert {architecture for architecture, _, _ in FAMILIES.values()} == set(SUPPORTED)
