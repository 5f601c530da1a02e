"""Who may call: API keys, and which pages of other origins browsers let call (CORS)."""

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Collection

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from common.errors import Unauthorized

OPEN_PATHS = ("/health", "/ready", "/metrics")  # of probes and scrapers
PREFLIGHT_S = 3600  # a browser may remember the answer for so long
EXPOSED = "X-Request-Id, Server-Timing, Retry-After"

OnPrepare = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


def require_key(keys: Collection[str]) -> Middleware:
    """Every path but OPEN_PATHS needs `Authorization: Bearer KEY` with one of the keys; without keys none does.

    Digests are compared, all of them and in constant time: how long it takes tells nothing about a key.
    """
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if digests and request.path not in OPEN_PATHS:
            scheme, _, key = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
            given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
            matches = [hmac.compare_digest(digest, given) for digest in digests]
            if scheme.lower() != "bearer" or not any(matches):
                raise Unauthorized("an API key is required: Authorization: Bearer KEY")
        return await handler(request)

    return middleware


def answer_preflight(origins: Collection[str]) -> Middleware:
    """Answers what browsers ask before they call from another origin; they show no key with it."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        asks = request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if not (asks and _allowed(request, origins)):
            return await handler(request)
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST, OPTIONS",
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "*"),
            hdrs.ACCESS_CONTROL_MAX_AGE: str(PREFLIGHT_S),
        }
        return web.Response(status=204, headers=headers)

    return middleware


def allow_origins(origins: Collection[str]) -> OnPrepare:
    """For app.on_response_prepare, so that errors and streams have it too."""

    async def on_prepare(request: web.Request, response: web.StreamResponse) -> None:
        if origins:
            response.headers[hdrs.VARY] = hdrs.ORIGIN
        if _allowed(request, origins):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = request.headers[hdrs.ORIGIN]
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = EXPOSED

    return on_prepare


def _allowed(request: web.Request, origins: Collection[str]) -> bool:
    origin = request.headers.get(hdrs.ORIGIN)
    return origin is not None and ("*" in origins or origin in origins)
