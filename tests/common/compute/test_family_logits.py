"""Each family answers as transformers does, and with the same bits by any way."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.block_hash import BLOCK_SIZE
from common.compute.ops.reference.step_plan import KEY_CHUNK
from common.engine.batch import Batch
from tests.support.checkpoints import ABSENT, FAMILIES, make_random_checkpoint
from tests.support.model_tools import chunk, logits_by_chunks, make_runner, random_ids, threads

pytestmark = pytest.mark.slow

FACTORS = [1.0 + 0.3 * i for i in range(8)]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {"type": "longrope", "short_factor": FACTORS, "long_factor": [2 * factor for factor in FACTORS]}
# A family, and what its config has beside or instead of the checkpoint's keys.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama, biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, GELU": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama, llama3 rope": ("llama", {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}}),
    "llama, linear rope": ("llama", {"rope_scaling": {"type": "linear", "factor": 3.0}}),
    "llama, dynamic rope": (
        "llama",
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 512},
    ),
    "llama, yarn": ("llama", {"rope_scaling": YARN}),
    "qwen2, yarn with all keys": (
        "qwen2",
        {
            "rope_parameters": YARN
            | {"rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 1.3}
            | {"beta_fast": 16, "beta_slow": 2, "truncate": False}
        },
    ),
    "qwen3, yarn with an attention factor": ("qwen3", {"rope_scaling": YARN | {"attention_factor": 1.5}}),
    "mistral, window of one": ("mistral", {"sliding_window": 1}),
    "mistral, window of a key chunk": ("mistral", {"sliding_window": KEY_CHUNK}),
    "mistral, window beyond a key chunk": ("mistral", {"sliding_window": KEY_CHUNK + 22}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True}),
    "qwen2, windows as layer_types say": (
        "qwen2",
        {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention", "full_attention"] * 2},
    ),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "smollm3, an interval": ("smollm3", {"no_rope_layers": ABSENT, "no_rope_layer_interval": 3}),
    "smollm3, windows": ("smollm3", {"use_sliding_window": True, "sliding_window": 40}),
    "phi3, a part of each head": ("phi3", {"partial_rotary_factor": 0.75, "sliding_window": 50}),
    "phi3, longrope": ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 512}),
    "gemma2, no caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3, scaled rope in full layers": ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gemma3, as transformers 5 writes it": (
        "gemma3",
        {
            "rope_theta": ABSENT,
            "rope_local_base_freq": ABSENT,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma3, a pattern": ("gemma3", {"layer_types": ABSENT, "sliding_window_pattern": 3}),
}
LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE + 1, 3, 127, 128, 129, 1, 1]  # crosses blocks, key chunks and query tiles
IDS = random_ids(sum(LENGTHS))


def make(directory: Path, family: str, **options: Any) -> Path:
    return make_random_checkpoint(directory, family, **{"num_layers": 4} | options)


def reference_logits(directory: Path) -> torch.Tensor:
    """[chunks, vocab] in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([IDS])).logits[0, torch.tensor(LENGTHS).cumsum(0) - 1]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path):
    family, keys = KINDS[kind]
    directory = make(tmp_path / "model", family, **keys)
    theirs = reference_logits(directory)
    assert theirs.std() > 0.5
    torch.testing.assert_close(logits_by_chunks(make_runner(directory), IDS, LENGTHS), theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_near(family: str, tmp_path: Path):
    directory = make(tmp_path / "model", family, num_layers=2, dtype="bfloat16")
    ours, theirs = logits_by_chunks(make_runner(directory, "bfloat16"), IDS, LENGTHS), reference_logits(directory)
    assert (ours - theirs).abs().max() < 0.4 * theirs.std()
    assert (ours - theirs).square().mean().sqrt() < 0.1 * theirs.std()


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_and_heads_of_any_size(family: str, tmp_path: Path):
    sizes = {"hidden_size": 60, "num_heads": 6, "num_kv_heads": 2, "head_dim": 24, "intermediate_size": 50}
    directory = make(tmp_path / "model", family, **sizes, shards=3, tie_word_embeddings=False)
    theirs = reference_logits(directory)
    torch.testing.assert_close(logits_by_chunks(make_runner(directory), IDS, LENGTHS), theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": 41}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
        ("phi3", {"partial_rotary_factor": 0.5}),
        ("gemma", {"hidden_act": "silu"}),
        ("gemma2", {"sliding_window": 41}),
        ("gemma2", {"attn_logit_softcapping": 6.0}),
        ("gemma2", {"final_logit_softcapping": 4.0}),
        ("gemma2", {"query_pre_attn_scalar": 20}),
        ("gemma3", {"rope_local_base_freq": 600.0}),
        ("gemma3", {"rope_theta": 9000.0}),
        ("gemma3", {"layer_types": ["full_attention"] * 8}),
    ],
    ids=str,
)
def test_what_a_config_says_changes_the_answer(family: str, changes: dict[str, Any], tmp_path: Path):
    """So that the checkpoints above can tell right from left out."""
    plain, other = make(tmp_path / "a", family), make(tmp_path / "b", family, **changes)
    first, second = (logits_by_chunks(make_runner(directory), IDS, LENGTHS)[-1] for directory in (plain, other))
    assert (first - second).abs().max() > 1e-3


WAYS = [
    [len(IDS) - 1, 1],
    [*[1] * 50, len(IDS) - 50],  # out of a window, token by token
    [KEY_CHUNK - 3, *[1] * 6, len(IDS) - KEY_CHUNK - 3],
    [BLOCK_SIZE] * (len(IDS) // BLOCK_SIZE) + [len(IDS) % BLOCK_SIZE],
    [2 * KEY_CHUNK - 1, 2, len(IDS) - 2 * KEY_CHUNK - 1],
]


SLIDING = {"mistral": {}, "qwen2": {"use_sliding_window": True, "max_window_layers": 1}, "gemma2": {}, "gemma3": {}}
VARIANTS = {
    **{family: (family, {}) for family in FAMILIES},
    **{
        f"{family}, longer windows": (family, {"sliding_window": KEY_CHUNK + 1, **keys})
        for family, keys in SLIDING.items()
    },
    "phi3, a part of each head": ("phi3", {"partial_rotary_factor": 0.75, "sliding_window": 50}),
    "llama, biases and odd sizes": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "hidden_size": 36, "intermediate_size": 50, "head_dim": 10},
    ),
    "gemma3, odd sizes": ("gemma3", {"hidden_size": 36, "intermediate_size": 50, "head_dim": 10}),
}


# Each variant in float32; in half precision each family, whose layers round at other places.
DTYPES = [(variant, "float32") for variant in VARIANTS] + [(family, "bfloat16") for family in FAMILIES]
DTYPES += [(family, "float16") for family in ("llama", "gemma2")]


@pytest.mark.parametrize(("variant", "dtype"), DTYPES)
def test_chunk_borders_and_company_change_no_bit(variant: str, dtype: str, tmp_path: Path):
    family, keys = VARIANTS[variant]
    runner = make_runner(make(tmp_path / "model", family, num_layers=2, dtype=dtype, **keys), dtype, num_blocks=150)
    blocks_each = -(-len(IDS) // BLOCK_SIZE)
    alone = logits_by_chunks(runner, IDS, [len(IDS)])[0]
    assert alone.isfinite().all()
    for way in WAYS:
        runner._pool.blocks.fill_(torch.nan)
        with threads(2):
            assert torch.equal(logits_by_chunks(runner, IDS, way, first_block=blocks_each)[-1], alone)
    other = random_ids(len(IDS), seed=1)
    logits_by_chunks(runner, other, [200], first_block=0)
    company = [chunk(other, 0, 70, first_block=3 * blocks_each), chunk(other, 200, 1, first_block=0)]
    for last in (1, 7):
        rest = chunk(IDS, len(IDS) - last, last, first_block=blocks_each)
        for place in range(3):
            logits = runner.forward(Batch((*company[:place], rest, *company[place:])))
            assert torch.equal(logits[place], alone)
