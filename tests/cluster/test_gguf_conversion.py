"""A GGUF becomes a model directory that kvrelay and transformers read: the same numbers, tokens and rotation."""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from cluster.gguf_conversion import convert_gguf
from common.compute.readers.safetensors_reader import SafetensorsReader
from common.compute.weights import load_weights
from common.errors import ModelError
from common.model.fingerprint import model_fingerprint
from tests.support.gguf_models import MODELS, WORDS, random_model, write_model
from tests.support.model_files import load_config, load_generation
from tests.support.model_tools import logits_by_chunks, make_runner
from tests.support.tiny_gguf import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    SPECIAL,
    TEMPLATE,
    TOKENS,
    tensors,
    write_gguf,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(tmp_path_factory.mktemp("model"))


def convert(directory: Path, **options: Any) -> Path:
    made = directory / "made"
    made.mkdir()
    convert_gguf(write_gguf(directory / "x.gguf", **options), made)
    return made


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_the_config_says_what_the_gguf_says(model: Path):
    config = load_config(model)
    found = (config.architecture, config.vocab_size, config.hidden_size, config.num_layers, config.dtype)
    assert found == ("LlamaForCausalLM", len(TOKENS), HIDDEN, LAYERS, "bfloat16")
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-5, 512)
    assert config.tie_word_embeddings
    assert json.loads((model / "config.json").read_text())["rope_theta"] == 100000.0
    assert load_generation(model).eos_token_ids == (2,)
    assert model_fingerprint(model)


def test_matrices_that_keep_their_order_are_the_same(model: Path):
    ours, theirs = weights_of(model), tensors()
    pairs = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    pairs |= {f"model.layers.{i}.mlp.down_proj": f"blk.{i}.ffn_down" for i in range(LAYERS)}
    pairs |= {f"model.layers.{i}.self_attn.v_proj": f"blk.{i}.attn_v" for i in range(LAYERS)}
    for our_name, their_name in pairs.items():
        expected = torch.from_numpy(theirs[f"{their_name}.weight"]).bfloat16()
        assert torch.equal(ours[f"{our_name}.weight"], expected)


@pytest.mark.parametrize(("ours", "theirs", "heads"), [("q_proj", "attn_q", HEADS), ("k_proj", "attn_k", KV_HEADS)])
def test_rotating_halves_here_is_rotating_pairs_there(ours: str, theirs: str, heads: int, model: Path):
    """GGUF's llama rotates elements 2i and 2i + 1 of a head, Hugging Face's i and i + dim / 2, both by angle i."""
    x, position, half = torch.randn(HIDDEN), 37, HEAD_DIM // 2
    q_ours = (weights_of(model)[f"model.layers.1.self_attn.{ours}.weight"].float() @ x).view(heads, HEAD_DIM)
    there = torch.from_numpy(tensors()[f"blk.1.{theirs}.weight"]).bfloat16().float()
    q_theirs = (there @ x).view(heads, HEAD_DIM)
    for i in range(half):
        angle = position * 100000.0 ** (-2 * i / HEAD_DIM)
        turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        halves, pair = q_ours[:, [i, i + half]], q_theirs[:, [2 * i, 2 * i + 1]]
        torch.testing.assert_close(halves @ turn.T, pair @ turn.T)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0], ids=str)
def test_quantized_matrices_are_dequantized(kind: gguf.GGMLQuantizationType, tmp_path: Path):
    ours = weights_of(convert(tmp_path, quantized=kind))
    expected = dequantize(quantize(tensors()["blk.0.ffn_up.weight"], kind), kind)
    assert torch.equal(ours["model.layers.0.mlp.up_proj.weight"], torch.from_numpy(expected).bfloat16())
    assert torch.equal(ours["model.norm.weight"], torch.from_numpy(tensors()["output_norm.weight"]).bfloat16())


def test_transformers_and_kvrelay_read_the_same_model(model: Path):
    ids = list(range(5, 50))
    with torch.inference_mode():
        theirs = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([ids])).logits[0, -1]
    ours = logits_by_chunks(make_runner(model), ids, [45])[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.std()), rtol=1e-4)


@pytest.mark.parametrize("architecture", MODELS)
def test_every_architecture_is_converted(architecture: str, tmp_path: Path):
    """transformers reads the directory, and computes what the model computed that the GGUF was written from."""
    ids, model = list(range(5, 50)), random_model(architecture)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()  # which the conversion can keep
    made = tmp_path / "made"
    made.mkdir()
    convert_gguf(write_model(tmp_path / "x.gguf", architecture, model), made)
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32, attn_implementation="eager")
        expected = model(torch.tensor([ids])).logits[0, -1]
        torch.testing.assert_close(theirs(torch.tensor([ids])).logits[0, -1], expected, atol=1e-4, rtol=1e-4)
    ours = logits_by_chunks(make_runner(made), ids, [45])[0]
    torch.testing.assert_close(ours, expected, atol=2e-4, rtol=1e-4)
    assert AutoTokenizer.from_pretrained(made)("hello")["input_ids"] == [WORDS.index("hello")]


def test_fused_matrices_are_neighbours_in_the_file(model: Path):
    """So that they are mapped: common/compute/weights.py."""
    layer = load_weights(SafetensorsReader(model), load_config(model), "bfloat16").layers[1]
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("model.safetensors")]
    ranges = [tuple(int(part, 16) for part in line.split()[0].split("-")) for line in maps]
    for tensor in (*layer.qkv.tensors, *layer.mlp.gate_up.tensors):
        assert any(start <= tensor.data_ptr() < end for start, end in ranges)


def test_the_tokenizer_is_the_ggufs(model: Path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer("hello world 12")["input_ids"] == [
        TOKENS.index(token) for token in ("hello", "Ġw", "o", "r", "l", "d", "Ġ", "1", "2")
    ]
    assert [tokenizer.convert_tokens_to_ids(token) for token in TOKENS] == list(range(len(TOKENS)))
    assert tokenizer("a<|im_end|>\n<|im_start|>b")["input_ids"][1] == 2
    assert set(tokenizer.all_special_ids) == {0, 1, 2}
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (SPECIAL[1], SPECIAL[2], SPECIAL[2])
    assert tokenizer.chat_template == TEMPLATE == (model / "chat_template.jinja").read_text()
    assert json.loads((model / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE


@pytest.mark.parametrize(
    "text", ["", " ", "hello", "  two\n\n\tthree ", "naïve 日本語 🎉\u200d", "1234 ½²", "\x00\x7f"]
)
def test_every_text_comes_back(text: str, model: Path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"architecture": "gpt2"}, "general.architecture 'gpt2' is none of"),
        ({"pre": "klingon"}, "tokenizer.ggml.pre 'klingon' is a pre-tokenizer that is not supported"),
        ({"drop": "blk.1.ffn_up.weight"}, "tensor model.layers.1.mlp.up_proj.weight is missing"),
        ({"extra": "blk.0.attn_wonder.weight"}, "'blk.0.attn_wonder.weight' is no part of a llama"),
    ],
    ids=str,
)
def test_another_kind_of_gguf_is_refused(options: dict[str, Any], problem: str, tmp_path: Path):
    with pytest.raises(ModelError, match=problem):
        convert(tmp_path, **options)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no such thing" * 100])
def test_what_is_no_gguf_is_refused(content: bytes, tmp_path: Path):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"x\.gguf is no GGUF file"):
        convert_gguf(tmp_path / "x.gguf", tmp_path)


@pytest.mark.model
def test_the_demo_models_tokenizer_is_whole(demo_model: Path):
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    texts = [
        "Hello world 12345",
        "  x\t\ty\n\n\n",
        "naïve café 日本語 🎉🇩🇪 \u200d",
        "def f(x):\n    return 3.14",
        "I'm THEY'LL",
    ]
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert not set(ids) & set(range(17))
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer("<|im_start|><|im_end|><|endoftext|>")["input_ids"] == [1, 2, 0]
    assert tokenizer("12")["input_ids"] == [*tokenizer("1")["input_ids"], *tokenizer("2")["input_ids"]]
