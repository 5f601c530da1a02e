"""The processes of a small cluster, each behind a proxy: started, killed, frozen and started again where they were."""

import asyncio
import secrets
import signal
import socket
import sys
from pathlib import Path
from typing import TextIO

from cluster.children import Child, ChildSpec, Console
from cluster.plan import child_environment, redis_ready
from cluster.redis_server import find_redis_server, server_command
from common.deadlines import Deadlines
from tests.faults.proxy import Proxy

SCALE = 0.3
DEADLINES = Deadlines().scaled(SCALE)
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
MODULES = {"prefill": "prefill_svc", "decode": "decode_svc"}
START_S = 60.0
STEP_TOKENS = 32  # so that a prompt takes many steps
MAX_LEN = "--max-model-len=2048"
FLAGS = (
    "--max-num-seqs=16",
    "--kv-cache-memory=16Mi",
    "--dtype=float32",
    "--threads=1",
    "--log-level=info",
)


class Processes:
    """Redis, a router, two prefill and two decode workers. Addresses stay what they are over restarts."""

    def __init__(self, model: Path, log: TextIO, *, worker_flags: tuple[str, ...] = ()) -> None:
        self._model = model
        self._console = Console(log, log)
        self._log, self._log_at = log, 0
        self._worker_flags = worker_flags
        self._namespace = f"faults-{secrets.token_hex(4)}"
        self._reserved: list[socket.socket] = []
        self._ports = {name: self._reserve() for name in ("redis", "router", *WORKERS)}
        self._metrics_ports = {name: self._reserve() for name in WORKERS} | {"router": self._ports["router"]}
        self.children: dict[str, Child] = {}
        self.proxies = {name: Proxy(port, self.pids if name in WORKERS else dict) for name, port in self._ports.items()}
        self._frozen: set[str] = set()

    def _reserve(self) -> int:
        """A port that its server may take, again and again, and no other connection in between."""
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        self._reserved.append(reserved)
        return int(reserved.getsockname()[1])

    def mark_log(self) -> None:
        self._log_at = self._log.tell()

    def logged(self) -> str:
        """What its processes have said since the mark."""
        self._log.flush()
        self._log.seek(self._log_at)
        return self._log.read()

    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self.children.items() if child.alive}

    def epoch(self, worker: str) -> int:
        return int(self.children[worker].ready.result().info["epoch"])

    @property
    def redis_url(self) -> str:
        """Of Redis, not behind its proxy."""
        return f"redis://127.0.0.1:{self._ports['redis']}/0"

    @property
    def namespace(self) -> str:
        return self._namespace

    async def open(self) -> None:
        """Starts all of it."""
        for proxy in self.proxies.values():
            await proxy.open()
        await self.start("redis")
        await asyncio.gather(*map(self.start, WORKERS))
        await self.start("router")

    async def close(self) -> None:
        """Kills what is left: how roles stop in order is another test's."""
        for name in list(self.children):
            await self.kill(name)
        for proxy in self.proxies.values():
            await proxy.close()
        for reserved in self._reserved:
            reserved.close()

    def _host(self, name: str) -> str:
        """Where this process listens."""
        return "127.0.0.1"

    def _advertised(self, name: str) -> str:
        """Where others reach it."""
        return f"127.0.0.1:{self.proxies[name].port}"

    def _command(self, name: str, module: str, *flags: str) -> tuple[str, ...]:
        return (sys.executable, "-P", "-m", module, *flags)

    def _spec(self, name: str) -> ChildSpec:
        env = child_environment() | {"OMP_NUM_THREADS": "1"}
        redis = (f"--redis-url=redis://{self._advertised('redis')}/0", f"--redis-namespace={self.namespace}")
        common = (f"--model={self._model}", f"--port={self._ports[name]}", f"--deadline-scale={SCALE}", MAX_LEN, *redis)
        if name == "redis":
            command = server_command(find_redis_server(), self._ports["redis"], log_level="notice")
            return ChildSpec(name, tuple(command), env, lambda line: redis_ready(self.redis_url, line), verbose=False)
        if name == "router":
            return ChildSpec(name, self._command(name, "router", *common), env)
        flags = (
            f"--worker-id={name}",
            f"--host={self._host(name)}",
            f"--advertise={self._advertised(name)}",
            f"--metrics-port={self._metrics_ports[name]}",
            f"--max-num-batched-tokens={STEP_TOKENS}",
            *FLAGS,
            *self._worker_flags,
        )
        return ChildSpec(name, self._command(name, MODULES[name.split("-")[0]], *common, *flags), env)

    async def start(self, name: str) -> None:
        """Returns when it is ready."""
        child = Child(self._spec(name), self._console)
        await child.spawn()
        self.children[name] = child
        await self._spawned(name, child.pid)
        await asyncio.wait([child.ready, child.exited], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        assert child.ready.done(), child.failure() if not child.alive else f"{name} is not ready"

    async def _spawned(self, name: str, pid: int) -> None:
        """For what a process needs from outside before it can start."""

    async def kill(self, name: str) -> None:
        self._frozen.discard(name)
        child = self.children[name]
        child.signal(signal.SIGKILL)
        await asyncio.wait([child.exited])

    def freeze(self, name: str) -> None:
        self._frozen.add(name)
        self.children[name].signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self._frozen.discard(name)
        self.children[name].signal(signal.SIGCONT)
