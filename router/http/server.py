"""Connections of the HTTP API. A client that sends a request slowly is cut off, before it or with a 408."""

import asyncio
import logging
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from common.deadlines import Deadlines
from common.errors import InvalidRequest, KVRelayError, SlowClient
from common.log import get_logger, log_event
from router.config import RequestLimits
from router.http.error_replies import http_error, json_reply, name_request
from router.openai.replies import ErrorBody

log = get_logger("http")


class ClientConnections:
    """The guards of all open connections, by aiohttp's protocol of each."""

    def __init__(self, deadlines: Deadlines) -> None:
        self.header_s = deadlines.http_header_s
        self.grace_s = min(deadlines.http_grace_s, self.header_s)
        self.guards: dict[asyncio.Protocol, ConnectionGuard] = {}


class ConnectionGuard(asyncio.Protocol):
    """Stands between a socket and aiohttp's protocol, which has no time limit for a request's headers."""

    def __init__(self, inner: asyncio.Protocol, connections: ClientConnections) -> None:
        self._inner = inner
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard = False
        self._busy = False  # a request is being answered

    def begin(self) -> None:
        """The headers are here."""
        self._busy = True
        self._stop_timer()

    def end(self) -> None:
        """The request is answered; the next one's time begins with its first byte."""
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._connections.guards[self._inner] = self
        self._start_timer()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        if not self._busy and self._timer is None:
            self._start_timer()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        del self._connections.guards[self._inner]
        self._inner.connection_lost(exc)

    def _start_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._connections.header_s, self._wait_a_little)

    def _wait_a_little(self) -> None:
        """After the loop was busy elsewhere the headers may be here, and not looked at yet."""
        self._timer = asyncio.get_running_loop().call_later(self._connections.grace_s, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._heard:  # else it was opened in advance, and nobody waits for a word
            self._transport.write(_too_slow(self._connections.header_s))
        self._transport.close()


class HttpProtocol(web.RequestHandler):
    """Refuses what is no proper HTTP without quoting it: aiohttp's page and log would show keys and prompts."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the reply has begun")
        if status < 500:
            error: KVRelayError = InvalidRequest(f"this is no proper HTTP request ({type(exc).__name__})")
            log_event(log, logging.INFO, "bad HTTP", status=status, kind=type(exc).__name__)
        else:
            error = KVRelayError("internal error")
            log_event(log, logging.ERROR, "request failed", exc_info=exc)
        response = json_reply(ErrorBody.of(error).model_dump_json(), status)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Sends a reply; also those of aiohttp's that no middleware has seen, as to an unknown Expect header."""
        if isinstance(resp, web.HTTPException):
            name_request(request)
            resp = http_error(request, resp)
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: Any, **more: Any) -> None:
        """But for the rest of a body that can't be read: its reply has said so, and anybody can send one."""
        if not isinstance(more.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **more)


class GuardedRunner(web.AppRunner):
    """Its sites guard their connections, each of which gets the protocol options."""

    def __init__(
        self, app: web.Application, connections: ClientConnections, protocol_options: dict[str, Any], **options: Any
    ) -> None:
        super().__init__(app, **options)
        self._connections = connections
        self._protocol_options = protocol_options

    @property
    def server(self) -> Any:
        """What sites make a protocol with for each connection."""
        manager = super().server
        return None if manager is None else lambda: ConnectionGuard(self._protocol(manager), self._connections)

    def _protocol(self, manager: web.Server) -> HttpProtocol:
        return HttpProtocol(manager, loop=asyncio.get_running_loop(), **self._protocol_options)


def tell_guards(connections: ClientConnections) -> Middleware:
    """Tells each connection's guard when a request's headers are here and when it is answered."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        guard = connections.guards.get(request.protocol)
        if guard is None:  # served without guards, or lost
            return await handler(request)
        guard.begin()
        try:
            return await handler(request)
        finally:
            guard.end()

    return middleware


def make_runner(
    app: web.Application,
    connections: ClientConnections,
    deadlines: Deadlines,
    limits: RequestLimits,
    shutdown_timeout_s: float,
) -> web.AppRunner:
    """A handler whose client leaves is cancelled, which is what closes its generations."""
    return GuardedRunner(
        app,
        connections,
        {
            "keepalive_timeout": deadlines.http_idle_s,
            "lingering_time": deadlines.http_linger_s,
            "access_log": None,
            "max_line_size": limits.max_header_size,
            "max_field_size": limits.max_header_size,
            "max_headers": limits.max_header_count,
        },
        handler_cancellation=True,
        shutdown_timeout=shutdown_timeout_s,
    )


def _too_slow(header_s: float) -> bytes:
    body = ErrorBody.of(SlowClient(f"the headers did not arrive within {header_s:g} s")).model_dump_json().encode()
    head = (
        "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
