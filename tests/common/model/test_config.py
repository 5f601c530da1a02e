"""A model directory's configs are read in both spellings; what is unsupported or wrong is named."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from common.errors import ConfigError, ModelError
from common.model.config import GenerationDefaults, LayerConfig, ModelConfig
from common.model.rope import Rope
from tests.support.model_files import load_config, load_generation

ABSENT = type("Absent", (), {"__repr__": lambda self: "ABSENT"})()  # in test ids: the same in every process
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def write_config(directory: Path, **changes: Any) -> Path:
    content = {key: value for key, value in (BASE | changes).items() if value is not ABSENT}
    (directory / "config.json").write_text(json.dumps(content))
    return directory


def test_a_config_is_read_whole(tmp_path: Path):
    assert load_config(write_config(tmp_path)) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        dtype="bfloat16",
        layers=(LayerConfig(Rope(5000.0, 16)),) * 2,
        attention_scale=0.25,
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": ABSENT, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, {"theta": 7.0}),
        ({"rope_parameters": {"rope_type": "default"}}, {"theta": 5000.0}),
        ({"rope_theta": 100000}, {"theta": 100000.0}),
        ({"rope_theta": ABSENT}, {"theta": 10000.0}),
        ({"rope_scaling": None, "quantization_config": None, "head_dim": None}, {"head_dim": 16}),
        ({"head_dim": 24}, {"head_dim": 24}),
        ({"num_key_value_heads": ABSENT}, {"num_kv_heads": 4}),
        ({"torch_dtype": ABSENT, "dtype": "float16"}, {"dtype": "float16"}),
        ({"torch_dtype": ABSENT}, {"dtype": "float32"}),
        ({"tie_word_embeddings": ABSENT}, {"tie_word_embeddings": False}),
        ({"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "unheard_of": {}}, {}),
        ({"attention_bias": True}, {"qkv_bias": True, "out_bias": True, "mlp_bias": False}),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": None, "num_local_experts": 0}, {}),
        ({"partial_rotary_factor": 1.0, "residual_multiplier": 1, "rope_scaling": {}}, {"theta": 5000.0}),
    ],
    ids=str,
)
def test_other_spellings_and_defaults_are_understood(changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path):
    config = load_config(write_config(tmp_path, **changes))
    rope = config.layers[0].rope
    assert {key: getattr(rope if key == "theta" else config, key) for key in expected} == expected


def test_what_transformers_writes_is_read(tmp_path: Path):
    theirs = LlamaConfig(
        hidden_size=96, num_attention_heads=6, num_key_value_heads=3, architectures=["LlamaForCausalLM"],
        rope_parameters={"rope_theta": 1234.0, "rope_type": "default"}, dtype="float16", eos_token_id=[5, 6],
    )  # fmt: skip
    theirs.save_pretrained(tmp_path)
    ours = load_config(tmp_path)
    assert (ours.hidden_size, ours.num_kv_heads, ours.head_dim) == (96, 3, 16)
    assert (ours.layers[1].rope.theta, ours.dtype, ours.vocab_size) == (1234.0, "float16", theirs.vocab_size)
    assert load_generation(tmp_path).eos_token_ids == (5, 6)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("architectures", ["GPT2LMHeadModel"], "'GPT2LMHeadModel' is not supported"),
        ("architectures", ABSENT, "must be a list of one name"),
        ("architectures", "LlamaForCausalLM", "must be a list of one name"),
        ("architectures", [7], "must be a list of one name"),
        ("vocab_size", ABSENT, "is missing"),
        ("vocab_size", None, "is missing"),
        ("vocab_size", "100", "must be an integer"),
        ("vocab_size", True, "must be an integer"),
        ("vocab_size", 100.0, "must be an integer"),
        ("vocab_size", 0, "must be a positive"),
        ("hidden_size", ABSENT, "is missing"),
        ("hidden_size", -64, "must be a positive"),
        ("hidden_size", 66, "is no multiple of num_attention_heads"),
        ("intermediate_size", 2**40, "must be a positive 32-bit number"),
        ("num_hidden_layers", [2], "must be an integer"),
        ("num_hidden_layers", 2**31 - 1, "must be 10000 at most"),
        ("num_attention_heads", ABSENT, "is missing"),
        ("num_key_value_heads", 3, "does not divide"),
        ("num_key_value_heads", 0, "must be a positive"),
        ("head_dim", 15, "must be even"),
        ("rms_norm_eps", ABSENT, "is missing"),
        ("rms_norm_eps", "1e-5", "must be a finite number"),
        ("rms_norm_eps", 0, "must be above 0"),
        ("rms_norm_eps", float("inf"), "must be a finite number"),
        ("rope_theta", float("nan"), "must be a finite number"),
        ("rope_theta", 10**400, "must be a finite number"),
        ("rope_theta", -1.0, "must be above 0"),
        ("rope_scaling", "linear", "must be an object"),
        ("max_position_embeddings", ABSENT, "is missing"),
        ("tie_word_embeddings", "yes", "must be true or false"),
        ("torch_dtype", "float64", "'float64' is not supported"),
        ("torch_dtype", 16, "must be a string"),
        ("hidden_act", "gelu", "'gelu' is not supported"),
        ("attention_bias", "yes", "must be true or false"),
        ("mlp_bias", 1, "must be true or false"),
        ("quantization_config", {"quant_method": "gptq"}, "is not supported"),
        ("sliding_window", 40, "40 is not supported in a LlamaForCausalLM"),
        ("use_sliding_window", True, "true is not supported in a LlamaForCausalLM"),
        ("no_rope_layers", [1, 0], "[1, 0] is not supported"),
        ("layer_types", ["full_attention", "sliding_attention"], "there is no sliding_window"),
        ("layer_types", ["full_attention"], "must be a list of 2 of full_attention and sliding_attention"),
        ("layer_types", ["full_attention", "chunked_attention"], "must be a list of 2"),
        ("layer_types", "full_attention", "must be a list of 2"),
        ("partial_rotary_factor", 0.5, "0.5 is not supported"),
        ("query_pre_attn_scalar", 16, "16 is not supported"),
        ("attn_logit_softcapping", 50.0, "50.0 is not supported"),
        ("attention_multiplier", 0.5, "0.5 is not supported"),
        ("residual_multiplier", 0.5, "0.5 is not supported"),
        ("num_local_experts", 8, "8 is not supported"),
    ],
    ids=str,
)
def test_a_wrong_key_is_named_with_its_file(key: str, value: Any, problem: str, tmp_path: Path):
    with pytest.raises(ModelError) as caught:
        load_config(write_config(tmp_path, **{key: value}))
    assert f"{tmp_path / 'config.json'}: {key} " in caught.value.message
    assert problem in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.field == key


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"vocab_size": ' + b"1" * 5000 + b"}", "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b"null", "is not a JSON object"),
        (b"7", "is not a JSON object"),
    ],
    ids=lambda value: repr(value)[:20],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_no_json_object_is_named(name: str, content: bytes, problem: str, tmp_path: Path):
    write_config(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=problem) as caught:
        load_config(tmp_path) if name == "config.json" else load_generation(tmp_path)
    assert str(tmp_path / name) in caught.value.message


def test_a_missing_directory_and_a_missing_file_are_told_apart(tmp_path: Path):
    with pytest.raises(ModelError, match=f"model directory {tmp_path / 'no'} does not exist"):
        load_config(tmp_path / "no")
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        load_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match=r"config\.json can't be read: Is a directory"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, 2, (2,)),
        (None, [2, 3, 2], (2, 3)),
        (None, ABSENT, ()),
        ({}, 2, (2,)),
        ({"eos_token_id": None}, 2, (2,)),
        ({"eos_token_id": 5}, 2, (5,)),
        ({"eos_token_id": [7, 8]}, 2, (7, 8)),
        ({"eos_token_id": []}, 2, ()),
    ],
)
def test_eos_tokens_come_from_generation_config_then_config(
    generation: Any, config: Any, expected: tuple[int, ...], tmp_path: Path
):
    write_config(tmp_path, eos_token_id=config)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_generation(tmp_path) == GenerationDefaults(eos_token_ids=expected)


def test_sampling_defaults_are_what_the_file_gives(tmp_path: Path):
    write_config(tmp_path)
    given = {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.1, "repetition_penalty": 1.1, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert load_generation(tmp_path) == GenerationDefaults((2,), 0.6, 0.9, 50, 0.1, 1.1)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 1, "top_k": -1}))
    assert load_generation(tmp_path) == GenerationDefaults((2,), temperature=1.0, top_k=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eos_token_id", -1), ("eos_token_id", "2"), ("eos_token_id", [2, None]), ("eos_token_id", True),
        ("temperature", -0.1), ("temperature", "hot"), ("top_p", 0), ("top_p", 1.1), ("top_k", 5.5), ("min_p", -1),
        ("min_p", 2), ("repetition_penalty", 0),
    ],
)  # fmt: skip
def test_a_wrong_default_is_named(key: str, value: Any, tmp_path: Path):
    write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ModelError, match=f"generation_config.json: {key} must be"):
        load_generation(tmp_path)


def test_auto_is_the_checkpoints_own_dtype(tmp_path: Path):
    config = load_config(write_config(tmp_path))
    assert (config.resolve_dtype("auto"), config.resolve_dtype("float32")) == ("bfloat16", "float32")
    assert config.kv_layout("float32").shape == (2, 2, 2, 16, 16)


@pytest.mark.parametrize(
    "module", ["common.model.config", "common.model.safetensors_header", "common.model.fingerprint"]
)
def test_reading_a_model_directory_needs_no_torch(module: str):
    program = (
        f"import sys, {module}; print(sorted({{'torch', 'numpy', 'transformers', 'safetensors'}} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 16,
    "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}


@pytest.mark.parametrize(
    ("changes", "default", "longest"),
    [
        ({"max_position_embeddings": 32768}, 32768, 32768),
        # as Qwen2.5's and Qwen3's authors recommend it, and as checkpoints have it that are made so
        ({"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072, 131072),
        ({"max_position_embeddings": 40960, "rope_scaling": YARN}, 131072, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": YARN}, 131072, 131072),
        ({"max_position_embeddings": 32768, "rope_parameters": {**YARN, "rope_theta": 1e6}}, 131072, 131072),
        # the factor of the others is counted in, or may be
        ({"max_position_embeddings": 131072, "rope_scaling": LLAMA3}, 131072, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 4096, 16384),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, 4096, 4096),
        (GEMMA3, 131072, 131072),
    ],
)
def test_the_context_is_as_long_as_positions_reach(changes: dict[str, Any], default: int, longest: int, tmp_path: Path):
    config = load_config(write_config(tmp_path, **changes))
    assert (config.context_length(None), config.context_length(longest)) == (default, longest)
    with pytest.raises(ConfigError, match=f"max_model_len is {longest + 1}, the model was made for {longest}"):
        config.context_length(longest + 1)


@pytest.mark.parametrize("family", ["Gemma2ForCausalLM", "Gemma3ForCausalLM"])
def test_a_family_that_overflows_in_float16_is_never_run_in_it(family: str, tmp_path: Path):
    directory = write_config(tmp_path, architectures=[family], hidden_act=ABSENT, torch_dtype="float16")
    config = load_config(directory)
    assert [config.resolve_dtype(wanted) for wanted in ("auto", "float32")] == ["bfloat16", "float32"]
    with pytest.raises(ConfigError, match=f"a {family} overflows in float16; use bfloat16 or float32") as caught:
        config.resolve_dtype("float16")
    assert caught.value.field == "dtype"


def test_others_run_in_float16(tmp_path: Path):
    config = load_config(write_config(tmp_path, torch_dtype="float16"))
    assert [config.resolve_dtype(wanted) for wanted in ("auto", "float16")] == ["float16"] * 2
