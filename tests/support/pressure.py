"""A cluster under pressure, for tests: requests whose answers are known, and clients that do not read."""

import asyncio
import json
import random
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bench.processes import Processes
from bench.soak.request_mix import PlannedRequest, Template, draw, make_templates
from bench.soak.tally import Tally
from bench.soak.whole_answers import SoakAnswer, SoakClient
from cluster.local_cluster import Cluster

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
LONG = Template("long", False, {"prompt": "A long answer. ", "max_tokens": 600, "temperature": 0, "ignore_eos": True})
START_S = 60.0
LARGE: dict[str, Any] = {  # more than the kernel's buffers take
    "messages": [{"role": "user", "content": "Much."}],
    "n": 3,
    "logprobs": True,
    "top_logprobs": 20,
    "max_tokens": 1500,
    "temperature": 1,
    "ignore_eos": True,
}


class Pressure:
    """A cluster of two workers of each kind, and requests whose answers are known."""

    def __init__(self, cluster: Cluster, processes: Processes, model: str) -> None:
        self.cluster = cluster
        self.processes = processes
        self.model = model
        self.url = cluster.address("router")
        self.templates = make_templates(12, 3, 1024)
        self.references: dict[str, SoakAnswer] = {}

    def client(self) -> SoakClient:
        return SoakClient(self.url, self.model, 120.0)

    async def take_references(self) -> None:
        async with self.client() as client:
            for template in (*self.templates, LONG):
                outcome = await client.send(PlannedRequest(template, stream=False))
                assert outcome.end == "answered", outcome.code
                self.references[template.name] = outcome.answer

    async def answers(self, plans: list[PlannedRequest]) -> Tally:
        """All at once."""
        tally = Tally(self.references)
        async with self.client() as client:
            for outcome in await asyncio.gather(*map(client.send, plans)):
                tally.take(outcome)
        return tally

    def plans(self, count: int) -> list[PlannedRequest]:
        numbers = random.Random(0)
        return [draw(self.templates, numbers, aborts=0.0) for _ in range(count)]

    async def until_ready(self) -> None:
        await eventually(self.processes.workers_ready)

    async def working(self, role: str) -> str:
        """The first worker of this role that has attempts."""

        async def found() -> str:
            for name in WORKERS:
                if name.startswith(role) and (await self.processes.gauges(name))["num_attempts"]:
                    return name
            return ""

        return str(await eventually(found))

    def router_mb(self) -> float:
        return self.processes.usage()["router"].rss_mb


async def eventually(condition: Callable[[], Awaitable[Any]], timeout_s: float = START_S) -> Any:
    """The condition's first true value."""
    async with asyncio.timeout(timeout_s):
        while not (value := await condition()):
            await asyncio.sleep(0.01)
    return value


@contextmanager
def unread_stream(pressure: Pressure, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A client that has asked for a long answer and has not read a byte of it."""
    data = json.dumps({"model": pressure.model, "stream": True, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    host, _, port = pressure.url.removeprefix("http://").rpartition(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(f"{head}\r\n\r\n".encode() + data)
        yield connection
