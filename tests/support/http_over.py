"""The HTTP API over any pipeline, on a real socket, and a client of it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from common.deadlines import Deadlines
from common.text.text_model import TextModel
from router.app import DeltaSource, build_app, build_runner
from router.metrics import RouterMetrics

NAME = "tiny"
PATIENCE_S = 60.0


@dataclass
class Streamed:
    """What came of one streamed request."""

    status: int
    events: list[Any] = field(default_factory=list)  # JSON, [DONE] left out
    done: bool = False
    comments: int = 0

    @property
    def error(self) -> Any:
        return self.events[-1].get("error") if self.events else None

    def choices(self, index: int) -> list[Any]:
        return [choice for event in self.events for choice in event.get("choices", ()) if choice["index"] == index]

    def text(self, index: int = 0) -> str:
        parts = self.choices(index)
        return "".join(part["text"] if "text" in part else part["delta"].get("content") or "" for part in parts)

    def ends(self, index: int = 0) -> list[str]:
        return [part["finish_reason"] for part in self.choices(index) if part["finish_reason"]]


class Over:
    """A server and a client of it."""

    def __init__(self, url: str, session: aiohttp.ClientSession, metrics: RouterMetrics) -> None:
        self.url = url
        self.session = session
        self.metrics = metrics

    async def ask(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """Status and JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        options.setdefault("headers", {"Content-Type": "application/json"})
        async with self.session.post(self.url + path, data=data, **options) as response:
            return response.status, await response.json(content_type=None)

    async def stream(self, path: str, body: Mapping[str, Any], **options: Any) -> Streamed:
        async with self.session.post(self.url + path, json={**body, "stream": True}, **options) as response:
            streamed = Streamed(response.status)
            if response.content_type != "text/event-stream":
                streamed.events.append(await response.json())
                return streamed
            async for line in response.content:
                text = line.decode().strip()
                if text.startswith(":"):
                    streamed.comments += 1
                elif text == "data: [DONE]":
                    assert not streamed.done
                    streamed.done = True
                elif text:
                    assert not streamed.done, "an event came after [DONE]"
                    streamed.events.append(json.loads(text.removeprefix("data: ")))
            return streamed

    def counted(self, path: str, status: int) -> float:
        """Requests that ended so."""
        labels = {"model_name": NAME, "role": "router", "endpoint": path, "status": str(status)}
        return self.metrics.registry.get_sample_value("kvrelay:http_requests_total", labels) or 0.0


@asynccontextmanager
async def http_over(
    pipeline: DeltaSource, text: TextModel, *, max_model_len: int, deadlines: Deadlines | None = None, **options: Any
) -> AsyncIterator[Over]:
    metrics = RouterMetrics(NAME)
    app = build_app(
        pipeline,
        text,
        model_names=(NAME,),
        max_model_len=max_model_len,
        deadlines=deadlines or Deadlines(),
        ready=lambda: (True, ""),
        metrics=metrics,
        now=time.time,
        **options,
    )
    runner = build_runner(app, shutdown_timeout_s=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
        host, port = runner.addresses[0]
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(PATIENCE_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            yield Over(f"http://{host}:{port}", session, metrics)
    finally:
        async with asyncio.timeout(PATIENCE_S):
            await runner.cleanup()
