"""The OpenAI HTTP API: checks requests, hands them to the pipeline, and writes what comes of them.

Status and headers go out with the first delta, or with the first keep-alive where that takes long: until then a
failure is an HTTP status, after it an error event. A client that leaves closes its generations at once.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from aiohttp import web

from common.deadlines import Deadlines
from common.errors import Cancelled, KVRelayError, RequestTimeout
from common.text.text_model import TextModel
from router.config import RequestLimits
from router.http.access import allow_origins, answer_preflight, require_key
from router.http.bodies import INLINE, Bodies, largest_body
from router.http.error_replies import CLIENT_LEFT, add_request_id, errors_as_json, json_reply, known_error
from router.http.openapi import describe
from router.http.pages import ModelCard, Pages
from router.http.server import ClientConnections, make_runner, tell_guards
from router.http.sse import ClientGone, EventStream
from router.metrics import RouterMetrics
from router.openai.replies import ErrorBody, server_timing
from router.openai.reply_builder import ChatReply, CompletionReply, Reply
from router.openai.request_builder import RequestBuilder
from router.openai.requests import ChatRequest, CompletionRequest, Request
from router.openai.strict_json import parse
from router.openai.tokenize import DetokenizeRequest, TokenizeRequest, Tokenizing
from router.pipeline.echo import echo_alone
from router.pipeline.generation import Delta, Generation, GenerationRequest
from router.pipeline.merge import MergedDeltas

DONE = "[DONE]"
CONNECTIONS = web.AppKey("connections", ClientConnections)
DEADLINES = web.AppKey("deadlines", Deadlines)
LIMITS = web.AppKey("limits", RequestLimits)
Made = TypeVar("Made")


class DeltaSource(Protocol):
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
        pipeline: DeltaSource,
        text: TextModel,
        *,
        model_names: Sequence[str],
        max_model_len: int,
        limits: RequestLimits,
        deadlines: Deadlines,
        now: Callable[[], float],
        bodies: Bodies,
    ) -> None:
        self._pipeline = pipeline
        self._text = text
        self._model_names = model_names
        self._deadlines = deadlines
        self._now = now
        self._bodies = bodies
        self._builder = RequestBuilder(text, max_model_len, model_names, limits)
        self._tokenizing = Tokenizing(text, max_model_len, model_names)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/completions", self._completion),
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
            web.get("/openapi.json", self._openapi),
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
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            error = Cancelled("the generation was cancelled")  # by somebody below
        except Exception as caught:
            if not events.started:
                raise
            error = known_error(caught)
        if not events.started:
            raise error
        await events.fail(ErrorBody.of(error).model_dump_json(), self._deadlines.rpc_s)
        return events.response

    async def _generate(self, http: web.Request, endpoint: Endpoint, events: EventStream) -> web.StreamResponse:
        request, wanted = await self._with_body(http, lambda body: self._prepare(endpoint, body))
        generations = [Generation(one) for one in wanted]
        options = request.stream_options
        with_usage = options is not None and options.include_usage
        with_report = http.headers.get("X-KVRelay-Report") == "1"
        reply = endpoint.reply(
            request, generations, self._text, request.model or self._model_names[0], int(self._now())
        )
        scored = any(one.request.params.prompt_logprobs is not None for one in generations)  # chunks may be huge
        huge = scored or request.top_count is not None
        async with self._running(generations) as deltas:
            if not request.stream:
                async for item in deltas:
                    reply.add(*item)
                whole = await asyncio.to_thread(reply.whole, with_report) if huge else reply.whole(with_report)
                return json_reply(whole, headers=server_timing([one.report for one in generations]))
            async with events.kept_alive(self._deadlines.keepalive_s):
                async for item in deltas:
                    if not events.started:
                        await events.start(server_timing([one.report for one in generations]))
                    await events.send(await asyncio.to_thread(reply.chunks, *item) if scored else reply.chunks(*item))
        last = [reply.last_chunk(with_report)] if with_usage or with_report else []
        await events.send([*last, DONE])
        return events.response

    @asynccontextmanager
    async def _running(self, generations: Sequence[Generation]) -> AsyncIterator[AsyncIterator[tuple[int, Delta]]]:
        """Runs them while it is entered: (number of the generation, delta) as they come. A chat has one generation."""
        sources = [self._deltas(one) for one in generations]
        if len(sources) > 1:
            async with MergedDeltas(sources) as merged:
                yield merged.items()
        else:
            async with aclosing(sources[0]) as source, aclosing((0, delta) async for delta in source) as numbered:
                yield numbered

    def _deltas(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        deltas = self._pipeline.generate(generation)
        return echo_alone(generation, deltas) if generation.request.echo_only else deltas

    async def _with_body(self, http: web.Request, make: Callable[[bytes], Made]) -> Made:
        """What is made of the body; where that may take long, others are served meanwhile."""
        async with self._bodies.received(http) as body:
            return await self._bodies.make(make, body) if len(body) > INLINE else make(body)

    def _prepare(self, endpoint: Endpoint, body: bytes) -> tuple[Request, list[GenerationRequest]]:
        """Everything that depends on the request alone; may run in any thread."""
        request = parse(endpoint.request, body)
        return request, endpoint.build(self._builder, request)

    async def _tokenize(self, http: web.Request) -> web.Response:
        return json_reply(await self._with_body(http, self._tokenized))

    async def _detokenize(self, http: web.Request) -> web.Response:
        return json_reply(await self._with_body(http, self._detokenized))

    def _tokenized(self, body: bytes) -> str:
        return self._tokenizing.tokenize(parse(TokenizeRequest, body)).model_dump_json()

    def _detokenized(self, body: bytes) -> str:
        return self._tokenizing.detokenize(parse(DetokenizeRequest, body)).model_dump_json()

    async def _openapi(self, _: web.Request) -> web.Response:
        return json_reply(describe(*self._model_names))


def build_app(
    pipeline: DeltaSource,
    text: TextModel,
    *,
    model_names: Sequence[str],
    max_model_len: int,
    deadlines: Deadlines,
    ready: Callable[[], tuple[bool, str]],
    metrics: RouterMetrics,
    now: Callable[[], float] = time.time,
    limits: RequestLimits | None = None,
    api_keys: Collection[str] = (),
    allowed_origins: Collection[str] = (),
) -> web.Application:
    """The application, of one model with these names. `ready` says whether workers could serve it, or why not."""
    limits = limits or RequestLimits()
    max_body_size = limits.max_body_size or largest_body(max_model_len)
    bodies = Bodies(max_body_size, max_model_len, deadlines.http_body_s)
    cards = [ModelCard(id=name, created=int(now()), max_model_len=max_model_len) for name in model_names]
    pages = Pages(cards, ready, metrics)
    api = Api(
        pipeline,
        text,
        model_names=model_names,
        max_model_len=max_model_len,
        limits=limits,
        deadlines=deadlines,
        now=now,
        bodies=bodies,
    )
    connections = ClientConnections(deadlines)
    middlewares = [
        tell_guards(connections),
        errors_as_json(metrics),
        answer_preflight(allowed_origins),
        require_key(api_keys),
    ]
    app = web.Application(client_max_size=max_body_size, middlewares=middlewares)
    app.on_cleanup.append(bodies.close)
    app[CONNECTIONS], app[DEADLINES], app[LIMITS] = connections, deadlines, limits
    app.add_routes([*api.routes(), *pages.routes()])
    app.on_response_prepare.append(add_request_id)
    if allowed_origins:
        app.on_response_prepare.append(allow_origins(allowed_origins))
    return app


def build_runner(app: web.Application, shutdown_timeout_s: float) -> web.AppRunner:
    """Serves the app; a handler whose client leaves is cancelled, which is what closes its generations.

    Its cleanup() takes no new connection and gives the answers that run so many seconds to end.
    """
    return make_runner(app, app[CONNECTIONS], app[DEADLINES], app[LIMITS], shutdown_timeout_s)
