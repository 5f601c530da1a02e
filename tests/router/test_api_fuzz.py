"""Proves that whatever JSON a client sends, the status is one that /openapi.json lists and the reply is as it says."""

import asyncio
import json
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from common.text.text_model import TextModel
from router.http.openapi import describe
from tests.support.http_tools import CHAT, COMPLETION, LOGPROBS, MODEL, serve
from tests.support.tiny_text import model_directory

pytestmark = pytest.mark.slow

DOCUMENT: dict[str, Any] = json.loads(describe(MODEL))
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/tokenize": COMPLETION,
    "/detokenize": {"model": MODEL, "tokens": [5, 6]},
}
SENT_AT_ONCE = 12

numbers = st.integers(-3, 300) | st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e308, 1e-308])
leaves = (
    st.none() | st.booleans() | numbers | st.sampled_from(["", "a", "user", "text", "<|im_end|>", "\ud800", "\0", "1"])
)
keys = st.sampled_from(["", "role", "content", "type", "text", "5", "300", "-1", "include_usage", "name"])
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6
)


@cache
def fields(path: str) -> tuple[str, ...]:
    """The names of a request's fields, and one that there isn't."""
    content = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = content["$ref"].rpartition("/")[2]
    return (*DOCUMENT["components"]["schemas"][name]["properties"], "no_such_field", "n", "stream")


@cache
def validator(path: str, status: int, kind: str) -> Draft202012Validator:
    """Fails with KeyError for what is not listed."""
    schema = DOCUMENT["paths"][path]["post"]["responses"][str(status)]["content"][kind]["schema"]
    return Draft202012Validator({**schema, "components": DOCUMENT["components"]})


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A good request with some fields that are not."""
    path = draw(st.sampled_from(sorted(BODIES)))
    names = st.lists(st.sampled_from(fields(path)), max_size=4, unique=True)
    return path, {**BODIES[path], **{name: draw(values) for name in draw(names)}}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(model_directory(tmp_path_factory.mktemp("model"), config={"vocab_size": 400}))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(sent=st.lists(requests(), min_size=1, max_size=SENT_AT_ONCE))
def test_replies_are_as_described(text: TextModel, sent: list[tuple[str, dict[str, Any]]]) -> None:
    async def send() -> None:
        async with serve(text, *LOGPROBS) as served:
            for path, body in sent:
                data = json.dumps(body).encode()
                async with served.session.post(served.url + path, data=data) as response:
                    reply = await response.text()
                assert response.status < 500, (path, body, reply)
                if response.content_type != "text/event-stream":
                    validator(path, response.status, response.content_type).validate(json.loads(reply))
                assert response.status == 200 or len(reply) < 2000

    asyncio.run(send())


def test_all_routes_that_take_json_are_tried() -> None:
    assert {path for path, kinds in DOCUMENT["paths"].items() if "post" in kinds} == set(BODIES)
