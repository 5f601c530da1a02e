"""Native code, compiled for this very machine on first use and kept in the user's cache directory."""

import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.cache_directory import cache_directory
from common.errors import ConfigError

COMPILERS = ("g++", "c++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-pthread")
LIBRARY_FLAGS = ("-shared", "-fPIC")
BUILD_S = 600.0  # on a busy machine; two minutes on a free core of a slow one


class NativeUnavailable(Exception):
    """There is no compiler, or it could not build this; the message says which. Callers have another way."""


def build(source: Path, *, library: bool, environ: Mapping[str, str] = os.environ) -> Path:
    """The library or program made of one C++ file, compiled unless that is done. Raises NativeUnavailable."""
    compiler = next(filter(None, map(shutil.which, (environ.get("CXX", ""), *COMPILERS))), None)
    if compiler is None:
        raise NativeUnavailable(f"no C++ compiler ({', '.join(COMPILERS)})")
    flags = (*FLAGS, *(LIBRARY_FLAGS if library else ()))
    try:
        made = cache_directory(environ) / "native" / f"{source.stem}-{_build_id(source, compiler, flags)}"
        if made.exists():
            return made
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{source.stem}-", dir=made.parent) as scratch:
            output = Path(scratch) / source.stem
            command = [compiler, *flags, str(source), "-o", str(output)]
            status, errors = _run(command)
            if status:
                raise NativeUnavailable(f"{compiler} failed: {errors.strip().splitlines()[:1]}")
            output.rename(made)  # complete, or not there
    except (OSError, subprocess.TimeoutExpired, ConfigError) as error:
        raise NativeUnavailable(str(error)) from error
    return made


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Its exit status and what it had to say; a compiler that takes too long ends with all that it has started."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as compiling:
        try:
            _, errors = compiling.communicate(timeout=BUILD_S)
        except BaseException:
            os.killpg(compiling.pid, signal.SIGKILL)
            raise
    return compiling.returncode, errors


def _build_id(source: Path, compiler: str, flags: tuple[str, ...]) -> str:
    """Another source, compiler or CPU is another build: -march=native is not for sharing."""
    parts = [source.read_text(encoding="utf-8"), compiler, *flags, platform.machine(), _cpu_flags()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
