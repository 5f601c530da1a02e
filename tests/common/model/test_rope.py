"""Rotary embeddings are read as transformers reads them; what is not one fixed embedding is refused or cut off."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.compute.ops.rotary import frequencies
from common.errors import ModelError
from common.model.json_file import JsonFile
from common.model.rope import Rope, parse_rope, rope_parameters

LONG = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [4.0, 4.0, 4.0, 4.0]}


def parse(*, partial: bool = False, head_dim: int = 8, **content: Any) -> Rope:
    file = JsonFile(Path("config.json"), {"max_position_embeddings": 4096} | content)
    return parse_rope(file, rope_parameters(file), head_dim, theta=10_000.0, partial=partial)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 3.0},
        {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 1.0},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 1.0},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.5, "mscale_all_dim": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.0, "mscale_all_dim": 2.0, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5},
        {"rope_type": "longrope", **LONG},
        {"rope_type": "longrope", "factor": 3.0, **LONG},
        {"rope_type": "longrope", "attention_factor": 1.5, **LONG},
    ],
    ids=str,
)
@pytest.mark.parametrize("original", [1024, 4096])
def test_frequencies_and_factor_are_those_of_transformers(parameters: dict[str, Any], original: int):
    told = {"rope_theta": 500.0, **parameters}
    if told["rope_type"] not in ("linear", "dynamic"):
        told["original_max_position_embeddings"] = original
    theirs = LlamaConfig(
        hidden_size=16,
        num_attention_heads=2,
        max_position_embeddings=4096,
        rope_parameters=dict(told),
    )
    expected, factor = ROPE_INIT_FUNCTIONS[told["rope_type"]](theirs, torch.device("cpu"))
    ours = parse(rope_parameters=told)
    assert torch.equal(frequencies(ours), expected)
    assert ours.attention_factor == factor


@pytest.mark.parametrize(
    ("content", "theta"),
    [
        ({}, 10_000.0),
        ({"rope_parameters": {"rope_theta": 7}}, 7.0),
        ({"rope_scaling": {"rope_theta": 7.0, "type": "linear", "factor": 2.0}}, 7.0),
        ({"rope_scaling": {}, "rope_parameters": {"rope_theta": 7.0}}, 7.0),
        ({"rope_scaling": {"rope_theta": 8.0}, "rope_parameters": {"rope_theta": 7.0}}, 8.0),
    ],
)
def test_parameters_are_found_where_transformers_finds_them(content: dict[str, Any], theta: float):
    assert parse(**content).theta == theta


@pytest.mark.parametrize(
    ("content", "limit"),
    [
        ({}, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, 4096),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}}, 16384),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}, 4096),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 16384),
        ({"rope_scaling": {"type": "yarn", "factor": 1e9}}, 2**31 - 1),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 4096),
        ({"rope_scaling": {"type": "longrope", **LONG}, "original_max_position_embeddings": 512}, 512),
        ({"rope_scaling": {"type": "su", "original_max_position_embeddings": 256, **LONG}}, 256),
        ({"rope_scaling": {"type": "longrope", **LONG}}, 4096),
    ],
)
def test_positions_reach_as_far_as_they_are_one_fixed_embedding(content: dict[str, Any], limit: int | None):
    assert parse(**content).max_positions == limit


@pytest.mark.parametrize(("factor", "dim"), [(1.0, 8), (0.75, 6), (0.5, 4), (0.3, 2)])
def test_a_part_of_each_head_is_counted(factor: float, dim: int):
    assert parse(partial=True, partial_rotary_factor=factor).dim == dim
    assert parse(partial=True, rope_parameters={"partial_rotary_factor": factor}).dim == dim


@pytest.mark.parametrize(
    ("scaling", "key", "problem"),
    [
        (
            {"type": "ntk"},
            "rope_type",
            "'ntk' is not supported (only default, linear,",
        ),
        ({"rope_type": 3}, "rope_type", "must be a string"),
        ({"type": "linear"}, "factor", "is missing"),
        ({"type": "linear", "factor": 0}, "factor", "must be above 0"),
        ({"type": "linear", "factor": "2"}, "factor", "must be a finite number"),
        ({"type": "default", "mrope_section": [1, 2]}, "mrope_section", "is not supported"),
        ({"type": "dynamic", "alpha": 1000.0}, "alpha", "is not supported"),
        ({"rope_theta": 0}, "rope_theta", "must be above 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5 is not supported"),
        ({"type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor", "is missing"),
        (
            {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "low_freq_factor",
            "4.0 must be below high_freq_factor 4.0",
        ),
        ({"type": "yarn", "original_max_position_embeddings": 0}, "original_max_position_embeddings", "positive"),
        ({"type": "yarn", "beta_fast": 1, "beta_slow": 2}, "beta_fast", "must not be below beta_slow"),
        ({"type": "yarn", "rope_theta": 1.0}, "rope_theta", "must be above 1 with yarn"),
        ({"type": "yarn", "beta_fast": 1e300}, "beta_fast", "must be between 1e-9 and 1e12"),
        ({"type": "yarn", "beta_slow": 1e-300}, "beta_slow", "must be between 1e-9 and 1e12"),
        ({"type": "yarn", "mscale": -1.0, "mscale_all_dim": 1.0}, "mscale", "must be above 0"),
        ({"type": "yarn", "truncate": 1}, "truncate", "must be true or false"),
        ({"type": "longrope"}, "short_factor", "must be a list of 4 numbers above 0, got null"),
        ({"type": "longrope", "short_factor": [1, 2, 3]}, "short_factor", "must be a list of 4 numbers"),
        ({"type": "longrope", "short_factor": []}, "short_factor", "must be a list of 4 numbers"),
        ({"type": "longrope", "short_factor": [1, 2, 3, 0]}, "short_factor", "must be a list of 4 numbers"),
        ({"type": "longrope", "short_factor": [1, 2, 3, True]}, "short_factor", "must be a list of 4 numbers"),
    ],
    ids=str,
)
def test_what_is_wrong_or_not_supported_is_named(scaling: dict[str, Any], key: str, problem: str):
    with pytest.raises(ModelError) as caught:
        parse(rope_scaling=scaling)
    assert caught.value.message.startswith(f"config.json: rope_scaling.{key} ")
    assert problem in caught.value.message
    assert caught.value.field == f"rope_scaling.{key}"


@pytest.mark.parametrize("factor", [1.5, 0.1, 0.4, 1e300])
def test_a_part_that_is_no_even_number_is_refused(factor: float):
    with pytest.raises(ModelError, match="partial_rotary_factor"):
        parse(partial=True, partial_rotary_factor=factor)


def test_two_original_lengths_are_refused():
    scaling = {"type": "longrope", "original_max_position_embeddings": 512, **LONG}
    with pytest.raises(ModelError, match="original_max_position_embeddings is 512, but 1024 outside of it"):
        parse(rope_scaling=scaling, original_max_position_embeddings=1024)
