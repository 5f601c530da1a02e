"""Digests of whole files, computed once a file: cached by what changes when a file does.

A cache that can't be had or is not ours to write costs the time only. Entries are locked while they are filled, so
that the workers of a host, which start together, don't all read the same file for it.
"""

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from common.cache_directory import cache_directory
from common.errors import ConfigError, ModelError
from common.log import get_logger, log_event

CHUNK = 64 * 2**20  # bytes that a thread digests; smaller files are as quickly digested as looked up
READ = 2**20  # bytes at a time
SETTLED_NS = 2 * 10**9  # a file younger than this could change again without another time stamp
log = get_logger("model")


def file_digests(
    paths: Sequence[Path], *, smallest_cached: int = CHUNK, now_ns: Callable[[], int] = time.time_ns
) -> list[str]:
    """SHA-256 (hex) of the SHA-256 of each chunk, for each file. Raises ModelError."""
    return [_digest(path, smallest_cached, now_ns) for path in paths]


def _digest(path: Path, smallest_cached: int, now_ns: Callable[[], int]) -> str:
    try:
        found = path.stat()
        if found.st_size < smallest_cached:
            return _computed(path, found.st_size)
        entry = _open_entry(path)
        if entry is None:
            return _computed(path, found.st_size)
        with entry:
            found = path.stat()  # another process may have had the lock for long
            key: list[str | int] = [str(path.resolve()), *_identity(found)]
            if (known := _known(entry, key)) is not None:
                return known
            began = time.monotonic()
            digest = _computed(path, found.st_size)
            took = {"file": path.name, "seconds": round(time.monotonic() - began, 3)}
            log_event(log, logging.INFO, "read for its digest", **took)
            if _identity(path.stat()) != key[1:]:
                raise ModelError(f"{path} changed while it was read", field="model")
            if max(found.st_mtime_ns, found.st_ctime_ns) + SETTLED_NS < now_ns():
                _remember(entry, [*key, digest])
            return digest
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}", field="model") from error


def _identity(found: os.stat_result) -> list[int]:
    """What no change of a file leaves as it was. The time of the last change to the inode can't be set by hand."""
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]


def _open_entry(path: Path) -> BinaryIO | None:
    """The cache's entry of a path, locked until it is closed; None where there can't be one."""
    try:
        folder = cache_directory() / "digests"
        folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
        entry = open(folder / name, "a+b")  # noqa: SIM115 (its caller closes it)
    except (OSError, ConfigError):
        return None
    try:
        fcntl.flock(entry, fcntl.LOCK_EX)
    except OSError:
        entry.close()
        return None
    return entry


def _known(entry: BinaryIO, key: list[str | int]) -> str | None:
    try:
        entry.seek(0)
        content = json.loads(entry.read(2**16))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, list) or content[:-1] != key or not isinstance(content[-1], str):
        return None
    return content[-1]


def _remember(entry: BinaryIO, content: list[str | int]) -> None:
    try:
        entry.truncate(0)
        entry.write(json.dumps(content).encode())
        entry.flush()
    except OSError as error:
        log_event(log, logging.WARNING, "can't be cached", file=entry.name, reason=error.strerror)


def _computed(path: Path, size: int) -> str:
    starts = range(0, size, CHUNK)
    if len(starts) < 2:
        chunks = [_chunk(path, start) for start in starts]
    else:
        with ThreadPoolExecutor(min(len(starts), len(os.sched_getaffinity(0)))) as threads:
            chunks = list(threads.map(lambda start: _chunk(path, start), starts))
    return hashlib.sha256(b"".join(chunks)).hexdigest()


def _chunk(path: Path, start: int) -> bytes:
    digest, left, buffer = hashlib.sha256(), CHUNK, memoryview(bytearray(READ))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(buffer[: min(left, READ)])):
            digest.update(buffer[:count])
            left -= count
    return digest.digest()
