"""A GGUF's metadata becomes the config and the generation defaults of the model that it was written from."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.errors import ModelError
from common.model.config import parse_config
from common.model.directory import DirectorySource
from common.model.end_tokens import read_generation
from common.model.gguf.gguf_model import GgufSource
from tests.support.gguf_models import MODELS, Kind, byte_level, random_model, sentencepiece, write_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write(directory: Path, architecture: str = "llama", **options: Any) -> Path:
    return write_model(directory / "x.gguf", architecture, random_model(architecture), **options)


def edited(path: Path, **values: int | float | str) -> Path:
    """The same file with more metadata; `__` in a name is a dot."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_name("edited.gguf"), reader.fields["general.architecture"].contents())
    more = {name.replace("__", "."): value for name, value in values.items()}
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture" and key not in more:
            kinds = [*field.types, None]
            writer.add_key_value(key, field.contents(), kinds[0], kinds[1])
    for key, value in more.items():
        kind = {str: "STRING", float: "FLOAT32", int: "UINT32"}[type(value)]
        writer.add_key_value(key, value, gguf.GGUFValueType[kind])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name("edited.gguf")


@pytest.mark.parametrize("architecture", MODELS)
def test_the_config_means_what_transformers_writes(architecture: str, tmp_path: Path):
    model = random_model(architecture)
    model.config.save_pretrained(tmp_path)
    source = GgufSource(write_model(tmp_path / "x.gguf", architecture, model))
    if "architectures" not in DirectorySource(tmp_path).config().content:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(tmp_path)
    assert parse_config(source.config()) == parse_config(DirectorySource(tmp_path).config())
    assert source.name == "x"


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Kind.F32, "float32"), (Kind.F16, "float16"), (Kind.BF16, "bfloat16"), (Kind.Q4_0, "bfloat16")]
)
def test_the_dtype_is_that_of_the_matrices(kind: Kind, dtype: str, tmp_path: Path):
    assert parse_config(GgufSource(write(tmp_path, kind=kind)).config()).dtype == dtype


def test_the_rotation_of_llama_3_comes_from_its_factors(tmp_path: Path):
    """The converter writes what transformers' formula makes of each frequency."""
    model = random_model("llama", rope_parameters=LLAMA3, max_position_embeddings=131072)
    plain = 1.0 / 500_000.0 ** (torch.arange(0, 64, 2).float() / 64)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    factors = (plain / scaled).numpy()
    path = write_model(tmp_path / "x.gguf", "llama", model, extra={"rope_freqs.weight": factors})
    scaling = GgufSource(path).config().content["rope_scaling"]
    assert scaling == {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    factors[20] *= 1.5
    path = write_model(tmp_path / "x.gguf", "llama", model, extra={"rope_freqs.weight": factors})
    with pytest.raises(ModelError, match=r"rope_freqs\.weight is not the scaling of Llama 3"):
        GgufSource(path).config()


def test_longrope_is_read_from_its_factors(tmp_path: Path):
    long, short = np.linspace(1, 9, 32, dtype=np.float32), np.linspace(1, 2, 32, dtype=np.float32)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "long_factor": [float(f"{value:.6g}") for value in long],
        "short_factor": [float(f"{value:.6g}") for value in short],
    }
    model = random_model("phi3", rope_parameters=rope, original_max_position_embeddings=128)
    model.config.architectures = ["Phi3ForCausalLM"]
    model.config.save_pretrained(tmp_path)
    extra = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    path = write_model(tmp_path / "x.gguf", "phi3", model, extra=extra)
    with pytest.raises(ModelError, match=r"phi3\.rope\.scaling\.original_context_length is missing"):
        GgufSource(path).config()
    source = GgufSource(edited(path, phi3__rope__scaling__original_context_length=128))
    assert parse_config(source.config()) == parse_config(DirectorySource(tmp_path).config())


@pytest.mark.parametrize(
    ("metadata", "full"), [({}, [5]), ({"gemma3__attention__sliding_window_pattern": 3}, [2, 5])], ids=["usual", "told"]
)
def test_layers_with_a_window_are_told_or_the_usual_ones(metadata: dict[str, Any], full: list[int], tmp_path: Path):
    source = GgufSource(edited(write(tmp_path, "gemma3"), **metadata))
    types = source.config().content["layer_types"]
    assert [i for i, kind in enumerate(types) if kind == "full_attention"] == full
    assert len(types) == 7


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"llama__rope__scaling__type": "none"}, None),
        (
            {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama__rope__scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "llama__rope__scaling__type": "yarn",
                "llama__rope__scaling__factor": 4.0,
                "llama__rope__scaling__original_context_length": 128,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
    ids=str,
)
def test_scaling_is_read_from_the_metadata(metadata: dict[str, Any], scaling: Any, tmp_path: Path):
    source = GgufSource(edited(write(tmp_path), **metadata))
    assert source.config().content.get("rope_scaling") == scaling
    assert parse_config(source.config())


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"llama__expert_count": 8}, "mixtures of experts"),
        ({"split__count": 3}, "split.no makes it part 1 of 3: its name must say so"),
        ({"llama__attention__value_length": 32}, "value_length differs"),
        ({"llama__attention__head_count": 0}, "head_count is 0"),
        ({"llama__attention__head_count": 2**31}, "head_count is 2147483648"),
        ({"llama__block_count": 2**31}, "block_count is 2147483648, the file has 21 tensors"),
        ({"llama__attention__head_count": "four"}, "unexpected type, str"),
        ({"llama__rope__freq_base": -1.0}, "freq_base must be above 0"),
        ({"llama__rope__freq_base": float("inf")}, "freq_base is inf"),
        ({"llama__rope__dimension_count": 32}, "partial_rotary_factor"),
        ({"tokenizer__ggml__eos_token_id": "two"}, "unexpected type, str"),
        ({"llama__block_count": 0}, "block_count is 0"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(metadata: dict[str, Any], problem: str, tmp_path: Path):
    with pytest.raises(ModelError, match=problem):
        parse_config(GgufSource(edited(write(tmp_path), **metadata)).config())


def test_more_tokens_than_the_embedding_has_are_refused(tmp_path: Path):
    tokens = [*byte_level()["tokenizer.ggml.tokens"], "more"]
    path = write(tmp_path, tokenizer=byte_level(**{"tokenizer.ggml.tokens": tokens}))
    with pytest.raises(ModelError, match="has 266 tokens, the embedding 265 rows"):
        GgufSource(path).config()


def test_all_ends_of_a_turn_are_ends(tmp_path: Path):
    tokens = ["<|endoftext|>", "<|eot_id|>", "<|im_end|>", "<end_of_turn>", *"abcdef"]
    kinds = [3, 3, 3, 1, *[1] * 6]
    words = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": None}
    path = write(tmp_path, tokenizer=byte_level(**words, **{"tokenizer.ggml.eos_token_id": 0}))
    source = GgufSource(
        edited(path, tokenizer__ggml__eot_token_id=5, general__sampling__temp=0.25, general__sampling__top_k=7)
    )
    found = read_generation(source)
    assert found.eos_token_ids == (0, 5, 1, 2)  # <end_of_turn> is no control token here
    assert (found.temperature, found.top_k) == (0.25, 7)


def test_every_part_of_the_file_counts_for_the_revision(tmp_path: Path):
    path = write(tmp_path)
    source = GgufSource(path)
    before, content = source.revision(), path.read_bytes()
    (tmp_path / "other.gguf").write_bytes(content)
    assert GgufSource(tmp_path / "other.gguf").revision() == before
    for tensor in source.file.tensors.values():
        changed = bytearray(content)
        changed[tensor.offset + tensor.num_bytes - 1] ^= 1
        path.write_bytes(changed)
        assert GgufSource(path).revision() != before
    other = sentencepiece()
    path = write_model(path, "llama", random_model("llama"), tokenizer=other)
    assert GgufSource(path).revision() != before
