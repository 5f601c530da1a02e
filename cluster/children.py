"""One process of a cluster: what it says is shown with its name, its ready line and its end are awaited."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from cluster.parent_death import dying_with_parent
from common.errors import StartupError

LAST_WORDS_S = 1.0  # for output still in the pipes of a process that ended
LONGEST_LINE = 64 * 1024  # bytes; longer ones are cut
ERROR_LINE = re.compile(r"(?:\S+: )*error: (.+)")


@dataclass(frozen=True, slots=True)
class Ready:
    """What a process says of itself once it serves."""

    role: str
    address: str
    info: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, line: str) -> "Ready | None":
        """From `ready <role> <address> <json>`; None for any other line."""
        parts = line.split(" ", 3)
        if len(parts) != 4 or parts[0] != "ready":
            return None
        try:
            info = json.loads(parts[3])
        except ValueError:
            return None
        return cls(parts[1], parts[2], info) if isinstance(info, dict) else None


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process to run."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] | None = field(default=None, repr=False)  # None: as here; may hold secrets
    parse_ready: Callable[[str], Ready | None] = Ready.parse
    essential: bool = False  # its end is the cluster's
    verbose: bool = True  # its output is shown


class Console:
    """What people read: announcements on stdout, lines of the processes on stderr."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self.gone = asyncio.Event()  # nobody reads any more
        self.muted = False  # after a failure, whose one line matters

    def say(self, text: str) -> None:
        self._write(self._out, text)

    def note(self, text: str) -> None:
        """Progress, for people alone."""
        self._write(self._err, text)

    def relay(self, name: str, line: str) -> None:
        if not self.muted:
            self._write(self._err, f"{name:<10} | {line}")

    def _write(self, stream: TextIO, text: str) -> None:
        if self.gone.is_set():
            return
        try:
            print(text, file=stream, flush=True)
        except OSError:
            self.gone.set()


def describe_exit(code: int) -> str:
    """`exit status 2`, or `killed by SIGKILL`."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


async def read_lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Its lines, without their ends; a carriage return ends one, too. Empty ones are left out."""
    rest = b""
    while data := await stream.read(LONGEST_LINE):
        *lines, rest = re.split(rb"[\r\n]+", rest + data)
        if len(rest) >= LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        for line in filter(None, lines):
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


class Child:
    """One life of one process. Its pipes are read to their end; `ready` and `exited` can be awaited."""

    ready: asyncio.Future[Ready]
    exited: asyncio.Task[int]

    def __init__(self, spec: ChildSpec, console: Console) -> None:
        self.spec = spec
        self.ready = asyncio.get_running_loop().create_future()
        self._console = console
        self._error = ""  # the reason it gave itself
        self._last_line = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self.exited.done()

    async def spawn(self) -> None:
        """Starts the process, which dies with this one; to be called in the main thread. Raises StartupError."""
        program = self.spec.command[0]
        if shutil.which(program) is None:
            raise StartupError(f"{self.spec.name}: can't run {program}: No such file or directory")
        try:
            self._process = await asyncio.create_subprocess_exec(
                *dying_with_parent(self.spec.command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self.spec.env,
                start_new_session=True,  # Ctrl-C is for the supervisor, which stops all in order
            )
        except OSError as error:
            raise StartupError(f"{self.spec.name}: can't run {program}: {error.strerror}") from error
        self.exited = asyncio.create_task(self._run(), name=self.spec.name)

    def signal(self, number: int) -> None:
        """Sends a signal; nothing happens to a process that has ended."""
        if self.alive and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)  # not by the process object: that would compete for its exit status

    def obituary(self) -> str:
        """How it ended, with its own reason if it gave one."""
        if self.alive:
            return f"{self.spec.name} (pid {self.pid}) can't be killed"
        code = self.exited.result()
        how = f"{self.spec.name} (pid {self.pid}) died: {describe_exit(code)}"
        reason = self._error or (self._last_line if code > 0 else "")
        return f"{how}: {reason}" if reason else how

    def failure(self) -> str:
        """Why it did not start, in one line."""
        return f"{self.spec.name}: {self._error}" if self._error else self.obituary()

    async def _run(self) -> int:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        readers = [
            asyncio.create_task(self._read(self._process.stdout)),
            asyncio.create_task(self._read(self._process.stderr)),
        ]
        code = await self._process.wait()
        await asyncio.wait(readers, timeout=LAST_WORDS_S)
        for reader in readers:
            reader.cancel()  # somebody else may hold the pipe
        return code

    async def _read(self, stream: asyncio.StreamReader) -> None:
        async for line in read_lines(stream):
            if self.ready.done():
                self._show(line)
            elif (ready := self.spec.parse_ready(line)) is not None:
                self.ready.set_result(ready)
                if self._error:  # it was none
                    self._show(self._error)
                    self._error = ""
            elif error := ERROR_LINE.fullmatch(line):
                self._error = error.group(1)  # told by whoever started it
            else:
                self._show(line)

    def _show(self, line: str) -> None:
        self._last_line = line
        if self.spec.verbose:
            self._console.relay(self.spec.name, line)
