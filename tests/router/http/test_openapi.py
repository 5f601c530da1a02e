"""The description of the API is valid OpenAPI, and what is sent and taken is as it says."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator, validate

from common.errors import InvalidRequest
from common.text.text_model import TextModel
from router import app
from router.http import pages
from router.http.openapi import describe
from router.openai.requests import ChatRequest, CompletionRequest
from router.openai.strict_json import parse
from router.openai.tokenize import DetokenizeRequest, TokenizeRequest
from tests.support.http_tools import CHAT, COMPLETION, HELLO, LOGPROBS, MODEL, data_of, serve
from tests.support.tiny_text import model_directory

DOCUMENT: dict[str, Any] = json.loads(describe(MODEL))
KINDS = {kind.__name__: kind for kind in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(model_directory(tmp_path_factory.mktemp("model")))


def validator(schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def reply_validator(path: str, method: str, status: int) -> Draft202012Validator:
    response = DOCUMENT["paths"][path][method]["responses"][str(status)]
    return validator(response["content"]["application/json"]["schema"])


def all_of(value: Any) -> Iterator[Any]:
    yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from all_of(item)


def test_it_is_valid_openapi() -> None:
    validate(DOCUMENT, cls=OpenAPIV31SpecValidator)


def test_every_schema_is_a_schema_and_every_reference_leads_somewhere() -> None:
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    for one in all_of(DOCUMENT):
        if isinstance(one, dict) and "$ref" in one:
            assert one["$ref"].removeprefix("#/components/schemas/") in DOCUMENT["components"]["schemas"]


@pytest.mark.parametrize(("kind", "models"), [("ChatRequest", [MODEL, None]), ("TokenizeRequest", [MODEL, None])])
def test_the_served_model_is_named(kind: str, models: list[str | None]) -> None:
    assert DOCUMENT["components"]["schemas"][kind]["properties"]["model"] == {"enum": models}


async def test_every_route_is_described_and_nothing_else(text: TextModel) -> None:
    async with serve(text) as served:
        _, document = await served.get("/openapi.json")
        described = {(path, method) for path, item in document["paths"].items() for method in item}
        for path, method in described:
            url = served.url + path.replace("{model}", "org/tiny")
            async with served.session.request(method, url) as response:
                assert response.status not in (404, 405)
    assert document == DOCUMENT
    source = set(re.findall(r'web\.(get|post)\("(/[^":]+)', _sources()))
    assert {(path, method) for method, path in ((m, p + "}" if "{" in p else p) for m, p in source)} == described


def _sources() -> str:
    return "".join(Path(module.__file__ or "").read_text() for module in (app, pages))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
        ("/v1/completions", COMPLETION),
        ("/v1/completions", {**COMPLETION, "logprobs": 2}),
        ("/v1/completions", {**COMPLETION, "echo": True, "max_tokens": 0}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {**COMPLETION, "model": "other"}),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}),
        ("/tokenize", {}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
@pytest.mark.parametrize("steps", [HELLO, LOGPROBS], ids=["text", "logprobs"])
async def test_replies_fit_their_schema(text: TextModel, path: str, body: Any, steps: Any) -> None:
    if "logprobs" in body and steps is HELLO:
        pytest.skip("its tokens have no alternatives")
    async with serve(text, *steps) as served:
        response, reply = await served.post(path, body, headers={"X-KVRelay-Report": "1"})
        reply_validator(path, "post", response.status).validate(reply)
        if response.status == 200 and path.startswith("/v1"):
            _, events = await served.stream(path, {**body, "stream_options": {"include_usage": True}})
            for chunk in data_of(events):
                reply_validator(path, "post", 200).validate(chunk)


@pytest.mark.parametrize("ready", [True, False])
async def test_pages_fit_their_schema(text: TextModel, ready: bool) -> None:
    async with serve(text, ready=lambda: (ready, "why")) as served:
        for path in ("/v1/models", "/v1/models/{model}", "/version", "/health", "/ready"):
            response, reply = await served.get(path.replace("{model}", "org/tiny"))
            reply_validator(path, "get", response.status).validate(reply)
    assert reply["ready"] is ready


@pytest.mark.parametrize("status", [400, 401, 404, 408, 413, 429, 500, 503, 504])
def test_a_generation_may_fail_in_every_documented_way(status: int) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert str(status) in DOCUMENT["paths"][path]["post"]["responses"]


WHOLE = {
    "ChatRequest": {"model": MODEL, "messages": [{"role": "user", "content": "a"}]},
    "CompletionRequest": {"model": MODEL, "prompt": "a"},
    "TokenizeRequest": {"prompt": "a"},
    "DetokenizeRequest": {"tokens": [1]},
}
NUMBERS = [0, 1, -1, 0.5, 1.0, 21, 10**12]
LISTS = [[], ["a"], [1], [[1]], [None]]
OBJECTS = [{}, {"a": 1}, {"1": 1}, {"1": 200}]
VALUES = [None, True, False, *NUMBERS, "", "a", *LISTS, *OBJECTS]


@pytest.mark.parametrize("kind", KINDS)
def test_the_schema_and_the_parser_take_the_same_values(kind: str) -> None:
    schema = DOCUMENT["components"]["schemas"][kind]
    checker = validator(schema)
    differing = []
    for field in {*schema["properties"], "unknown"} - {"model"}:
        for value in VALUES:
            body = {**WHOLE[kind], field: value}
            try:
                parse(KINDS[kind], json.dumps(body).encode())
                taken, about = True, ""
            except InvalidRequest as error:
                taken, about = False, error.message
            if taken != checker.is_valid(body) and not re.search("only allowed|unless|not available|not both", about):
                differing.append((field, value, taken, about))
    assert differing == []
