"""A server of the HTTP API over real sockets, with a fake pipeline below, and a client of it."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from common.deadlines import Deadlines
from common.sampling import Logprob
from common.text.detokenize import Reading
from common.text.text_model import TextModel
from router.app import CONNECTIONS, build_app, build_runner
from router.metrics import RouterMetrics
from router.pipeline.generation import Delta, TokenText
from tests.support.fakes import FakePipeline

MODEL = "org/tiny"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": MODEL, "prompt": "hello"}
BOTH = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
PATIENCE_S = 20.0  # of every wait here


def reading(token_id: int) -> Reading:
    return Reading(f"<{token_id}>", f"<{token_id}>".encode())


def token(token_id: int = 5, *top: tuple[int, float], logprob: float = -0.5) -> TokenText:
    entries = [(token_id, logprob), *top]
    logprobs = tuple(Logprob(one, value, rank + 1) for rank, (one, value) in enumerate(entries))
    return TokenText(token_id, logprobs, tuple(reading(one) for one, _ in entries))


def delta(text: str = "x", index: int = 0, **more: Any) -> Delta:
    return Delta(index, text, **{"tokens": (token(),), **more})


HELLO = (delta("Hel"), delta("lo"), delta("", finish_reason="stop", stop_reason="END"))


class Served:
    """A server with a fake pipeline, and a client of it."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, pipeline: FakePipeline, metrics: RouterMetrics
    ) -> None:
        self.url = url
        self.session = session
        self.pipeline = pipeline
        self.metrics = metrics
        self.guards: dict[Any, Any] = {}  # of the open connections

    async def post(self, path: str, body: Any, **options: Any) -> tuple[aiohttp.ClientResponse, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, **options) as response:
            return response, json.loads(await response.read())

    async def get(self, path: str, **options: Any) -> tuple[aiohttp.ClientResponse, Any]:
        async with self.session.get(self.url + path, **options) as response:
            raw = await response.text()
            return response, json.loads(raw) if response.content_type == "application/json" else raw

    async def stream(self, path: str, body: Any, **options: Any) -> tuple[aiohttp.ClientResponse, list[str]]:
        """The lines of all events, without blank ones."""
        async with self.session.post(self.url + path, json={**body, "stream": True}, **options) as response:
            return response, [line for line in (await response.text()).split("\n\n") if line]


@asynccontextmanager
async def serve(
    text: TextModel,
    *steps: Any,
    pipeline: FakePipeline | None = None,
    ready: Callable[[], tuple[bool, str]] = lambda: (True, ""),
    deadlines: Deadlines | None = None,
    tls: ssl.SSLContext | None = None,
    model_names: Sequence[str] = (MODEL,),
    **options: Any,
) -> AsyncIterator[Served]:
    pipeline = pipeline or FakePipeline(*steps)
    metrics = RouterMetrics(MODEL)
    app = build_app(
        pipeline,
        text,
        model_names=model_names,
        max_model_len=128,
        deadlines=deadlines or Deadlines(),
        ready=ready,
        metrics=metrics,
        now=lambda: 1700000000.9,
        **options,
    )
    runner = build_runner(app, shutdown_timeout_s=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    host, port = runner.addresses[0]
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_S)) as session:
            served = Served(f"{'https' if tls else 'http'}://{host}:{port}", session, pipeline, metrics)
            served.guards = app[CONNECTIONS].guards
            yield served
    finally:
        await runner.cleanup()
    assert not pipeline.running


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def data_of(events: list[str]) -> list[Any]:
    """The events' JSON, [DONE] left out."""
    return [json.loads(event.removeprefix("data: ")) for event in events if event != "data: [DONE]"]


LOGPROBS = (
    delta("a", tokens=(token(7, (8, -1.0), (9, float("-inf")), logprob=-0.25),)),
    delta("", tokens=(token(8, (7, -0.125), (9, -3.0), logprob=float("-inf")),)),
    delta("bc", tokens=(token(9, (8, -2.0), (7, -4.0)), token(7, (8, -2.0), (9, -4.0))), finish_reason="length"),
)
