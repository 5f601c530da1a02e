"""A checkpoint whose config.json tells no dtype has that of its weights, as in transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.model.config import parse_config
from common.model.directory import DirectorySource
from tests.support.checkpoints import make_random_checkpoint


def write(directory: Path, stored: dict[str, str], **config: object) -> Path:
    """Weights whose names hold a key are stored in its dtype, under this config."""
    make_random_checkpoint(directory, dtype="float32")
    file = directory / "model.safetensors"
    weights = load_file(file)
    for part, dtype in stored.items():
        weights |= {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items() if part in name}
    save_file(weights, file, {"format": "pt"})  # transformers asks for this
    content = json.loads((directory / "config.json").read_text()) | {"dtype": None} | config
    (directory / "config.json").write_text(json.dumps(content))
    return directory


def dtype(directory: Path) -> str:
    return parse_config(DirectorySource(directory).config()).dtype


@pytest.mark.parametrize(
    ("stored", "config", "expected"),
    [
        ("bfloat16", {"dtype": "float32"}, "float32"),
        ("float32", {"dtype": "bfloat16"}, "bfloat16"),
        ("float32", {"torch_dtype": "bfloat16"}, "bfloat16"),
        ("bfloat16", {}, "bfloat16"),
        ("float16", {"torch_dtype": None}, "float16"),
        ("float32", {}, "float32"),
    ],
)
def test_the_dtype_is_that_of_transformers(stored: str, config: dict[str, object], expected: str, tmp_path: Path):
    directory = write(tmp_path, {"": stored}, **config)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    assert (dtype(directory), str(theirs.dtype)) == (expected, f"torch.{expected}")


def test_norms_of_another_dtype_do_not_count(tmp_path: Path):
    """transformers takes the dtype of whatever comes first."""
    directory = write(tmp_path, {"": "bfloat16", "norm": "float32"}, torch_dtype="auto")
    assert dtype(directory) == "bfloat16"


def test_without_weights_it_is_transformers_default(tmp_path: Path):
    directory = write(tmp_path, {"": "bfloat16"}, torch_dtype="auto")
    (directory / "model.safetensors").unlink()
    assert dtype(directory) == "float32"
