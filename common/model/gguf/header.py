"""Reading a GGUF file's header: metadata and where each tensor lies, every count and offset checked.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, two counts, key-value pairs,
tensor infos, then the tensors' bytes, each at a multiple of the alignment. The file is anybody's: nothing is
allocated for a count that the file is too short for.
"""

import io
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # 1 counted in 32 bits and is long gone
MAX_PAIRS, MAX_TENSORS, MAX_DIMENSIONS = 65_536, 65_536, 4
MAX_VALUES = 4_000_000  # in all arrays together; the largest vocabularies have 300,000 tokens and as many merges
MAX_STRING_BYTES = 2**24
MAX_METADATA_BYTES = 2**26  # a vocabulary of 300,000 tokens takes some 10 MB
MAX_NESTING = 3  # arrays in arrays
MAX_ALIGNMENT = 2**20
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class TensorType:
    """How ggml stores numbers: blocks of so many elements in so many bytes."""

    name: str
    block: int
    num_bytes: int


TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),  # not NVFP4, which has scales in tensors of their own
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's place in the file."""

    name: str
    kind: int  # key of TYPES
    shape: tuple[int, ...]  # as torch has it: the fastest dimension last, which GGUF writes first
    offset: int  # bytes from the start of the file
    num_bytes: int
    path: Path  # the file

    @property
    def type(self) -> TensorType:
        return TYPES[self.kind]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A checked header."""

    path: Path  # of the metadata
    metadata: Mapping[str, Any]  # arrays are lists
    tensors: Mapping[str, GgufTensor]  # in the file's order
    paths: tuple[Path, ...]  # all files that the model has

    def error(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {key} {problem}", field="model")

    def optional(self, key: str, *kinds: type) -> Any:
        """A value of one of these types; None where it is absent."""
        value = self.metadata.get(key)
        if value is not None and type(value) not in kinds:
            raise self.error(key, f"is of an unexpected type, {type(value).__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(key, f"is {value}")
        return value

    def get(self, key: str, *kinds: type) -> Any:
        value = self.optional(key, *kinds)
        if value is None:
            raise self.error(key, "is missing")
        return value

    def items(self, key: str, kind: type) -> list[Any] | None:
        """An array of this type; None where it is absent."""
        values: list[Any] | None = self.optional(key, list)
        if values is not None and not all(type(value) is kind for value in values):
            raise self.error(key, f"must be an array of {kind.__name__}")
        return values


def is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF does."""
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def read_gguf(path: Path) -> GgufFile:
    """A file's header. Raises ModelError for anything that doesn't fit the file's size or the format."""
    try:
        with path.open("rb") as file:
            return _Reader(path, file).read()
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}", field="model") from error


class _Reader:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = file.seek(0, io.SEEK_END)
        self._at = file.seek(0)
        self._values = 0  # in arrays, so far

    def read(self) -> GgufFile:
        if self._size < 24 or self._take(4, "magic") != MAGIC:
            raise self._error("is no GGUF file")
        version = self._number("I", "version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "is big-endian" if swapped in VERSIONS else f"is GGUF version {version}"
            raise self._error(f"{kind}; little-endian files of version 2 and 3 are supported")
        num_tensors, num_pairs = self._number("Q", "tensor count"), self._number("Q", "metadata count")
        if num_pairs > MAX_PAIRS or num_tensors > MAX_TENSORS:
            raise self._error(f"claims {num_tensors} tensors and {num_pairs} metadata entries, which is absurd")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string("a metadata key")
            if key in metadata:
                raise self._error(f"has the metadata key {_short(key)} twice")
            metadata[key] = self._value(self._number("I", _short(key)), _short(key), MAX_NESTING)
        infos = [self._info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._error("general.alignment must be a power of two")
        start = -(-self._at // alignment) * alignment
        tensors = [self._place(info, start, alignment) for info in infos]
        self._check_overlap(tensors)
        named = {tensor.name: tensor for tensor in tensors}
        return GgufFile(self._path, metadata, named, (self._path,))

    def _error(self, problem: str) -> ModelError:
        return ModelError(f"{self._path} {problem}", field="model")

    def _take(self, count: int, what: str) -> bytes:
        if count > self._size - self._at:
            raise self._error(f"is cut short or corrupt: {what} would end at byte {self._at + count} of {self._size}")
        self._at += count
        if self._at > MAX_METADATA_BYTES:
            raise self._error(f"has more than {MAX_METADATA_BYTES} bytes of metadata")
        data = self._file.read(count)
        if len(data) != count:
            raise self._error("changed while it was read")
        return data

    def _number(self, letter: str, what: str) -> int:
        value: int = struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}"), what))[0]
        return value

    def _string(self, what: str) -> str:
        length = self._number("Q", what)
        if length > MAX_STRING_BYTES:
            raise self._error(f"is corrupt: {what} has {length} bytes")
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self._error(f"is corrupt: {what} is not UTF-8") from error

    def _value(self, kind: int, what: str, nesting: int) -> Any:
        if kind == _STRING:
            return self._string(what)
        if kind == _ARRAY:
            return self._array(what, nesting)
        if kind not in _SCALARS:
            raise self._error(f"is corrupt: {what} is of the unknown type {kind}")
        return self._number(_SCALARS[kind], what)

    def _array(self, what: str, nesting: int) -> list[Any]:
        if not nesting:
            raise self._error(f"is corrupt: {what} nests arrays more than {MAX_NESTING} deep")
        kind, count = self._number("I", what), self._number("Q", what)
        self._values += count
        if self._values > MAX_VALUES:
            raise self._error(f"is corrupt: {what} has {count} values; {MAX_VALUES} are allowed in all arrays together")
        if kind in _SCALARS:
            letter = _SCALARS[kind]
            return list(struct.unpack(f"<{count}{letter}", self._take(count * struct.calcsize(f"<{letter}"), what)))
        return [self._value(kind, what, nesting - 1) for _ in range(count)]

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset in the data."""
        name = self._string("a tensor's name")
        what = f"tensor {_short(name)}"
        dimensions = self._number("I", what)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._error(f"is corrupt: {what} has {dimensions} dimensions")
        shape = struct.unpack(f"<{dimensions}Q", self._take(8 * dimensions, what))[::-1]
        return name, shape, self._number("I", what), self._number("Q", what)

    def _place(self, info: tuple[str, tuple[int, ...], int, int], start: int, alignment: int) -> GgufTensor:
        name, shape, kind, offset = info
        what = f"tensor {_short(name)}"
        if kind not in TYPES:
            supported = ", ".join(each.name for each in TYPES.values())
            raise self._error(f"can't be used: {what} has ggml type {kind}; supported are {supported}")
        block = TYPES[kind].block
        if 0 in shape or shape[-1] % block:
            raise self._error(f"is corrupt: {what} of {list(shape)} is no whole number of {TYPES[kind].name} blocks")
        num_bytes = math.prod(shape) // block * TYPES[kind].num_bytes
        if offset % alignment:
            raise self._error(f"is corrupt: {what} does not start at a multiple of {alignment} bytes")
        end = start + offset + num_bytes
        if end > self._size:
            raise self._error(f"is cut short or corrupt: {what} ends at byte {end} of {self._size}")
        return GgufTensor(name, kind, shape, start + offset, num_bytes, self._path)

    def _check_overlap(self, tensors: list[GgufTensor]) -> None:
        names: set[str] = set()
        end, last = 0, ""
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            if tensor.name in names:
                raise self._error(f"has the tensor {_short(tensor.name)} twice")
            if tensor.offset < end:
                raise self._error(f"is corrupt: the tensors {_short(last)} and {_short(tensor.name)} overlap")
            names.add(tensor.name)
            end, last = tensor.offset + tensor.num_bytes, tensor.name


def _short(name: str) -> str:
    """A name out of the file, fit for one line of an error."""
    text = name.encode("unicode_escape").decode()
    return text if len(text) <= 60 else text[:57] + "..."
