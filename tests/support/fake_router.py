"""An HTTP server that answers chats as it is told to, for tests of the clients."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


def event(text: str | None = None, finish_reason: str | None = None, **more) -> bytes:
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class FakeRouter:
    """Answers every chat with the bytes in `events`, or those of each of `turns`, or else echoes the last message."""

    def __init__(self) -> None:
        self.events: list[bytes] | None = None
        self.turns: list[list[bytes]] = []
        self.url = ""
        self.refusal: web.Response | None = None
        self.hang = False  # after its events
        self.closing = asyncio.Event()
        self.requests: list[dict] = []
        self.headers: list[dict] = []

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.headers.append(dict(request.headers))
        if self.refusal is not None:
            return self.refusal
        response = web.StreamResponse()
        await response.prepare(request)
        events = self.turns.pop(0) if self.turns else self.events
        if events is None:
            events = [event(f"echo {self.requests[-1]['messages'][-1]['content']}", "stop"), DONE]
        for data in events:
            await response.write(data)
        if self.hang:
            await self.closing.wait()
        return response


@asynccontextmanager
async def running_router(tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeRouter]:
    """A FakeRouter that listens at `url`."""
    fake = FakeRouter()
    app = web.Application()
    app.add_routes([web.get("/v1/models", fake.models), web.post("/v1/chat/completions", fake.chat)])
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        fake.url = f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
        yield fake
    finally:
        fake.closing.set()
        await runner.cleanup()
