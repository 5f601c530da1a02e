"""A GGUF header is read exactly; whatever is cut short, corrupt or hostile ends in one clear ModelError, at once."""

import contextlib
import itertools
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import ModelError
from common.model.config import parse_config
from common.model.end_tokens import read_generation
from common.model.gguf.gguf_model import GgufSource
from common.model.gguf.header import TYPES, is_gguf, read_gguf
from tests.support.tiny_gguf import tensors, write_gguf

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
STRING, ARRAY = 8, 9


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "x.gguf").read_bytes()


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


def info(name: str = "a", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file(
    *parts: bytes, pairs: int = 0, infos: int = 0, version: int = 3, magic: bytes = b"GGUF", data: int = 64
) -> bytes:
    """A header of these parts, and zeros for data."""
    header = magic + struct.pack("<IQQ", version, infos, pairs) + b"".join(parts)
    return header + bytes(-len(header) % 32 + data)


def test_values_are_what_the_package_wrote(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    values: dict[str, tuple[Callable[[str, Any], None], Any]] = {
        "a.u8": (writer.add_uint8, 255),
        "a.i8": (writer.add_int8, -128),
        "a.u16": (writer.add_uint16, 2**16 - 1),
        "a.i16": (writer.add_int16, -(2**15)),
        "a.u32": (writer.add_uint32, 2**32 - 1),
        "a.i32": (writer.add_int32, -(2**31)),
        "a.u64": (writer.add_uint64, 2**64 - 1),
        "a.i64": (writer.add_int64, -(2**63)),
        "a.f32": (writer.add_float32, 1.5),
        "a.f64": (writer.add_float64, 1e300),
        "a.bool": (writer.add_bool, True),
        "a.string": (writer.add_string, "日本語 \n"),
        "a.numbers": (writer.add_array, [1, -2, 3]),
        "a.floats": (writer.add_array, [0.5, -0.25]),
        "a.strings": (writer.add_array, ["", "x", "ü"]),
    }
    for key, (add, value) in values.items():
        add(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(tmp_path / "x.gguf")
    assert dict(found.metadata) == {"general.architecture": "llama"} | {
        key: value for key, (_, value) in values.items()
    }
    assert found.tensors == {}


def test_tensors_lie_where_the_package_finds_them(tmp_path: Path):
    path = write_gguf(tmp_path / "x.gguf", quantized=gguf.GGMLQuantizationType.Q4_1)
    found, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert list(found.tensors) == [tensor.name for tensor in theirs.tensors]
    assert list(found.tensors) == list(tensors())
    for tensor in theirs.tensors:
        ours = found.tensors[tensor.name]
        assert (ours.kind, ours.num_bytes, ours.offset) == (tensor.tensor_type, tensor.n_bytes, tensor.data_offset)
        assert list(ours.shape) == tensor.shape.tolist()[::-1]


def test_the_types_are_the_packages():
    for number, kind in TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert (kind.name, (kind.block, kind.num_bytes)) == (theirs.name, gguf.GGML_QUANT_SIZES[theirs])


HUGE = 2**63
HOSTILE = {
    "no magic": (file(magic=b"GGML"), "is no GGUF file"),
    "nothing": (b"", "is no GGUF file"),
    "an old version": (file(version=1), "version 1"),
    "a version to come": (file(version=4), "version 4"),
    "big-endian": (file(version=3 << 24), "big-endian"),
    "tensors beyond reason": (file(infos=HUGE), "absurd"),
    "pairs beyond reason": (file(pairs=HUGE), "absurd"),
    "more pairs than there are": (file(pairs=60_000), "twice"),
    "more tensors than there are": (file(infos=60_000), "0 dimensions"),
    "a key of exabytes": (file(struct.pack("<Q", HUGE), pairs=1), "bytes"),
    "a string of gigabytes": (file(pair("k", STRING, struct.pack("<Q", 2**33)), pairs=1), "has 8589934592 bytes"),
    "a string beyond the end": (file(pair("k", STRING, struct.pack("<Q", 5000)), pairs=1), "cut short"),
    "a key that is no UTF-8": (file(pair(b"\xff", 0, b"\0"), pairs=1), "UTF-8"),
    "an unknown type": (file(pair("k", 77, b""), pairs=1), "unknown type 77"),
    "a key twice": (file(pair("k", 0, b"\1"), pair("k", 0, b"\1"), pairs=2), "k twice"),
    "an array of exabytes": (file(pair("k", ARRAY, array(0, HUGE)), pairs=1), "values"),
    "an array beyond the end": (file(pair("k", ARRAY, array(12, 3_000_000)), pairs=1), "cut short"),
    "arrays beyond reason": (
        file(pair("k", ARRAY, array(ARRAY, 3, array(7, 3_999_999))), pairs=1),
        "values",
    ),
    "an array of an unknown type": (file(pair("k", ARRAY, array(77, 1, b"\0")), pairs=1), "unknown type 77"),
    "deep nesting": (file(pair("k", ARRAY, array(ARRAY, 1) * 40), pairs=1), "nests"),
    "no dimensions": (file(info(shape=()), infos=1), "0 dimensions"),
    "too many dimensions": (file(info(shape=(1, 1, 1, 1, 1)), infos=1), "5 dimensions"),
    "dimensions beyond reason": (file(text("a") + struct.pack("<I", 2**31), infos=1), "dimensions"),
    "an empty dimension": (file(info(shape=(4, 0)), infos=1), "no whole number"),
    "a size that overflows": (file(info(shape=(HUGE, HUGE, 4)), infos=1), "cut short"),
    "an unsupported type": (file(info(kind=40), infos=1), "ggml type 40"),
    "half a block": (file(info(shape=(48,), kind=2), infos=1), "no whole number of Q4_0"),
    "an offset beyond the end": (file(info(offset=2**40), infos=1), "cut short"),
    "an offset that overflows": (file(info(offset=2**64 - 32), infos=1), "cut short"),
    "an unaligned offset": (file(info(offset=7), infos=1), "multiple of 32"),
    "a tensor twice": (file(info(), info(offset=32), infos=2), "a twice"),
    "overlapping tensors": (file(info(shape=(16,)), info("b", offset=32), infos=2), "overlap"),
    "the same place twice": (file(info(), info("b"), infos=2), "overlap"),
    "an odd alignment": (file(pair("general.alignment", 4, struct.pack("<I", 33)), pairs=1), "power of two"),
    "no alignment": (file(pair("general.alignment", 4, struct.pack("<I", 0)), pairs=1), "power of two"),
    "an alignment of gigabytes": (
        file(pair("general.alignment", 4, struct.pack("<I", 2**31)), pairs=1),
        "power of two",
    ),
    "an alignment of text": (file(pair("general.alignment", STRING, text("32")), pairs=1), "power of two"),
}


@pytest.mark.parametrize(("content", "problem"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_headers_are_refused_in_one_line(content: bytes, problem: str, tmp_path: Path):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=problem) as caught:
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


NASTY = "a\n\x1b[31m" * 100


@pytest.mark.parametrize(
    "content",
    [
        file(info(NASTY, kind=99), infos=1),
        file(pair(NASTY, 99, b""), pairs=1),
        file(text(NASTY), pairs=1, data=0)[: 24 + 8 + len(NASTY)],
        file(pair(NASTY, 0, b"\1"), pair(NASTY, 0, b"\1"), pairs=2),
        file(pair(NASTY, STRING, struct.pack("<Q", 2**40)), pairs=1),
    ],
    ids=range(5),
)
def test_what_a_name_contains_stays_on_its_line(content: bytes, tmp_path: Path):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_gguf(tmp_path / "x.gguf")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_a_small_good_file_is_accepted(tmp_path: Path):
    """The builder of the hostile ones would otherwise prove nothing."""
    (tmp_path / "x.gguf").write_bytes(file(pair("k", 0, b"\1"), info(), info("b", offset=32), pairs=1, infos=2))
    assert list(read_gguf(tmp_path / "x.gguf").tensors) == ["a", "b"]


def use(path: Path) -> None:
    """All that is read of a file before its tensors are."""
    source = GgufSource(path)
    parse_config(source.config())
    read_generation(source)
    source.tokenizer_json()
    source.tokenizer_config()
    source.chat_template()
    source.tensors()
    source.revision()


def refused_or_read(path: Path) -> None:
    with contextlib.suppress(ModelError):
        use(path)


@QUICK
@given(data=st.data())
def test_every_cut_is_a_model_error(data: st.DataObject, whole: bytes, tmp_path: Path):
    end = data.draw(st.integers(0, len(whole) - 1))
    (tmp_path / "x.gguf").write_bytes(whole[:end])
    with pytest.raises(ModelError):
        use(tmp_path / "x.gguf")


@QUICK
@given(data=st.data())
def test_flipped_bits_are_read_or_a_model_error(data: st.DataObject, whole: bytes, tmp_path: Path):
    content, header = bytearray(whole), read_size(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (tmp_path / "x.gguf").write_bytes(content)
    refused_or_read(tmp_path / "x.gguf")


@QUICK
@given(data=st.data())
def test_random_numbers_anywhere_are_read_or_a_model_error(data: st.DataObject, whole: bytes, tmp_path: Path):
    number = st.sampled_from([0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, 0x7FC00000, 0x7F800000])
    at, value = data.draw(st.integers(0, read_size(whole) - 8)), data.draw(number)
    (tmp_path / "x.gguf").write_bytes(whole[:at] + struct.pack("<Q", value) + whole[at + 8 :])
    refused_or_read(tmp_path / "x.gguf")


def test_every_byte_of_the_start_may_be_anything(whole: bytes, tmp_path: Path):
    for at, value in itertools.product(range(24), (0, 1, 127, 255)):
        (tmp_path / "x.gguf").write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
        refused_or_read(tmp_path / "x.gguf")


def read_size(content: bytes) -> int:
    """Bytes of the tiny file before its tensors."""
    biggest = sum(tensor.nbytes for tensor in tensors().values())
    assert len(content) > biggest
    return len(content) - biggest


def test_files_that_cannot_be_read_are_named(tmp_path: Path):
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(ModelError, match="can't be read"):
            read_gguf(path)
        assert not is_gguf(path)


def test_numbers_are_of_the_type_that_is_asked_for(tmp_path: Path):
    nan = struct.pack("<f", np.nan)
    parts = [pair("t", STRING, text("x")), pair("n", 6, nan), pair("l", ARRAY, array(0, 2, b"\1\2"))]
    (tmp_path / "x.gguf").write_bytes(file(*parts, pairs=3))
    found = read_gguf(tmp_path / "x.gguf")
    assert found.items("l", int) == [1, 2]
    for key, kind, problem in [("t", int, "unexpected type, str"), ("n", float, "is nan"), ("x", int, "is missing")]:
        with pytest.raises(ModelError, match=problem):
            found.get(key, kind)
    with pytest.raises(ModelError, match="array of str"):
        found.items("l", str)
