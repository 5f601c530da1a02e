"""A small cluster of real processes that faults are done to, and what its clients and its metrics say of it."""

import asyncio
import secrets
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

import aiohttp

from tests.faults.client import Answer, Asked
from tests.faults.processes import DEADLINES, SCALE, START_S, WORKERS, Processes
from tests.faults.tools import eventually, met, open_files, total

SETTLE_S = DEADLINES.lease_s + 5.0 * SCALE + 1.0  # until nothing is held for anybody; 1 s for a busy machine
LONG_SUBMISSION = 1000  # bytes; more than short prompts and what keeps a connection alive
# What is zero on a worker and on a router that have nothing to do.
GAUGES = (
    *("num_requests_running", "num_requests_waiting", "num_waiting_tokens", "num_attempts"),
    *("kv_cache_usage_perc", "kv_leases", "kv_held_blocks", "kv_claims"),
)


class FaultCluster(Processes):
    """Healthy once it is entered.

    async with FaultCluster(model, log) as cluster: ...
    """

    def __init__(self, model: Path, log: TextIO, *, worker_flags: tuple[str, ...] = ()) -> None:
        super().__init__(model, log, worker_flags=worker_flags)
        self._references: dict[str, Answer] = {}

    @property
    def url(self) -> str:
        """Of the router, behind its proxy."""
        return f"http://127.0.0.1:{self.proxies['router'].port}"

    @property
    def direct_url(self) -> str:
        return f"http://127.0.0.1:{self._ports['router']}"

    async def __aenter__(self) -> "FaultCluster":
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINES.rpc_s))
        try:
            await self.open()
            await self.ready()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def _end(self) -> None:
        await self.close()
        await self._session.close()

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

    def submitted(self) -> Counter[str]:
        """Bytes that the router has sent to each worker."""
        return Counter({name: self.proxies[name].moved["router", "up"] for name in WORKERS})

    async def at_work(self, role: str, before: Counter[str]) -> str:
        """The worker of this role that got a long prompt after `before`; waits for one."""

        async def one() -> str | None:
            news = self.submitted() - before
            return next((name for name in WORKERS if name.startswith(role) and news[name] > LONG_SUBMISSION), None)

        return str(await met(one, f"a {role} worker has got a long prompt"))

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
        """A request that hits no prefix of an earlier one, unless it names a cache_salt of its own."""
        salted = {"cache_salt": secrets.token_hex(8)} | body
        return Asked(self.direct_url if direct else self.url, {"model": self._model.name, **salted})

    async def reference(self, body: dict[str, Any]) -> Answer:
        """The answer of a healthy cluster, taken once."""
        key = repr(sorted(body.items()))
        if key not in self._references:
            answer = await self.ask(body).answer()
            assert answer.error is None, answer.error
            self._references[key] = answer
        return self._references[key]
