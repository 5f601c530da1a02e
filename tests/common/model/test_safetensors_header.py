"""Safetensors headers are read as the format says; what does not fit file, format or index is refused by name."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ModelError
from common.model.safetensors_header import INDEX_FILE, SINGLE_FILE, read_checkpoint, read_header
from tests.support.checkpoints import make_random_checkpoint


def write_file(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int = 0, end: int = 8, *, dtype: Any = "F32", shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_are_where_the_official_library_finds_them(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    tensors = {"b": torch.randn(3, 5), "a": torch.arange(6, dtype=torch.int64), "c": torch.randn(4).bfloat16()}
    tensors["none"] = torch.empty(0, 3)
    save_file(tensors, path, {"format": "pt"})
    found, data = {tensor.name: tensor for tensor in read_header(path).tensors}, path.read_bytes()
    expected = load_file(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        raw = data[found[name].offset : found[name].offset + found[name].num_bytes]
        assert raw == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert found[name].shape == tuple(tensor.shape)


@pytest.mark.parametrize("shards", [1, 3])
def test_all_files_of_a_checkpoint_are_read(shards: int, tmp_path: Path):
    directory = make_random_checkpoint(tmp_path / "model", shards=shards)
    files = read_checkpoint(directory)
    assert len(files) == shards
    expected = {name for file in directory.glob("*.safetensors") for name in load_file(file)}
    assert {tensor.name for file in files for tensor in file.tensors} == expected


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is no safetensors file, or is cut short: 0 bytes"),
        (b"1234567", "is no safetensors file"),
        (struct.pack("<Q", 0), "is no safetensors file"),
        (struct.pack("<Q", 3) + b"{}", "is no safetensors file"),
        (struct.pack("<Q", 2**63) + b"{}", "is no safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "is no safetensors file"),
        (struct.pack("<Q", 2) + b"{x", "is not JSON"),
        (struct.pack("<Q", 2) + b"\xff\xff", "is not JSON"),
        (struct.pack("<Q", 2) + b"[]", "is not a JSON object"),
        (struct.pack("<Q", 2) + b"{}" + b"x", "has 1 bytes more than its tensors"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_a_file_of_another_kind_is_refused(content: bytes, problem: str, tmp_path: Path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=problem) as caught:
        read_header(path)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ({"w": 7}, "entry of tensor w is not an object"),
        ({"w": {}}, "tensor w needs a dtype, a shape and two data_offsets"),
        ({"w": entry(shape="2")}, "tensor w needs"),
        ({"w": entry(shape=[-2])}, "tensor w needs"),
        ({"w": entry(shape=[True, 2])}, "tensor w needs"),
        ({"w": entry(dtype=32)}, "tensor w needs"),
        ({"w": entry() | {"data_offsets": [0]}}, "tensor w needs"),
        ({"w": entry() | {"data_offsets": [0, -8]}}, "tensor w needs"),
        ({"w": entry(shape=[3])}, r"tensor w of \[3\] F32 is not 8 bytes"),
        ({"w": entry(8, 0)}, r"tensor w of \[2\] F32 is not -8 bytes"),
        ({"w": entry(4, 12)}, "tensor w does not start where the one before it ends"),
        ({"v": entry(), "w": entry(4, 12)}, "tensor w does not start where"),
        ({"v": entry(), "w": entry(0, 8)}, "tensor w does not start where"),
        ({"v": entry(), "w": entry(8, 16)}, "is cut short: tensor w ends at byte"),
        ({"w": entry(0, 2**62, dtype="F99")}, "is cut short: tensor w"),
    ],
    ids=str,
)
def test_a_tensor_that_does_not_fit_is_named(header: dict[str, Any], problem: str, tmp_path: Path):
    path = write_file(tmp_path / "x.safetensors", header, bytes(8))
    with pytest.raises(ModelError, match=problem) as caught:
        read_header(path)
    assert str(path) in caught.value.message


@pytest.mark.parametrize("lost", [1, 100])
def test_a_truncated_file_is_refused(lost: int, tmp_path: Path):
    directory = make_random_checkpoint(tmp_path / "model")
    data = (directory / SINGLE_FILE).read_bytes()
    (directory / SINGLE_FILE).write_bytes(data[:-lost])
    with pytest.raises(ModelError, match="is cut short: tensor model"):
        read_checkpoint(directory)


def test_no_checkpoint_at_all_is_told(tmp_path: Path):
    with pytest.raises(ModelError, match=f"has neither {SINGLE_FILE} nor"):
        read_checkpoint(tmp_path)
    with pytest.raises(ModelError, match="does not exist"):
        read_checkpoint(tmp_path / "no")


def sharded(directory: Path, **changes: Any) -> Path:
    """Three shards; changes go into the index's weight_map, None takes a name out."""
    make_random_checkpoint(directory, shards=3)
    index = json.loads((directory / INDEX_FILE).read_text())
    index["weight_map"] = {k: v for k, v in (index["weight_map"] | changes).items() if v is not None}
    (directory / INDEX_FILE).write_text(json.dumps(index))
    return directory


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"extra.weight": "model-00001-of-00003.safetensors"}, "tensor extra.weight is missing"),
        ({"model.norm.weight": "model-00003-of-00003.safetensors"}, "tensor model.norm.weight is missing"),
        ({"extra.weight": "model-00004-of-00003.safetensors"}, "model-00004-of-00003.safetensors does not exist"),
        ({"extra.weight": "../config.json"}, "must be a file name"),
        ({"extra.weight": 7}, "must be a file name"),
    ],
    ids=str,
)
def test_an_index_that_does_not_fit_is_refused(changes: dict[str, Any], problem: str, tmp_path: Path):
    with pytest.raises(ModelError, match=problem):
        read_checkpoint(sharded(tmp_path / "model", **changes))


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "["])
def test_an_index_without_a_map_is_refused(content: str, tmp_path: Path):
    directory = sharded(tmp_path / "model")
    (directory / INDEX_FILE).write_text(content)
    with pytest.raises(ModelError, match=INDEX_FILE):
        read_checkpoint(directory)


def test_a_missing_shard_is_named(tmp_path: Path):
    directory = sharded(tmp_path / "model")
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors does not exist"):
        read_checkpoint(directory)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path):
    directory = sharded(tmp_path / "model")
    first, second = (directory / f"model-0000{i}-of-00003.safetensors" for i in (1, 2))
    save_file(load_file(second) | {"model.norm.weight": torch.ones(64)}, second)
    save_file(load_file(first) | {"model.norm.weight": torch.ones(64)}, first)
    with pytest.raises(ModelError, match=r"tensor model.norm.weight is in .* and in "):
        read_checkpoint(directory)
