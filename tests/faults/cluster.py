"""A small cluster of real processes, each behind a proxy, that are killed, frozen, cut off and brought back."""

import asyncio
import secrets
import signal
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TextIO

import aiohttp

from cli.child import Child, ChildSpec, Console
from cli.up import child_environment, redis_ready
from common.deadlines import Deadlines
from common.redis_server import find_redis_server, server_command
from faults.client import Answer, Asked
from faults.proxy import Proxy
from faults.tools import eventually, open_files, total

SCALE = 0.3
DEADLINES = Deadlines().scaled(SCALE)
SETTLE_S = DEADLINES.lease_s + 5.0 * SCALE + 1.0  # until nothing is held for anybody; 1 s for a busy machine
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
MODULES = {"prefill": "prefill_svc", "decode": "decode_svc"}
START_S = 60.0
# What is zero on a worker and on a router that have nothing to do.
GAUGES = (
    *("num_requests_running", "num_requests_waiting", "num_waiting_tokens", "num_attempts"),
    *("kv_cache_usage_perc", "kv_leases", "kv_held_blocks", "kv_claims"),
)
STEP_TOKENS = 32  # so that a prompt takes many steps
MAX_LEN = "--max-model-len=2048"
FLAGS = (
    "--max-num-seqs=16",
    "--kv-cache-memory=16Mi",
    "--dtype=float32",
    "--threads=1",
    "--log-level=info",
)


class FaultCluster:
    """Redis, a router, two prefill and two decode workers. Addresses stay what they are over restarts.

    async with FaultCluster(model, log) as cluster: ...
    """

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
        self._references: dict[str, Answer] = {}
        self._frozen: set[str] = set()
        self._stack = AsyncExitStack()

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
    def url(self) -> str:
        """Of the router, behind its proxy."""
        return f"http://127.0.0.1:{self.proxies['router'].port}"

    @property
    def direct_url(self) -> str:
        return f"http://127.0.0.1:{self._ports['router']}"

    @property
    def redis_url(self) -> str:
        """Of Redis, not behind its proxy."""
        return f"redis://127.0.0.1:{self._ports['redis']}/0"

    @property
    def namespace(self) -> str:
        return self._namespace

    async def __aenter__(self) -> "FaultCluster":
        timeout = aiohttp.ClientTimeout(total=DEADLINES.rpc_s)
        self._session = await self._stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        self._stack.push_async_callback(self._end)
        try:
            for proxy in self.proxies.values():
                await proxy.open()
            await self.start("redis")
            await asyncio.gather(*map(self.start, WORKERS))
            await self.start("router")
            await self.ready()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _end(self) -> None:
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

    async def heal(self) -> None:
        """All processes run, all ways are open, and the router can use every worker."""
        for name in list(self._frozen):
            self.thaw(name)
        for proxy in self.proxies.values():
            await proxy.heal()
        dead = [name for name, child in self.children.items() if not child.alive]
        await asyncio.gather(*map(self.start, dead))
        await self.ready()

    async def ready(self) -> None:
        async def all_usable() -> bool:
            ready = await self.metric("router", "workers", state="ready")
            others = sum([await self.metric("router", "workers", state=state) for state in ("unreachable", "draining")])
            return (ready, others) == (len(WORKERS), 0)

        await eventually(all_usable, "the router can use all workers", START_S)

    async def metrics(self, name: str) -> str:
        """A process's metrics as text; "" when it does not answer."""
        try:
            async with self._session.get(f"http://{self._host(name)}:{self._metrics_ports[name]}/metrics") as reply:
                return await reply.text()
        except (aiohttp.ClientError, TimeoutError):
            return ""

    async def metric(self, name: str, metric: str, **labels: str) -> float:
        """The sum of the series that have these labels."""
        return total(await self.metrics(name), metric, **labels)

    async def open_files(self, name: str) -> int:
        return open_files(await self.metrics(name))

    async def busy(self, role: str, metric: str = "num_attempts") -> str:
        """The first worker of this role on which the metric is not zero; waits for one."""

        async def one() -> str | None:
            for name in WORKERS:
                if name.startswith(role) and await self.metric(name, metric):
                    return name
            return None

        return str(await eventually(one, f"{metric} on a {role} worker"))

    async def leftovers(self, *names: str) -> dict[str, float]:
        """Gauges that are not zero."""
        found = {}
        for name in names or ("router", *WORKERS):
            text = await self.metrics(name)
            found |= {} if text else {f"{name} does not answer": 1.0}
            found |= {f"{name} {gauge}": value for gauge in GAUGES if (value := total(text, gauge))}
        return found

    async def quiet(self, *names: str, timeout_s: float = SETTLE_S) -> None:
        """Nothing runs, waits or is held on these processes (default: on all) within lease + 5 s."""
        left: dict[str, float] = {}

        async def empty() -> bool:
            nonlocal left
            left = await self.leftovers(*names)
            return not left

        try:
            await eventually(empty, "nothing is left", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"left after {timeout_s:g} s: {left}") from error

    def ask(self, body: dict[str, Any], *, direct: bool = False) -> Asked:
        """A request that hits no prefix of an earlier one."""
        salted = body | {"cache_salt": secrets.token_hex(8)}
        return Asked(self.direct_url if direct else self.url, {"model": self._model.name, **salted})

    async def reference(self, body: dict[str, Any]) -> Answer:
        """The answer of a healthy cluster, taken once."""
        key = repr(sorted(body.items()))
        if key not in self._references:
            answer = await self.ask(body).answer()
            assert answer.error is None, answer.error
            self._references[key] = answer
        return self._references[key]
