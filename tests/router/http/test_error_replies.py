"""Errors reach clients in OpenAI's form: as a status before the first delta, as an event after it."""

import asyncio
import gzip
import json
import logging
import re
from typing import Any

import pytest

from common.errors import (
    BY_CODE,
    ContextLengthExceeded,
    Draining,
    EngineFailure,
    HandoverError,
    InvalidRequest,
    KVExpired,
    KVRelayError,
    NoWorker,
    Overloaded,
    RequestTimeout,
    Timeout,
    WorkerLost,
)
from common.settings import Bytes
from common.text.text_model import TextModel
from router.config import RequestLimits
from tests.support.fakes import FakePipeline
from tests.support.http_tools import BOTH, CHAT, COMPLETION, MODEL, data_of, delta, serve
from tests.support.tiny_text import model_directory


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(model_directory(tmp_path_factory.mktemp("model")))


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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize(("error", "status", "kind", "code"), ERRORS, ids=lambda value: getattr(value, "code", None))
async def test_before_the_first_delta_are_a_status(
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
    wanted = {"message": error.told, "type": kind, "param": error.field, "code": code}
    assert reply == {"error": wanted}
    assert response.headers.get("Retry-After") == {429: "3", 503: "1"}.get(status)


INSIDE = [
    WorkerLost("worker decode-7 was lost (UNAVAILABLE: ipv4:10.1.2.3:7001: Connection refused)"),
    Timeout("worker decode-7 made no progress"),
    HandoverError("holder 10.1.2.3:7001: no handshake in 5 s"),
    KVExpired("the holder did not confirm: holder 10.1.2.3:7001: Release failed: DEADLINE_EXCEEDED", field="handle"),
    EngineFailure("forward pass failed: mat1 and mat2 shapes cannot be multiplied (3x10 and 1x2)", field="block_ids"),
    KVRelayError("internal error: RuntimeError at 10.1.2.3:7001"),
    RuntimeError("shapes of 10.1.2.3:7001"),
]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("error", INSIDE, ids=lambda error: type(error).__name__)
async def test_what_happened_inside_is_for_the_log_under_the_requests_id(
    text: TextModel, error: Exception, begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(text, *([delta("a")] if begun else []), error) as served:
        response, events = await served.stream("/v1/completions", COMPLETION, headers={"X-Request-Id": "client-7"})
    heard = json.loads(events[-1].removeprefix("data: "))["error"]
    assert not re.search(r"10\.1\.2\.3|decode-7|shapes|UNAVAILABLE|RuntimeError", json.dumps(heard))
    assert heard["message"]
    assert heard["param"] is None
    [line] = [record for record in caplog.records if record.getMessage() == "request failed"]
    assert line.values["request_id"] == "client-7" == response.headers["X-Request-Id"]  # type: ignore[attr-defined]
    assert line.exc_info or str(error) == line.values["reason"]  # type: ignore[attr-defined]


def test_only_kinds_whose_every_message_is_written_for_clients_show_it() -> None:
    shown = {code for code, kind in BY_CODE.items() if not kind.public}
    assert shown == {
        "context_length_exceeded",
        "invalid_api_key",
        "invalid_request",
        "model",
        "model_not_found",
        "no_worker",
        "not_found",
        "overloaded",
        "request_timeout",
        "request_too_slow",
    }


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_after_the_first_delta_are_an_event_and_the_end(text: TextModel, path: str, body: Any) -> None:
    async with serve(text, delta("a"), EngineFailure("broken")) as served:
        response, events = await served.stream(path, body)
    assert response.status == 200
    error = {
        "message": "the model's computation failed",
        "type": "server_error",
        "param": None,
        "code": "engine_failure",
    }
    assert json.loads(events[-1].removeprefix("data: ")) == {"error": error}
    assert "data: [DONE]" not in events


@pytest.mark.parametrize("stream", [False, True])
async def test_defects_are_logged_and_not_shown(
    text: TextModel, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(text, RuntimeError("secret detail")) as served:
        with caplog.at_level(logging.ERROR, "kvrelay"):
            response, body = await served.post("/v1/completions", {**COMPLETION, "stream": stream})
    assert (response.status, body["error"]["message"]) == (500, "internal error")
    assert [record.exc_info is not None for record in caplog.records] == [True]


async def test_one_prompts_failure_ends_all(text: TextModel) -> None:
    forever = asyncio.Event()
    pipeline = FakePipeline(script=lambda request: [NoWorker("gone")] if request.prompt_ids == (8,) else [forever])
    async with serve(text, pipeline=pipeline) as served:
        response, _ = await served.post("/v1/completions", {**COMPLETION, "prompt": [[7], [8], [9]]})
        assert response.status == 503
        assert not pipeline.running


async def test_cancellation_below_is_an_error_not_a_silence(text: TextModel) -> None:
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
async def test_wrong_path_or_method(text: TextModel, method: str, path: str, status: int) -> None:
    async with serve(text) as served, served.session.request(method, served.url + path) as response:
        body = await response.json()
        assert response.status == status
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert len(body["error"]["message"]) < 500
        assert ("Allow" in response.headers) == (status == 405)


async def test_unknown_model(text: TextModel) -> None:
    async with serve(text) as served:
        response, body = await served.post("/v1/completions", {**COMPLETION, "model": "x" * 1000})
    assert (response.status, body["error"]["param"], body["error"]["code"]) == (404, "model", "model_not_found")
    assert len(body["error"]["message"]) < 500


@pytest.mark.parametrize("size", [99, 100, 101, 100_000])
async def test_body_has_a_limit(text: TextModel, size: int) -> None:
    async with serve(text, limits=RequestLimits(max_body_size=Bytes(100))) as served:
        response, body = await served.post("/v1/completions", b" " * size)
    assert response.status == (413 if size > 100 else 400)
    assert size <= 100 or "100" in body["error"]["message"]
    assert body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("size", [10, 100_000], ids=["inline", "in a thread"])
async def test_wrong_field_is_named(text: TextModel, size: int) -> None:
    body = {**CHAT, "user": "x" * size, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
    async with serve(text) as served:
        response, reply = await served.post("/v1/chat/completions", body)
    assert (response.status, reply["error"]["param"]) == (400, "messages[0].content[0]")


POSTS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
BAD_BODIES = [
    b"", b"{", b"[]", b"null", b"123", b"true", b'"x"', b"\xff", b"\x00", b"{} {}", b'{"a": NaN}', b'{"a": -Infinity}',
    b'{"model": "\\ud800"}', b"[" * 5000, b'{"a":' * 5000, b'{"a": ' + b"9" * 5000 + b"}",
    b"{" + b", ".join(b'"k%d": 1' % number for number in range(100_000)) + b"}", b'{"%s": 1}' % (b"x" * 100_000),
    b'{"model": "m", "prompt": {"%s": ["%s"]}}' % (b"x" * 50_000, b"y" * 50_000),
]  # fmt: skip


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: repr(body[:24]))
async def test_a_bad_body_gets_a_small_400(text: TextModel, path: str, body: bytes) -> None:
    async with serve(text) as served:
        response, reply = await served.post(path, body)
    assert (response.status, reply["error"]["code"]) == (400, "invalid_request")
    assert set(reply["error"]) == {"message", "type", "param", "code"}
    assert len(json.dumps(reply)) < 1500


@pytest.mark.parametrize(
    "kind", [None, "", "text/plain", "application/x-www-form-urlencoded", "odd", "a/b; charset=zz"]
)
async def test_the_content_type_does_not_matter(text: TextModel, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    skip = ["Content-Type"] if kind is None else []
    async with serve(text, delta("a", finish_reason="stop")) as served:
        response, _ = await served.post("/v1/completions", COMPLETION, headers=headers, skip_auto_headers=skip)
    assert response.status == 200


async def test_of_a_key_that_comes_twice_the_last_counts(text: TextModel) -> None:
    async with serve(text, delta("a", finish_reason="stop")) as served:
        body = b'{"model": "other", "prompt": "a", "max_tokens": 0, "max_tokens": 3, "model": "%s"}' % MODEL.encode()
        assert (await served.post("/v1/completions", body))[0].status == 200
        assert served.pipeline.requests[0].params.max_tokens == 3


async def test_a_body_that_unpacks_to_too_much_is_refused(text: TextModel) -> None:
    packed = gzip.compress(b" " * 10_000_000)
    async with serve(text, limits=RequestLimits(max_body_size=Bytes(1_000_000))) as served:
        headers = {"Content-Encoding": "gzip"}
        response, reply = await served.post("/v1/completions", packed, headers=headers, compress=None)
    assert (response.status, reply["error"]["type"]) == (413, "invalid_request_error")


@pytest.mark.parametrize(
    ("limits", "fields", "field"),
    [
        ({"max_n": 2}, {"n": 3}, "n"),
        ({"max_answers": 3}, {"prompt": ["a", "b"], "n": 2}, "prompt"),
        ({"max_stop_strings": 1}, {"stop": ["a", "b"]}, "stop"),
        ({"max_logit_bias": 1}, {"logit_bias": {"1": 1, "2": 1}}, "logit_bias"),
        ({"max_bad_words": 1}, {"bad_words": ["a", "b"]}, "bad_words"),
    ],
)
async def test_a_servers_limits_are_told(
    text: TextModel, limits: dict[str, int], fields: dict[str, Any], field: str
) -> None:
    for allowed in (RequestLimits(), RequestLimits(**limits)):
        steps = [delta("a", index, finish_reason="stop") for index in range(fields.get("n", 1))]
        async with serve(text, *steps, limits=allowed) as served:
            response, reply = await served.post("/v1/completions", {**COMPLETION, **fields})
        if allowed == RequestLimits():
            assert response.status == 200
            continue
        assert (response.status, reply["error"]["param"]) == (400, field)
        assert str(next(iter(limits.values()))) in reply["error"]["message"]


INTERNAL = ["request_id", "kv_transfer_params", "handle", "epoch", "attempt", "prompt_token_ids", "output_ids"]
TOOLS = ["tools", "tool_choice", "functions", "function_call", "response_format", "guided_json", "guided_regex",
         "guided_choice", "guided_grammar", "structured_outputs", "documents", "chat_template"]  # fmt: skip


@pytest.mark.parametrize("field", [*INTERNAL, *TOOLS])
@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_internal_and_unsupported_fields_are_refused_by_name(
    text: TextModel, path: str, body: Any, field: str
) -> None:
    async with serve(text) as served:
        response, reply = await served.post(path, {**body, field: {"type": "json_object"}})
    assert (response.status, reply["error"]["param"]) == (400, field)
    assert reply["error"]["message"].startswith(f"{field} is not supported")


async def test_broken_compression_is_the_clients_fault(text: TextModel) -> None:
    async with serve(text) as served:
        headers = {"Content-Encoding": "gzip"}
        async with served.session.post(
            served.url + "/v1/completions", data=b"no gzip", headers=headers, compress=None
        ) as response:
            assert response.status == 400
