"""The OpenAI HTTP API: checks requests, hands them to the pipeline, and writes what comes of them.

Status and headers go out with the first delta, or with the first keep-alive where that takes long: until then a
failure is an HTTP status, after it an error event. A client that leaves closes its generations at once.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

from common.deadlines import Deadlines
from common.errors import InvalidRequest, KVRelayError, ModelNotFound, RequestTimeout
from common.metrics import RouterMetrics, metrics_response
from router.generation import Delta, Generation, GenerationRequest
from router.http_errors import CLIENT_LEFT, add_request_id, errors_as_json, json_reply, known_error
from router.merge import MergedDeltas
from router.openai import ChatRequest, CompletionRequest, Request
from router.params import RequestBuilder
from router.replies import ErrorBody
from router.reply_builder import ChatReply, CompletionReply, Reply
from router.sse import ClientGone, EventStream
from router.text import TextModel
from router.wire import cut, parse

MAX_BODY = 64 * 2**20  # bytes
INLINE_BODY = 32 * 2**10  # bytes; larger ones are parsed and tokenized in a thread
DONE = "[DONE]"


class Pipeline(Protocol):
    """What runs a generation; closing the generator ends its work on all workers."""

    def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]: ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One of the two ways to ask for text."""

    request: type[Request]
    build: Callable[[RequestBuilder, Any], list[GenerationRequest]]  # takes what `request` has parsed
    reply: type[Reply[Any]]


CHAT = Endpoint(ChatRequest, RequestBuilder.chat, ChatReply)
COMPLETION = Endpoint(CompletionRequest, RequestBuilder.completion, CompletionReply)


class Api:
    """The handlers of one served model."""

    def __init__(
        self,
        pipeline: Pipeline,
        text: TextModel,
        *,
        model_name: str,
        max_model_len: int,
        deadlines: Deadlines,
        ready: Callable[[], tuple[bool, str]],
        metrics: RouterMetrics,
        now: Callable[[], float],
    ) -> None:
        self._pipeline = pipeline
        self._text = text
        self._model_name = model_name
        self._max_model_len = max_model_len
        self._deadlines = deadlines
        self._ready = ready
        self._metrics = metrics
        self._now = now
        self._started_at = int(now())
        self._builder = RequestBuilder(text, max_model_len)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/completions", self._completion),
            web.get("/v1/models", self._models),
            web.get("/v1/models/{model:.+}", self._model),
            web.get("/health", self._health),
            web.get("/ready", self._readiness),
            web.get("/metrics", self._metrics_page),
        ]

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, CHAT)

    async def _completion(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, COMPLETION)

    async def _answer(self, http: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        """Steps 1, 2 and 8 of a request's way; the time limit here is for clients that don't read."""
        events = EventStream(http)
        try:
            async with asyncio.timeout(self._deadlines.request_s + self._deadlines.rpc_s):
                return await self._generate(http, endpoint, events)
        except web.HTTPException:
            raise
        except ClientGone:
            return events.response if events.started else web.Response(status=CLIENT_LEFT)
        except TimeoutError:
            error: KVRelayError = RequestTimeout(f"the request took more than {self._deadlines.request_s:g} s")
        except Exception as caught:
            error = known_error(caught)
        if not events.started:
            raise error
        await events.fail(ErrorBody.of(error).model_dump_json(), self._deadlines.rpc_s)
        return events.response

    async def _generate(self, http: web.Request, endpoint: Endpoint, events: EventStream) -> web.StreamResponse:
        body = await _read(http)
        if len(body) > INLINE_BODY:
            request, wanted = await asyncio.to_thread(self._prepare, endpoint, body)
        else:
            request, wanted = self._prepare(endpoint, body)
        del body
        generations = [Generation(one) for one in wanted]
        options = request.stream_options
        with_usage = options is not None and options.include_usage
        with_report = http.headers.get("X-KVRelay-Report") == "1"
        reply = endpoint.reply(
            generations,
            self._text,
            self._model_name,
            int(self._now()),
            usage_in_chunks=options is not None and with_usage and options.continuous_usage_stats,
        )
        async with MergedDeltas([self._pipeline.generate(one) for one in generations]) as deltas:
            if not request.stream:
                async for item in deltas.items(None):
                    if item is not None:
                        reply.add(*item)
                return json_reply(reply.whole(with_report), headers=_server_timing(generations))
            async for item in deltas.items(self._deadlines.keepalive_s):
                if not events.started:
                    await events.start({} if item is None else _server_timing(generations))
                if item is None:
                    await events.keep_alive()
                else:
                    await events.send(reply.chunks(*item))
        last = [reply.last_chunk(with_report)] if with_usage or with_report else []
        await events.send([*last, DONE])
        return events.response

    def _prepare(self, endpoint: Endpoint, body: bytes) -> tuple[Request, list[GenerationRequest]]:
        """Everything that depends on the request alone; may run in any thread."""
        request = parse(endpoint.request, body)
        self._check_model(request.model)
        return request, endpoint.build(self._builder, request)

    def _check_model(self, name: str) -> None:
        if name != self._model_name:
            raise ModelNotFound(f"the model {cut(name)} does not exist; there is {self._model_name}", field="model")

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._card()]})

    async def _model(self, http: web.Request) -> web.Response:
        self._check_model(http.match_info["model"])
        return web.json_response(self._card())

    def _card(self) -> dict[str, str | int]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "kvrelay",
            "max_model_len": self._max_model_len,
        }

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _readiness(self, _: web.Request) -> web.Response:
        ready, reason = self._ready()
        return web.json_response({"ready": ready, "reason": reason}, status=200 if ready else 503)

    async def _metrics_page(self, http: web.Request) -> web.Response:
        return metrics_response(self._metrics.registry, http.headers.get("Accept", ""))


def build_app(
    pipeline: Pipeline,
    text: TextModel,
    *,
    model_name: str,
    max_model_len: int,
    deadlines: Deadlines,
    ready: Callable[[], tuple[bool, str]],
    metrics: RouterMetrics,
    now: Callable[[], float] = time.time,
    max_body: int = MAX_BODY,
) -> web.Application:
    """The application. `ready` says whether workers could serve a request now and, where not, why."""
    api = Api(
        pipeline,
        text,
        model_name=model_name,
        max_model_len=max_model_len,
        deadlines=deadlines,
        ready=ready,
        metrics=metrics,
        now=now,
    )
    app = web.Application(client_max_size=max_body, middlewares=[errors_as_json(metrics)])
    app.add_routes(api.routes())
    app.on_response_prepare.append(add_request_id)
    return app


def build_runner(app: web.Application, shutdown_timeout_s: float) -> web.AppRunner:
    """Serves the app; a handler whose client leaves is cancelled, which is what closes its generations.

    Its cleanup() takes no new connection and gives the answers that run so many seconds to end.
    """
    return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout_s)


async def _read(http: web.Request) -> bytes:
    try:
        return await http.read()
    except web.RequestPayloadError as error:  # its chunks or its compression are broken
        raise InvalidRequest(f"the body can't be read: {cut(str(error))}") from error
    except ConnectionError as error:
        raise ClientGone from error


def _server_timing(generations: Sequence[Generation]) -> dict[str, str]:
    """Of the prompt that took longest, milliseconds."""
    reports = [one.report for one in generations]
    queue_s = max(report.router_queue_s + report.prefill_queue_s for report in reports)
    prefill_s = max(report.prefill_s for report in reports)
    return {"Server-Timing": f"queue;dur={queue_s * 1e3:.1f}, prefill;dur={prefill_s * 1e3:.1f}"}
