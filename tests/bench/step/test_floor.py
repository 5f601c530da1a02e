"""A step's bytes and products are those of the model's real tensors, and its floor is the larger of both times."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from bench.step.floor import Work, decode_work, prefill_work, weight_bytes
from tests.support.checkpoints import make_random_checkpoint
from tests.support.model_files import load_config


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_random_checkpoint(tmp_path_factory.mktemp("model"), tie_word_embeddings=False)


def multiplied(directory):
    """The matrices that a token meets in all layers, and the LM head."""
    tensors = load_file(directory / "model.safetensors")
    layers = [tensor for name, tensor in tensors.items() if "layers" in name and tensor.dim() == 2]
    return layers, tensors["lm_head.weight"]


def test_weights_are_all_tensors_but_the_embedding(directory):
    tensors = load_file(directory / "model.safetensors")
    expected = sum(tensor.nbytes for name, tensor in tensors.items() if "embed" not in name)
    assert weight_bytes(load_config(directory), "float32") == expected


@pytest.mark.parametrize(("batch", "context"), [(1, 1), (3, 16), (8, 17)])
def test_decode_reads_weights_and_cache_once_and_multiplies_each_row(directory, batch, context):
    model = load_config(directory)
    layers, head = multiplied(directory)
    kv_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 4
    attention = 2 * 2 * model.num_layers * model.num_heads * model.head_dim * (context + 1)
    work = decode_work(model, "float32", batch, context)
    assert work.bytes == weight_bytes(model, "float32") + batch * context * kv_token
    assert work.flops == batch * (2 * sum(tensor.numel() for tensor in layers) + 2 * head.numel() + attention)


def test_a_prompt_is_as_much_attention_as_its_tokens_one_by_one(directory):
    model, tokens = load_config(directory), 7
    layers, head = multiplied(directory)
    products = 2 * tokens * sum(tensor.numel() for tensor in layers) + 2 * head.numel()
    seen = sum(range(1, tokens + 1))
    attention = 2 * 2 * model.num_layers * model.num_heads * model.head_dim * seen
    assert prefill_work(model, "float32", tokens).flops == products + attention


@pytest.mark.parametrize("window", [1, 4, 7, 8])
def test_a_window_bounds_what_a_token_sees(directory, window):
    model, tokens = load_config(directory), 7
    narrow = replace(model, layers=tuple(replace(layer, window=window) for layer in model.layers))
    key = 2 * 2 * model.num_layers * model.num_heads * model.head_dim
    saved = sum(max(0, position - window) for position in range(1, tokens + 1)) * key
    assert prefill_work(model, "float32", tokens).flops - prefill_work(narrow, "float32", tokens).flops == saved
    kv_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 4
    whole, part = (decode_work(one, "float32", 1, tokens) for one in (model, narrow))
    assert (whole.bytes - part.bytes) // kv_token == max(0, tokens + 1 - window)
    assert whole.flops - part.flops == max(0, tokens + 1 - window) * key


def test_halving_the_dtype_halves_the_bytes_alone(directory):
    model = load_config(directory)
    wide, narrow = (decode_work(model, dtype, 4, 64) for dtype in ("float32", "bfloat16"))
    assert (narrow.bytes * 2, narrow.flops) == (wide.bytes, wide.flops)
    assert torch.bfloat16.itemsize * 2 == torch.float32.itemsize


@pytest.mark.parametrize(
    ("work", "floor"),
    [
        (Work(bytes=2 * 10**9, flops=10**9), (200.0, "bytes")),  # at 10 GB/s, and 10 ms of products
        (Work(bytes=10**7, flops=5 * 10**9), (50.0, "flops")),  # at 100 GFLOP/s, and 1 ms of bytes
    ],
)
def test_the_floor_is_the_larger_of_both_times(work, floor):
    ms, bound = work.floor_ms(stream_gb_s=10.0, matmul_gflop_s=100.0)
    assert (ms, bound) == (pytest.approx(floor[0]), floor[1])
