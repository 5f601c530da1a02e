"""Reading safetensors headers: where each tensor lies, checked before anything is mapped.

The format is 8 bytes of header length (little-endian), a JSON header, and the tensors' bytes
(the safetensors documentation, "Format").
"""

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from common.errors import ModelError
from common.model.config import JsonFile

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # of weights that a model here may have
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor's place in a file."""

    name: str
    path: Path
    dtype: str  # as the header spells it: F32, BF16, ...
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TensorFile:
    """One safetensors file's header."""

    path: Path
    header: bytes
    tensors: tuple[TensorInfo, ...]  # in the order of their bytes


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory, sorted; an index is checked against their presence."""
    if not directory.is_dir():
        raise ModelError(f"model directory {directory} does not exist", field="model")
    if (directory / SINGLE_FILE).exists():
        return [directory / SINGLE_FILE]
    return sorted({directory / shard for shard in _weight_map(directory).values()})


def _weight_map(directory: Path) -> dict[str, str]:
    """Tensor name to shard, from the index."""
    if not (directory / INDEX_FILE).exists():
        raise ModelError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}", field="model")
    index = JsonFile.read(directory / INDEX_FILE)
    weight_map = index.child("weight_map")
    if weight_map is None or not weight_map.content:
        raise index.error("weight_map", "is missing")
    for name, shard in weight_map.content.items():
        if not isinstance(shard, str) or shard in ("", ".", "..") or "/" in shard or "\\" in shard:
            raise index.error("weight_map", f"of {name} must be a file name, got {shard!r}")
        if not (directory / shard).is_file():
            raise ModelError(f"{directory / shard} does not exist ({INDEX_FILE} has {name} there)", field="model")
    return weight_map.content


def read_checkpoint(directory: Path) -> list[TensorFile]:
    """All headers of a model directory, checked. Raises ModelError that names file and tensor."""
    files = [read_header(path) for path in checkpoint_files(directory)]
    home: dict[str, Path] = {}
    for tensor in (tensor for file in files for tensor in file.tensors):
        if tensor.name in home:
            raise ModelError(f"tensor {tensor.name} is in {home[tensor.name]} and in {tensor.path}", field="model")
        home[tensor.name] = tensor.path
    if files[0].path.name != SINGLE_FILE:
        for name, shard in _weight_map(directory).items():
            if home.get(name) != directory / shard:
                raise ModelError(f"{directory / shard}: tensor {name} is missing ({INDEX_FILE} has it)", field="model")
    return files


def read_header(path: Path) -> TensorFile:
    """One file's header. Raises ModelError for anything that doesn't fit the file's size or the format."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise ModelError(f"{path} is no safetensors file, or is cut short: {size} bytes", field="model")
            header = file.read(length)
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}", field="model") from error
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the safetensors header is not JSON: {error}", field="model") from error
    if not isinstance(entries, dict):
        raise ModelError(f"{path}: the safetensors header is not a JSON object", field="model")
    entries.pop("__metadata__", None)
    tensors = sorted((_tensor(path, name, entry, 8 + length) for name, entry in entries.items()), key=_by_offset)
    _check_cover(path, tensors, 8 + length, size)
    return TensorFile(path, header, tuple(tensors))


def _by_offset(tensor: TensorInfo) -> tuple[int, int]:
    return tensor.offset, tensor.num_bytes


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise ModelError(f"{path}: the header's entry of tensor {name} is not an object", field="model")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _is_sizes(shape) or not (_is_sizes(offsets) and len(offsets) == 2):
        raise ModelError(f"{path}: tensor {name} needs a dtype, a shape and two data_offsets", field="model")
    begin, end = offsets
    if dtype in _ITEM_BYTES and math.prod(shape) * _ITEM_BYTES[dtype] != end - begin:
        raise ModelError(f"{path}: tensor {name} of {shape} {dtype} is not {end - begin} bytes", field="model")
    return TensorInfo(name, path, dtype, tuple(shape), data_start + begin, end - begin)


def _check_cover(path: Path, tensors: Iterable[TensorInfo], data_start: int, size: int) -> None:
    """The tensors fill the file without gaps and overlaps, as the format demands."""
    at = data_start
    for tensor in tensors:
        if tensor.num_bytes < 0 or tensor.offset != at:
            raise ModelError(f"{path}: tensor {tensor.name} does not start where the one before it ends", field="model")
        at += tensor.num_bytes
        if at > size:
            raise ModelError(f"{path} is cut short: tensor {tensor.name} ends at byte {at} of {size}", field="model")
    if at != size:
        raise ModelError(f"{path} has {size - at} bytes more than its tensors", field="model")
