"""A redis-server as a child process of the tests."""

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cluster.parent_death import dying_with_parent
from cluster.redis_server import find_redis_server, free_port, server_command
from common.errors import AddressInUse, StartupError

PORT_TRIES = 5
POLL_S = 0.01
STOP_S = 5.0  # from SIGTERM to SIGKILL


class RedisServer:
    """Runs redis-server on a free port of 127.0.0.1 from start() to stop(), and never longer than this process.

    Start it from a thread that lives as long as the process (see cluster.parent_death.die_with_parent).
    """

    def __init__(
        self, executable: Path | None = None, *, port: int = 0, start_s: float = 10.0, options: Sequence[str] = ()
    ) -> None:
        self.executable = executable
        self.start_s = start_s
        self._options = options
        self.port = port
        self._any_port = port == 0
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """Of the running server."""
        return None if self._process is None else self._process.pid

    def start(self) -> "RedisServer":
        """Returns when the server answers. Raises StartupError in one line."""
        if self._process is not None:
            raise StartupError("this redis-server runs already")
        executable = self.executable or find_redis_server()
        for attempt in range(PORT_TRIES):
            try:
                self._try_start(executable)
                return self
            except AddressInUse:  # somebody else took the port between our look and the server's bind
                if not self._any_port or attempt == PORT_TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def _try_start(self, executable: Path) -> None:
        if not os.access(executable, os.X_OK):
            raise StartupError(f"{executable} can't be run")
        if self._any_port:
            self.port = free_port()
        try:
            directory = tempfile.mkdtemp(prefix="kvrelay-redis-")
            try:
                self._output = tempfile.TemporaryFile()  # noqa: SIM115  (stop() closes it; it has no name)
                self._process = subprocess.Popen(
                    dying_with_parent([*server_command(executable, self.port), *self._options]),
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is the parent's to handle: Redis goes last
                )
                self._wait_until_ready()
            finally:
                os.rmdir(directory)  # the server goes on without: it can't leave a file even when told to save
        except (OSError, subprocess.SubprocessError) as error:
            self.stop()
            raise StartupError(f"{executable} can't be run: {error}") from error
        except BaseException:
            self.stop()
            raise

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self.start_s
        while True:
            if self._process.poll() is not None:
                raise self._failure(f"ended with exit status {self._process.returncode}")
            if _server_pid(self.port) == self._process.pid:
                return
            if time.monotonic() > deadline:
                raise self._failure(f"does not answer on port {self.port} after {self.start_s:g} s")
            time.sleep(POLL_S)

    def _failure(self, what: str) -> StartupError:
        assert self._output is not None
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        said = " / ".join(line.strip() for line in lines if line.strip())[-300:]
        if "Address already in use" in said:
            return AddressInUse(f"port {self.port} is taken, redis-server can't listen on it", field="redis_url")
        return StartupError(f"redis-server {what}: {said or 'it said nothing'}")

    def stop(self) -> None:
        """Asks the server to end, then makes it; a second call does nothing."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._output is not None:
            self._output.close()
            self._output = None

    def __enter__(self) -> "RedisServer":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _server_pid(port: int) -> int | None:
    """Who answers there: a server that lost the race for its port must not be taken for the one that won it."""
    client = redis.Redis("127.0.0.1", port, socket_timeout=1.0, socket_connect_timeout=1.0, retry=Retry(NoBackoff(), 0))
    try:
        client.ping()
        return int(client.info("server")["process_id"])
    except (redis.RedisError, OSError, KeyError):
        return None
    finally:
        client.close()
