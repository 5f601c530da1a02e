"""What processes of a cluster hold: their gauges, memory, threads and open files; and how their memory grows."""

import asyncio
import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from cluster.children import Child
from cluster.local_cluster import Cluster
from common.metrics import PREFIX

PROC = Path("/proc")
SCRAPE_S = 5.0
NOT_AT_ZERO = ("workers", "prefix_index_blocks")  # gauges that are not of work
POOL = re.compile(r"^(?P<range>\S+) \S+ \S+ (?P<device>\S+) (?P<inode>\d+) +/memfd:", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Of one process now. Anonymous memory is what it has allocated; shared pools and files are not in it."""

    rss_mb: float
    anonymous_mb: float
    threads: int
    open_files: int


def usage_of(pid: int, proc: Path = PROC) -> ProcessUsage:
    """Raises OSError for a process that is gone."""
    status = dict(re.findall(r"^(\w+):\s+(\d+)", (proc / str(pid) / "status").read_text(), re.MULTILINE))
    if "VmRSS" not in status:
        raise ProcessLookupError(f"process {pid} has ended")
    return ProcessUsage(
        rss_mb=int(status["VmRSS"]) / 1024,
        anonymous_mb=int(status["RssAnon"]) / 1024,
        threads=int(status["Threads"]),
        open_files=len(os.listdir(proc / str(pid) / "fd")),
    )


def pools_of(pid: int, proc: Path = PROC) -> dict[tuple[str, str], int]:
    """Shared memory that is mapped: (device, inode) → bytes."""
    pools: dict[tuple[str, str], int] = {}
    for found in POOL.finditer((proc / str(pid) / "maps").read_text()):
        first, last = (int(address, 16) for address in found["range"].split("-"))
        key = (found["device"], found["inode"])
        pools[key] = pools.get(key, 0) + last - first
    return pools


def orphaned_bytes(pools: Mapping[str, Mapping[tuple[str, str], int]]) -> int:
    """Of pools by process: what is mapped of prefill workers that are gone."""
    owned = {key for name, mapped in pools.items() if name.startswith("prefill") for key in mapped}
    readers = [mapped for name, mapped in pools.items() if not name.startswith("prefill")]
    return sum(size for mapped in readers for key, size in mapped.items() if key not in owned)


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """dy/dx by least squares; None where x does not vary."""
    if len(points) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else None


def is_http(child: Child) -> bool:
    """Whether it is one of ours, and serves."""
    return child.spec.name != "redis" and child.alive and child.ready.done()


def http_address(child: Child) -> str:
    """Where its metrics are."""
    ready = child.ready.result()
    return ready.address if ready.role == "router" else f"http://{ready.info['metrics']}"


class Processes:
    """The living processes of a cluster, asked over HTTP and by /proc. Open with `async with`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def __aenter__(self) -> "Processes":
        timeout = aiohttp.ClientTimeout(total=SCRAPE_S)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def names(self) -> list[str]:
        return [name for name, child in self._cluster.children.items() if is_http(child)]

    async def page(self, name: str, path: str) -> tuple[int, str]:
        """Status and text of one of its pages; (0, "") when it does not answer."""
        child = self._cluster.children[name]
        if not is_http(child):
            return 0, ""
        try:
            async with self._session.get(http_address(child) + path) as reply:
                return reply.status, await reply.text()
        except (aiohttp.ClientError, TimeoutError):
            return 0, ""

    async def gauges(self, name: str) -> dict[str, float]:
        """Each gauge of work, summed over its labels; raises ConnectionError when there is no answer."""
        status, text = await self.page(name, "/metrics")
        if status != 200:
            raise ConnectionError(f"{name} has no metrics")
        return gauges_of(text)

    async def leftovers(self) -> dict[str, float]:
        """Gauges of all processes that are not zero, as "process gauge"."""
        found: dict[str, float] = {}
        for name in self.names():
            found |= {f"{name} {gauge}": value for gauge, value in (await self.gauges(name)).items() if value}
        return found

    async def workers_ready(self) -> bool:
        """Whether the router can use every worker, and has no others."""
        _, text = await self.page("router", "/metrics")
        wanted = sum(name.startswith(("prefill", "decode")) for name in self._cluster.children)
        states = worker_states(text)
        return states.pop("ready", 0.0) == wanted and not any(states.values())

    async def at_rest(self, timeout_s: float) -> dict[str, float]:
        """Waits until nothing is left and all workers are ready, for so long; what is left then."""
        left: dict[str, float] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        left = await self.leftovers()
                        if not left and await self.workers_ready():
                            return {}
                    except ConnectionError:
                        left = {"processes that don't answer": 1.0}
                    await asyncio.sleep(0.1)
        return left or {"workers that are not ready": 1.0}

    def usage(self) -> dict[str, ProcessUsage]:
        """Of each process that is there."""
        found = {}
        for name in self.names():
            with contextlib.suppress(OSError):
                found[name] = usage_of(self._cluster.children[name].pid)
        return found

    def orphaned_bytes(self) -> int:
        return orphaned_bytes({name: pools_of(self._cluster.children[name].pid) for name in self.names()})


def gauges_of(text: str) -> dict[str, float]:
    """Gauges of work in a page of metrics."""
    return {
        family.name.removeprefix(PREFIX): sum(sample.value for sample in family.samples)
        for family in text_string_to_metric_families(text)
        if family.type == "gauge" and family.name.startswith(PREFIX)
        if family.name.removeprefix(PREFIX) not in NOT_AT_ZERO
    }


def worker_states(text: str) -> dict[str, float]:
    """How many workers the router knows in each state."""
    states: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.name == f"{PREFIX}workers":
            for sample in family.samples:
                states[sample.labels["state"]] = states.get(sample.labels["state"], 0.0) + sample.value
    return states
