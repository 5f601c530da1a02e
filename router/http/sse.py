"""Server-sent events over one HTTP response."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from common.tasks import end

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a proxy in between passes each event on at once
}


class ClientGone(Exception):
    """Nobody reads any more."""


class EventStream:
    """Until `start` the request can still get an HTTP error; after it all there is are events."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=HEADERS)
        self._blocked = False  # a write has not come to its end
        self._starting = asyncio.Lock()
        self._last_s = 0.0  # that something was written at, on the loop's clock

    @property
    def started(self) -> bool:
        return self.response.prepared

    async def start(self, headers: Mapping[str, str]) -> None:
        """Sends status and headers, unless they are sent. Raises ClientGone."""
        async with self._starting:
            if self.started:
                return
            self.response.headers.update(headers)
            try:
                await self.response.prepare(self._request)
            except ConnectionError as error:
                raise ClientGone from error

    async def send(self, data: Iterable[str]) -> None:
        """An event for each; none of them has a line break. Waits for a slow client. Raises ClientGone."""
        await self._write("".join(f"data: {text}\n\n" for text in data))

    @asynccontextmanager
    async def kept_alive(self, every_s: float) -> AsyncIterator[None]:
        """Meanwhile a comment goes out whenever nothing has for so long: clients skip it, proxies take it for life."""
        beating = asyncio.create_task(self._beat(every_s))
        try:
            yield
        finally:
            await end(beating)

    async def fail(self, data: str, patience_s: float) -> None:
        """A last event; a client that does not take it in time, or has not taken an earlier one, is cut off."""
        try:
            if self._blocked:
                raise ClientGone
            async with asyncio.timeout(patience_s):
                await self.send([data])
                await self.response.write_eof()
        except (TimeoutError, ClientGone, ConnectionError):
            if self._request.transport is not None:
                self._request.transport.abort()

    async def _beat(self, every_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._last_s = loop.time()
        with suppress(ClientGone):  # whoever writes next finds out
            while True:
                left_s = self._last_s + every_s - loop.time()
                if left_s > 0 or self._blocked:
                    await asyncio.sleep(left_s if left_s > 0 else every_s)
                else:
                    await self.start({})
                    await self._write(": keep-alive\n\n")

    async def _write(self, text: str) -> None:
        if not text:
            return
        self._last_s = asyncio.get_running_loop().time()
        self._blocked = True
        try:
            await self.response.write(text.encode())
        except ConnectionError as error:
            raise ClientGone from error
        self._blocked = False
