"""A file's digest covers every byte, is computed once as long as the file stays, and needs no cache."""

import os
import time
from pathlib import Path

import pytest

from common.errors import ModelError
from common.model import file_digests
from common.model.file_digests import SETTLED_NS


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(file_digests, "CHUNK", 1000)
    return tmp_path / "cache" / "digests"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Each reading of a whole file."""
    seen: list[Path] = []
    computed = file_digests._computed

    def counted(path: Path, size: int) -> str:
        seen.append(path)
        return computed(path, size)

    monkeypatch.setattr(file_digests, "_computed", counted)
    return seen


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def digest(path: Path, later_ns: int = SETTLED_NS * 2) -> str:
    """As it is some time after now."""
    return file_digests.file_digests([path], smallest_cached=1, now_ns=lambda: time.time_ns() + later_ns)[0]


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 2000, 5500])
def test_every_byte_and_the_length_count(size: int, tmp_path: Path):
    content = bytes(range(256)) * 22
    before = digest(write(tmp_path / "a", content[:size]))
    assert digest(write(tmp_path / "b", content[:size])) == before
    assert digest(write(tmp_path / "c", content[:size] + b"\0")) != before
    for place in {0, size // 2, 999, 1000, size - 1} & set(range(size)):
        changed = bytearray(content[:size])
        changed[place] ^= 1
        assert digest(write(tmp_path / "d", changed)) != before


def test_chunks_in_another_order_are_another_file(tmp_path: Path):
    first, second = b"a" * 1000, b"b" * 1000
    assert digest(write(tmp_path / "a", first + second)) != digest(write(tmp_path / "b", second + first))


def test_it_is_computed_once(tmp_path: Path, reads: list[Path]):
    path = write(tmp_path / "a", b"x" * 3000)
    assert digest(path) == digest(path)
    assert reads == [path]


def test_a_change_of_the_same_length_and_time_is_seen(tmp_path: Path, reads: list[Path]):
    path = write(tmp_path / "a", b"x" * 3000)
    before, found = digest(path), path.stat()
    write(path, b"x" * 2999 + b"y")
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert path.stat().st_mtime_ns == found.st_mtime_ns
    assert digest(path) != before
    replaced = write(tmp_path / "new", b"x" * 3000).rename(path)
    assert digest(replaced) == before
    assert len(reads) == 3


def test_what_was_just_written_is_not_trusted_to_stay(tmp_path: Path, reads: list[Path]):
    path = write(tmp_path / "a", b"x" * 3000)
    assert digest(path, later_ns=0) == digest(path, later_ns=0)
    assert len(reads) == 2


def test_small_files_leave_nothing_in_the_cache(tmp_path: Path, cache: Path):
    file_digests.file_digests([write(tmp_path / "a", b"x" * 3000)], smallest_cached=3001)
    assert not cache.exists()


@pytest.mark.parametrize("content", [b"", b"[", b"[]", b"{}", b"[1, 2]", b"\xff", b"[" * 10_000])
def test_a_broken_entry_is_replaced(content: bytes, tmp_path: Path, cache: Path, reads: list[Path]):
    path = write(tmp_path / "a", b"x" * 3000)
    before = digest(path)
    (entry,) = cache.iterdir()
    entry.write_bytes(content)
    assert digest(path) == digest(path) == before
    assert len(reads) == 2


def test_without_a_cache_it_is_computed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[Path]):
    path = write(tmp_path / "a", b"x" * 3000)
    before = digest(path)
    monkeypatch.setenv("KVRELAY_CACHE", str(path / "no directory"))
    assert digest(path) == digest(path) == before
    assert len(reads) == 3


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path / "a", b"x" * 3000)
    monkeypatch.setattr(file_digests, "_computed", lambda path, size: write(path, b"y" * 10).name)
    with pytest.raises(ModelError, match="a changed while it was read"):
        digest(path)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ModelError, match="nobody can't be read: No such file or directory"):
        digest(tmp_path / "nobody")
