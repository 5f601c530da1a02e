"""Equal models have equal fingerprints; anything that makes KV mean something else makes another."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ModelError
from common.model.fingerprint import fingerprint, model_fingerprint
from common.model.safetensors_header import read_checkpoint
from tests.support.checkpoints import make_random_checkpoint

PARTS: dict[str, Any] = {"model": "m", "dtype": "bfloat16", "kv_dtype": "bfloat16", "layout_id": "l"}


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def test_equal_models_are_equal_wherever_they_lie(tmp_path: Path):
    first, second = (model_fingerprint(make_random_checkpoint(tmp_path / name)) for name in ("a", "b"))
    assert first == second
    assert len(bytes.fromhex(first)) == 32


def test_spaces_and_order_in_config_json_do_not_count(tmp_path: Path):
    directory = make_random_checkpoint(tmp_path / "model")
    before, content = model_fingerprint(directory), json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(dict(reversed(content.items())), indent=4))
    assert model_fingerprint(directory) == before


@pytest.mark.parametrize(
    "options", [{"seed": 1}, {"dtype": "bfloat16"}, {"num_layers": 3}, {"tie_word_embeddings": False}]
)
def test_another_model_has_another_fingerprint(options: dict[str, Any], tmp_path: Path):
    first = make_random_checkpoint(tmp_path / "a")
    second = make_random_checkpoint(tmp_path / "b", **options)
    assert model_fingerprint(first) != model_fingerprint(second)


def test_config_and_tokenizer_count(tmp_path: Path):
    directory = make_random_checkpoint(tmp_path / "model")
    seen = {model_fingerprint(directory)}
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(content | {"rope_theta": 10001.0}))
    seen.add(model_fingerprint(directory))
    flip(directory / "tokenizer.json", 100)
    seen.add(model_fingerprint(directory))
    assert len(seen) == 3


def test_every_byte_counts(tmp_path: Path):
    """The first, the middle and the last of each tensor: a fine-tune may leave any of them as they were."""
    directory = make_random_checkpoint(tmp_path / "model", shards=2)
    before = model_fingerprint(directory)
    tensors = [tensor for file in read_checkpoint(directory) for tensor in file.tensors]
    for tensor in tensors:
        for place in (0, tensor.num_bytes // 2, tensor.num_bytes - 1):
            flip(tensor.path, tensor.offset + place)
            assert model_fingerprint(directory) != before
            flip(tensor.path, tensor.offset + place)
    assert model_fingerprint(directory) == before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(name: str, tmp_path: Path):
    directory = make_random_checkpoint(tmp_path / "model")
    (directory / name).unlink()
    with pytest.raises(ModelError, match=name):
        model_fingerprint(directory)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"}, {"dtype": "float32"}, {"kv_dtype": "float32"}, {"layout_id": "k"},
        {"hash_scheme": "other"}, {"wire_version": 1},
    ],
    ids=str,
)  # fmt: skip
def test_every_part_counts(change: dict[str, Any]):
    assert fingerprint(**PARTS) == fingerprint(**PARTS)
    assert fingerprint(**(PARTS | change)) != fingerprint(**PARTS)


def test_parts_do_not_run_into_each_other():
    assert fingerprint("a", dtype="bc", kv_dtype="", layout_id="") != fingerprint(
        "ab", dtype="c", kv_dtype="", layout_id=""
    )
