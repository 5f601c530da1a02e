"""The HTTP API keeps OpenAI's forms over real sockets, and a client that leaves leaves nothing running."""

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from fakes import FakePipeline
from tiny_text import model_directory

from common.deadlines import Deadlines
from common.engine.batch import Logprob
from common.errors import (
    ContextLengthExceeded,
    Draining,
    EngineFailure,
    InvalidRequest,
    KVExpired,
    KVRelayError,
    NoWorker,
    Overloaded,
    RequestTimeout,
    Timeout,
)
from common.metrics import RouterMetrics
from router.app import build_app, build_runner
from router.generation import Delta, GenerationRequest, TokenText
from router.text import TextModel

MODEL = "org/tiny"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": MODEL, "prompt": "hello"}
BOTH = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
PATIENCE_S = 20.0  # of every wait here


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(model_directory(tmp_path_factory.mktemp("model")))


def token(token_id: int = 5, *top: tuple[int, float], logprob: float = -0.5) -> TokenText:
    entries = [(token_id, logprob), *top]
    return TokenText(token_id, tuple(Logprob(one, value, rank + 1) for rank, (one, value) in enumerate(entries)))


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
    **options: Any,
) -> AsyncIterator[Served]:
    pipeline = pipeline or FakePipeline(*steps)
    metrics = RouterMetrics(MODEL)
    app = build_app(
        pipeline,
        text,
        model_name=MODEL,
        max_model_len=128,
        deadlines=deadlines or Deadlines(),
        ready=ready,
        metrics=metrics,
        now=lambda: 1700000000.9,
        **options,
    )
    runner = build_runner(app, shutdown_timeout_s=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_S)) as session:
            yield Served(f"http://{host}:{port}", session, pipeline, metrics)
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


def usage(prompt: int, completion: int, cached: int = 1) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    total = prompt + completion
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": total,
        "prompt_tokens_details": details,
    }


class TestWhole:
    async def test_chat(self, text: TextModel) -> None:
        async with serve(text, *HELLO) as served:
            response, body = await served.post("/v1/chat/completions", CHAT)
            (request,) = served.pipeline.requests
        assert (response.status, response.content_type) == (200, "application/json")
        assert body == {
            "id": f"chatcmpl-{request.request_id}",
            "object": "chat.completion",
            "created": 1700000000,
            "model": MODEL,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Hello"},
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": "END",
                }
            ],
            "usage": usage(len(request.prompt_ids), 3),
        }
        assert response.headers["Server-Timing"] == "queue;dur=750.0, prefill;dur=1500.0"

    async def test_completion(self, text: TextModel) -> None:
        async with serve(text, *HELLO) as served:
            _, body = await served.post("/v1/completions", COMPLETION)
            (request,) = served.pipeline.requests
        assert request.prompt_ids == tuple(text.encode("hello"))
        assert body["object"] == "text_completion"
        assert body["choices"] == [
            {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop", "stop_reason": "END"}
        ]

    async def test_prompts_and_n_make_numbered_choices(self, text: TextModel) -> None:
        def script(request: GenerationRequest) -> list[Delta]:
            name = str(request.prompt_ids[0])
            return [delta(f"{name}-{index}", index, finish_reason="length") for index in (2, 0, 1)]

        async with serve(text, pipeline=FakePipeline(script=script)) as served:
            _, body = await served.post("/v1/completions", {**COMPLETION, "prompt": [[7], [8]], "n": 3})
            _, events = await served.stream("/v1/completions", {**COMPLETION, "prompt": [[7], [8]], "n": 3})
        texts = ["7-0", "7-1", "7-2", "8-0", "8-1", "8-2"]
        assert [choice["text"] for choice in body["choices"]] == texts
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        assert body["usage"] == usage(2, 6, cached=2)
        streamed = {choice["index"]: choice["text"] for chunk in data_of(events) for choice in chunk["choices"]}
        assert streamed == dict(enumerate(texts))


class TestStream:
    async def test_chat_is_role_text_finish_done(self, text: TextModel) -> None:
        async with serve(text, *HELLO) as served:
            response, events = await served.stream("/v1/chat/completions", CHAT)
        assert (response.status, response.content_type) == (200, "text/event-stream")
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["Server-Timing"] == "queue;dur=750.0, prefill;dur=1500.0"
        assert events[-1] == "data: [DONE]"
        chunks = data_of(events)
        assert {(chunk["object"], chunk["model"], chunk["created"]) for chunk in chunks} == {
            ("chat.completion.chunk", MODEL, 1700000000)
        }
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert [chunk["choices"] for chunk in chunks] == [
            [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
            [{"index": 0, "delta": {"content": "Hel"}, "logprobs": None, "finish_reason": None}],
            [{"index": 0, "delta": {"content": "lo"}, "logprobs": None, "finish_reason": None}],
            [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": "END"}],
        ]

    async def test_completion_is_text_and_finish(self, text: TextModel) -> None:
        async with serve(text, delta("a"), delta(""), delta("b", finish_reason="length")) as served:
            _, events = await served.stream("/v1/completions", COMPLETION)
        assert [chunk["choices"] for chunk in data_of(events)] == [
            [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}],
            [{"index": 0, "text": "b", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        ]

    @pytest.mark.parametrize(("path", "body"), BOTH)
    async def test_usage_comes_last_and_in_every_chunk_if_asked(
        self, text: TextModel, path: str, body: dict[str, Any]
    ) -> None:
        async with serve(text, *HELLO) as served:
            ask = {**body, "stream_options": {"include_usage": True}}
            _, events = await served.stream(path, ask)
            ask = {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
            _, continuous = await served.stream(path, ask)
            prompt = len(served.pipeline.requests[0].prompt_ids)
        *chunks, last = data_of(events)
        assert (last["choices"], last["usage"]) == ([], usage(prompt, 3))
        assert all("usage" not in chunk for chunk in chunks)
        counts = [chunk["usage"]["completion_tokens"] for chunk in data_of(continuous)]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (1, 3)

    async def test_line_breaks_stay_inside_an_event(self, text: TextModel) -> None:
        nasty = 'a\n\ndata: [DONE]\r\n\u2028"\N{GRINNING FACE}'
        async with serve(text, delta(nasty, finish_reason="stop")) as served:
            _, events = await served.stream("/v1/completions", COMPLETION)
        assert data_of(events)[0]["choices"][0]["text"] == nasty


LOGPROBS = (
    delta("a", tokens=(token(7, (8, -1.0), (9, float("-inf")), logprob=-0.25),)),
    delta("", tokens=(token(8, (7, -0.125), (9, -3.0), logprob=float("-inf")),)),
    delta("bc", tokens=(token(9, (8, -2.0), (7, -4.0)), token(7, (8, -2.0), (9, -4.0))), finish_reason="length"),
)


class TestLogprobs:
    async def test_of_chat_have_bytes_and_are_finite(self, text: TextModel) -> None:
        async with serve(text, *LOGPROBS) as served:
            _, body = await served.post("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2})
        content = body["choices"][0]["logprobs"]["content"]

        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            data = text.token_bytes(token_id)
            return {"token": data.decode(), "logprob": logprob, "bytes": list(data)}

        assert content[0] == {**entry(7, -0.25), "top_logprobs": [entry(8, -1.0), entry(9, -9999.0)]}
        assert content[1] == {**entry(8, -9999.0), "top_logprobs": [entry(7, -0.125), entry(9, -3.0)]}
        assert len(content) == 4

    async def test_of_completions_have_offsets_into_the_text(self, text: TextModel) -> None:
        answer = "größer 東京 \N{GRINNING FACE}!"
        ids = text.encode(answer)
        steps = [delta("", tokens=tuple(map(token, ids))), delta(answer, tokens=(), finish_reason="stop")]
        async with serve(text, *steps) as served:
            _, body = await served.post("/v1/completions", {**COMPLETION, "logprobs": 0})
        logprobs = body["choices"][0]["logprobs"]
        decoder, so_far = text.detokenizer(skip_special_tokens=True), ""
        for token_id, offset in zip(ids, logprobs["text_offset"], strict=True):
            assert offset == len(so_far)
            so_far += decoder.push([token_id])
        assert so_far == answer
        assert logprobs["token_logprobs"] == [-0.5] * len(ids)
        assert logprobs["top_logprobs"] == [{one: -0.5} for one in logprobs["tokens"]]

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
            ("/v1/completions", {**COMPLETION, "logprobs": 2}),
        ],
    )
    async def test_streamed_are_those_of_the_whole(self, text: TextModel, path: str, body: dict[str, Any]) -> None:
        async with serve(text, *LOGPROBS) as served:
            _, whole = await served.post(path, body)
            _, events = await served.stream(path, body)
        joined: dict[str, list[Any]] = {}
        for chunk in data_of(events):
            for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
                joined.setdefault(name, []).extend(values)
        assert joined == whole["choices"][0]["logprobs"]


ERRORS = [
    (InvalidRequest("no good", field="top_p"), 400, "invalid_request_error", "invalid_request"),
    (ContextLengthExceeded("too long", field="messages"), 400, "invalid_request_error", "context_length_exceeded"),
    (Overloaded("full", retry_after_s=2.3), 429, "rate_limit_error", "overloaded"),
    (NoWorker("nobody there"), 503, "server_error", "no_worker"),
    (Draining("going down"), 503, "server_error", "draining"),
    (KVExpired("late"), 503, "server_error", "kv_expired"),
    (RequestTimeout("slow"), 504, "server_error", "request_timeout"),
    (Timeout("slow"), 504, "server_error", "timeout"),
    (EngineFailure("broken"), 500, "server_error", "engine_failure"),
    (KVRelayError("odd"), 500, "server_error", "internal"),
]


class TestErrors:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(("path", "body"), BOTH)
    @pytest.mark.parametrize(
        ("error", "status", "kind", "code"), ERRORS, ids=lambda value: getattr(value, "code", None)
    )
    async def test_before_the_first_delta_are_a_status(
        self,
        text: TextModel,
        path: str,
        body: Any,
        stream: bool,
        error: KVRelayError,
        status: int,
        kind: str,
        code: str,
    ) -> None:
        async with serve(text, error) as served:
            response, reply = await served.post(path, {**body, "stream": stream})
        assert response.status == status
        wanted = {"message": error.message, "type": kind, "param": error.field, "code": code}
        assert reply == {"error": wanted}
        retry = {429: "3", 503: "1"}.get(status) if code != "kv_expired" else None
        assert response.headers.get("Retry-After") == retry

    @pytest.mark.parametrize(("path", "body"), BOTH)
    async def test_after_the_first_delta_are_an_event_and_the_end(self, text: TextModel, path: str, body: Any) -> None:
        async with serve(text, delta("a"), EngineFailure("broken")) as served:
            response, events = await served.stream(path, body)
        assert response.status == 200
        error = {"message": "broken", "type": "server_error", "param": None, "code": "engine_failure"}
        assert json.loads(events[-1].removeprefix("data: ")) == {"error": error}
        assert "data: [DONE]" not in events

    @pytest.mark.parametrize("stream", [False, True])
    async def test_defects_are_logged_and_not_shown(
        self, text: TextModel, stream: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with serve(text, RuntimeError("secret detail")) as served:
            with caplog.at_level(logging.ERROR, "kvrelay"):
                response, body = await served.post("/v1/completions", {**COMPLETION, "stream": stream})
        assert (response.status, body["error"]["message"]) == (500, "internal error")
        assert [record.exc_info is not None for record in caplog.records] == [True]

    async def test_one_prompts_failure_ends_all(self, text: TextModel) -> None:
        forever = asyncio.Event()
        pipeline = FakePipeline(script=lambda request: [NoWorker("gone")] if request.prompt_ids == (8,) else [forever])
        async with serve(text, pipeline=pipeline) as served:
            response, _ = await served.post("/v1/completions", {**COMPLETION, "prompt": [[7], [8], [9]]})
            assert response.status == 503
            assert not pipeline.running

    async def test_cancellation_below_is_an_error_not_a_silence(self, text: TextModel) -> None:
        class Cancelling(FakePipeline):
            async def generate(self, generation: Any) -> Any:
                yield delta("a")
                raise asyncio.CancelledError

        async with serve(text, pipeline=Cancelling()) as served:
            _, events = await served.stream("/v1/completions", COMPLETION)
        assert data_of(events)[-1]["error"]["code"] == "cancelled"

    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [
            ("GET", "/v1/chat/completions", 405),
            ("DELETE", "/v1/models", 405),
            ("POST", "/health", 405),
            ("GET", "/", 404),
            ("POST", "/v1/embeddings", 404),
            ("GET", "/" + "x" * 2000, 404),
            ("GET", "/v1/models/other", 404),
        ],
    )
    async def test_wrong_path_or_method(self, text: TextModel, method: str, path: str, status: int) -> None:
        async with serve(text) as served, served.session.request(method, served.url + path) as response:
            body = await response.json()
            assert response.status == status
            assert set(body["error"]) == {"message", "type", "param", "code"}
            assert len(body["error"]["message"]) < 500
            assert ("Allow" in response.headers) == (status == 405)

    async def test_unknown_model(self, text: TextModel) -> None:
        async with serve(text) as served:
            response, body = await served.post("/v1/completions", {**COMPLETION, "model": "x" * 1000})
        assert (response.status, body["error"]["param"], body["error"]["code"]) == (404, "model", "model_not_found")
        assert len(body["error"]["message"]) < 500

    @pytest.mark.parametrize("size", [99, 100, 101, 100_000])
    async def test_body_has_a_limit(self, text: TextModel, size: int) -> None:
        async with serve(text, max_body=100) as served:
            response, body = await served.post("/v1/completions", b" " * size)
        assert response.status == (413 if size > 100 else 400)
        assert body["error"]["type"] == "invalid_request_error"

    @pytest.mark.parametrize("size", [10, 100_000], ids=["inline", "in a thread"])
    async def test_wrong_field_is_named(self, text: TextModel, size: int) -> None:
        body = {**CHAT, "user": "x" * size, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
        async with serve(text) as served:
            response, reply = await served.post("/v1/chat/completions", body)
        assert (response.status, reply["error"]["param"]) == (400, "messages[0].content[0]")

    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff"])
    async def test_malformed_json(self, text: TextModel, body: bytes) -> None:
        async with serve(text) as served:
            response, reply = await served.post("/v1/chat/completions", body)
        assert (response.status, reply["error"]["code"]) == (400, "invalid_request")

    async def test_broken_compression_is_the_clients_fault(self, text: TextModel) -> None:
        async with serve(text) as served:
            headers = {"Content-Encoding": "gzip"}
            async with served.session.post(
                served.url + "/v1/completions", data=b"no gzip", headers=headers, compress=None
            ) as response:
                assert response.status == 400


class TestKeepAlive:
    async def test_comments_come_while_nothing_else_does(self, text: TextModel) -> None:
        go_on = asyncio.Event()
        deadlines = Deadlines(keepalive_s=0.01)
        async with (
            serve(text, go_on, *HELLO, deadlines=deadlines) as served,
            served.session.post(served.url + "/v1/chat/completions", json={**CHAT, "stream": True}) as response,
        ):
            assert response.status == 200
            assert "Server-Timing" not in response.headers
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            go_on.set()
            rest = (await response.read()).decode()
        events = [event for event in rest.split("\n\n") if event and event != ": keep-alive"]
        assert len(data_of(events)) == 4
        assert events[-1] == "data: [DONE]"

    async def test_a_failure_after_one_is_an_event(self, text: TextModel) -> None:
        deadlines = Deadlines(keepalive_s=0.01)
        async with serve(text, 0.05, NoWorker("nobody there"), deadlines=deadlines) as served:
            response, events = await served.stream("/v1/chat/completions", CHAT)
        assert (response.status, events[0]) == (200, ": keep-alive")
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "no_worker"

    async def test_pipelines_own_timeout_is_no_keep_alive(self, text: TextModel) -> None:
        async with serve(text, delta("a"), TimeoutError()) as served:
            _, events = await served.stream("/v1/completions", COMPLETION)
        assert "error" in data_of(events)[-1]


class TestClientsThatLeave:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("steps", [0, 1])
    @pytest.mark.parametrize("prompts", [1, 3])
    async def test_leave_nothing_running(self, text: TextModel, stream: bool, steps: int, prompts: int) -> None:
        forever = asyncio.Event()
        pipeline = FakePipeline(*[delta("a")] * steps, forever)
        async with serve(text, pipeline=pipeline) as served:
            body = {**COMPLETION, "prompt": [[5]] * prompts, "stream": stream}
            post = asyncio.create_task(served.session.post(served.url + "/v1/completions", json=body))
            await eventually(lambda: len(pipeline.running) == prompts and pipeline.yielded == steps * prompts)
            if stream and steps:
                (await post).close()
            else:
                post.cancel()
            await eventually(lambda: not pipeline.running)
            counted = served.metrics.registry.get_sample_value
            labels = {"model_name": MODEL, "role": "router", "endpoint": "/v1/completions", "status": "499"}
            await eventually(lambda: counted("kvrelay:http_requests_total", labels) == 1)

    async def test_do_so_in_the_middle_of_a_body(self, text: TextModel, caplog: pytest.LogCaptureFixture) -> None:
        async with serve(text) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            response, _ = await served.get("/health")
            assert response.status == 200
        assert not reader.at_eof() or not caplog.records


class TestSlowClients:
    BODY = json.dumps({**COMPLETION, "stream": True}).encode()
    HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY)

    async def test_wait_alone_and_hold_little(self, text: TextModel) -> None:
        endless = FakePipeline(*[delta("x" * 10_000)] * 10_000, delta("", finish_reason="stop"))
        async with serve(text, pipeline=endless) as served:
            _, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]), limit=2**10)
            writer.write(self.HEAD + self.BODY)
            await eventually(lambda: endless.yielded > 10)
            before = -1
            while endless.yielded != before:  # until its buffers are full
                before = endless.yielded
                await asyncio.sleep(0.1)
            assert before < 5_000
            response, _ = await served.get("/health")
            assert response.status == 200
            writer.close()
            await eventually(lambda: not endless.running)

    async def test_are_cut_off_at_the_requests_deadline(self, text: TextModel) -> None:
        endless = FakePipeline(*[delta("x" * 10_000)] * 10_000)
        deadlines = Deadlines(request_s=0.3, rpc_s=0.1)
        async with serve(text, pipeline=endless, deadlines=deadlines) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]), limit=2**10)
            writer.write(self.HEAD + self.BODY)
            labels = {"model_name": MODEL, "role": "router", "endpoint": "/v1/completions", "status": "200"}
            counted = served.metrics.registry.get_sample_value
            await eventually(lambda: counted("kvrelay:http_requests_total", labels) == 1)
            assert not endless.running
            async with asyncio.timeout(PATIENCE_S):
                received = await reader.read()
            assert received.count(b"data: ") > 1
            assert not received.endswith(b"0\r\n\r\n")  # the end of a chunked body
            writer.close()


class TestRequestsTime:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_is_limited_even_if_the_pipeline_hangs(self, text: TextModel, stream: bool) -> None:
        deadlines = Deadlines(request_s=0.05, rpc_s=0.05)
        async with serve(text, asyncio.Event(), deadlines=deadlines) as served:
            response, body = await served.post("/v1/completions", {**COMPLETION, "stream": stream})
        assert (response.status, body["error"]["code"]) == (504, "request_timeout")

    async def test_ends_a_stream_with_an_event(self, text: TextModel) -> None:
        deadlines = Deadlines(request_s=0.1, rpc_s=0.1)
        async with serve(text, delta("a"), asyncio.Event(), deadlines=deadlines) as served:
            _, events = await served.stream("/v1/completions", COMPLETION)
        assert data_of(events)[-1]["error"]["code"] == "request_timeout"


class TestHeaders:
    @pytest.mark.parametrize("given", ["abc", "A-b_c.9:x", "x" * 128])
    @pytest.mark.parametrize("stream", [False, True])
    async def test_request_id_is_echoed(self, text: TextModel, given: str, stream: bool) -> None:
        async with serve(text, *HELLO) as served:
            body = {**COMPLETION, "stream": stream}
            async with served.session.post(
                served.url + "/v1/completions", json=body, headers={"X-Request-Id": given}
            ) as response:
                assert response.headers["X-Request-Id"] == given
            assert given not in served.pipeline.requests[0].request_id

    @pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "ü", 'a"b'])
    @pytest.mark.parametrize("path", ["/health", "/nowhere"])
    async def test_request_id_is_made_where_none_is_usable(self, text: TextModel, given: str | None, path: str) -> None:
        async with serve(text) as served:
            headers = {} if given is None else {"X-Request-Id": given}
            ids = [(await served.get(path, headers=headers))[0].headers["X-Request-Id"] for _ in range(2)]
        assert given not in ids
        assert len(set(ids)) == 2

    @pytest.mark.parametrize(("path", "body"), BOTH)
    async def test_report_comes_where_asked_for(self, text: TextModel, path: str, body: Any) -> None:
        async with serve(text, *HELLO) as served:
            headers = {"X-KVRelay-Report": "1"}
            _, whole = await served.post(path, body, headers=headers)
            _, events = await served.stream(path, body, headers=headers)
            reports = [asdict(generation.report) for generation in served.pipeline.generations]
        last = data_of(events)[-1]
        assert [whole["kvrelay"], last["kvrelay"]] == reports
        assert last["choices"] == []

    async def test_report_of_several_prompts_is_a_list(self, text: TextModel) -> None:
        async with serve(text, *HELLO) as served:
            body = {**COMPLETION, "prompt": ["a", "b"]}
            _, whole = await served.post("/v1/completions", body, headers={"X-KVRelay-Report": "1"})
        assert len(whole["kvrelay"]) == 2


class TestOtherPages:
    async def test_models(self, text: TextModel) -> None:
        async with serve(text) as served:
            _, models = await served.get("/v1/models")
            response, model = await served.get(f"/v1/models/{MODEL}")
        assert models == {"object": "list", "data": [model]}
        assert response.status == 200
        assert model == {
            "id": MODEL,
            "object": "model",
            "created": 1700000000,
            "owned_by": "kvrelay",
            "max_model_len": 128,
        }

    @pytest.mark.parametrize(("ready", "status"), [((True, ""), 200), ((False, "no decode worker"), 503)])
    async def test_ready_and_health(self, text: TextModel, ready: tuple[bool, str], status: int) -> None:
        async with serve(text, ready=lambda: ready) as served:
            response, body = await served.get("/ready")
            health, _ = await served.get("/health")
        assert (response.status, health.status) == (status, 200)
        assert body == {"ready": ready[0], "reason": ready[1]}

    async def test_metrics_count_by_route(self, text: TextModel) -> None:
        async with serve(text, *HELLO) as served:
            await served.post("/v1/chat/completions", CHAT)
            await served.get("/made/up/path")
            response, page = await served.get("/metrics")
        assert response.headers["Content-Type"].startswith("text/plain")
        chat = f'endpoint="/v1/chat/completions",model_name="{MODEL}",role="router",status="200"'
        other = f'endpoint="other",model_name="{MODEL}",role="router",status="404"'
        assert f"kvrelay:http_requests_total{{{chat}}} 1.0" in page
        assert f"kvrelay:http_requests_total{{{other}}} 1.0" in page
        assert "made" not in page


class TestOfficialClient:
    @asynccontextmanager
    async def client(self, text: TextModel, *steps: Any) -> AsyncIterator[openai.AsyncOpenAI]:
        async with (
            serve(text, *steps) as served,
            openai.AsyncOpenAI(
                base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
            ) as client,
        ):
            yield client

    async def test_chat_whole_and_streamed(self, text: TextModel) -> None:
        messages: Any = CHAT["messages"]
        async with self.client(text, *LOGPROBS) as client:
            whole = await client.chat.completions.create(model=MODEL, messages=messages, logprobs=True, top_logprobs=2)
            stream = await client.chat.completions.create(
                model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
        assert whole.choices[0].message.content == "abc"
        assert whole.choices[0].logprobs is not None
        assert len(whole.choices[0].logprobs.content or []) == 4
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "abc"
        assert chunks[-1].usage == whole.usage

    async def test_completion_whole_and_streamed(self, text: TextModel) -> None:
        async with self.client(text, *HELLO) as client:
            whole = await client.completions.create(model=MODEL, prompt="hello", logprobs=0)
            stream = await client.completions.create(model=MODEL, prompt="hello", stream=True)
            parts = [chunk.choices[0].text async for chunk in stream]
            models = [model.id async for model in client.models.list()]
        assert whole.choices[0].text == "".join(parts) == "Hello"
        assert models == [MODEL]

    @pytest.mark.parametrize(
        ("error", "wanted"),
        [
            (InvalidRequest("no", field="top_p"), openai.BadRequestError),
            (Overloaded("full"), openai.RateLimitError),
            (NoWorker("none"), openai.InternalServerError),
        ],
    )
    async def test_errors_are_the_clients_own(
        self, text: TextModel, error: KVRelayError, wanted: type[Exception]
    ) -> None:
        async with self.client(text, error) as client:
            with pytest.raises(wanted) as caught:
                await client.completions.create(model=MODEL, prompt="hello")
        assert isinstance(caught.value, openai.APIStatusError)
        assert (caught.value.code, caught.value.param) == (error.code, error.field)

    async def test_error_event_ends_the_stream_with_an_error(self, text: TextModel) -> None:
        async with self.client(text, delta("a"), EngineFailure("broken")) as client:
            stream = await client.completions.create(model=MODEL, prompt="hello", stream=True)
            with pytest.raises(openai.APIError, match="broken"):
                [chunk async for chunk in stream]


def test_importing_the_app_loads_no_heavy_package() -> None:
    code = "import router.app, sys; print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=root, check=True
    )
    assert done.stdout.strip() == "[]"
