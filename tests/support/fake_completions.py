"""A server of the completions API that answers as it is told to, for tests of clients that measure."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

DONE = b"data: [DONE]\n\n"
REPORT = {"router_queue_s": 0.001, "prefill_queue_s": 0.002, "prefill_s": 0.004}


def event(**chunk: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [], **chunk}).encode() + b"\n\n"


def token(text: str = "x") -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": None}])


def usage(completion: int, cached: int = 0, report: Any = None) -> bytes:
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    kvrelay = {"kvrelay": report} if report else {}
    return event(usage={"prompt_tokens": 4, "completion_tokens": completion, **details}, **kvrelay)


def answer(tokens: int, report: Any = None) -> list[bytes]:
    """A whole one, an event a token."""
    return [*(token() for _ in range(tokens)), usage(tokens, report=report), DONE]


class FakeCompletions:
    """`events` makes an answer from a request's body; `status` refuses all."""

    def __init__(self, events: Callable[[dict], Sequence[bytes]]) -> None:
        self.events = events
        self.status = 200
        self.pause_s = 0.0  # before each event
        self.max_model_len: int | None = None  # not told
        self.url = ""
        self.bodies: list[dict] = []
        self.running = self.most_running = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        if self.status != 200:
            return web.json_response({"error": {"message": "no room"}}, status=self.status)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        response = web.StreamResponse()
        await response.prepare(request)
        for data in self.events(self.bodies[-1]):
            await asyncio.sleep(self.pause_s)
            await response.write(data)
        self.running -= 1
        return response

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "max_model_len": self.max_model_len}]})


@asynccontextmanager
async def serving(events: Callable[[dict], Sequence[bytes]]) -> AsyncIterator[FakeCompletions]:
    """A FakeCompletions that listens at `url`."""
    fake = FakeCompletions(events)
    app = web.Application()
    app.add_routes([web.post("/v1/completions", fake.complete), web.get("/v1/models", fake.models)])
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield fake
    finally:
        await runner.cleanup()
