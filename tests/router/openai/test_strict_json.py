"""A body that is no good JSON object is refused, quickly and in few words, whatever it is."""

from typing import Any

import pytest

from common.errors import InvalidRequest
from router.openai.requests import ChatRequest, CompletionRequest
from router.openai.strict_json import MAX_SHOWN, parse

MANY = 200_000


def error_of(body: bytes, kind: type[Any] = CompletionRequest) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(kind, body)
    assert len(caught.value.message) < 3 * MAX_SHOWN
    assert len(caught.value.field or "") <= MAX_SHOWN + 1
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{}x",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"model": "m", "prompt": "\\ud800"}',
        b'{"model": "m", "prompt": "\xff"}',
        b'{"model": "m", "prompt": "a", "temperature": NaN}',
        b'{"model": "m", "prompt": "a", "temperature": -Infinity}',
        b'{"model": "m", "prompt": "a", "metadata": {"x": NaN}}',
        b"[" * MANY,
        b'{"a":' * MANY,
        b"9" * MANY,
    ],
)
def test_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    assert error_of(body).field is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"model": "m", "prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"model": "m", "prompt": "a", "temperature": -1e999}', "temperature"),
        (b'{"model": "m", "prompt": "a", "logit_bias": {"1": 1e999}}', "logit_bias.1"),
        (b'{"model": "m", "prompt": "a", "metadata": {"x": [1e999]}}', "metadata"),
        (b'{"model": "m", "prompt": "a", "x": 1e999}', "x"),
        (b'{"model": "m"}', "prompt"),
        (b"{}", "prompt"),
    ],
)
def test_wrong_field_is_named(body: bytes, field: str) -> None:
    assert error_of(body).field == field


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "prompt": [' + b'"x", ' * MANY + b"1]}",
        b'{"model": "m", "prompt": [' + b"-1, " * MANY + b"1]}",
        b'{"model": "m", "prompt": [' + b"[], " * MANY + b"[]]}",
        b'{"model": "m", "prompt": [' + b"[[]], " * MANY + b"[]]}",
        b'{"model": "m", "stop": [' + b"1, " * MANY + b"1]}",
        b"{" + b", ".join(b'"%d": 1' % number for number in range(MANY)) + b"}",
        b'{"model": "m", "logit_bias": {' + b", ".join(b'"%d": "x"' % number for number in range(MANY)) + b"}}",
        b'{"%s": 1}' % (b"x" * MANY),
        b'{"model": "m", "prompt": "a", "n": "%s"}' % (b"x" * MANY),
    ],
    ids=lambda body: body[:32].decode(),
)
def test_many_faults_make_one_short_error(body: bytes) -> None:
    error_of(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "messages": [' + b"1, " * MANY + b"1]}",
        b'{"model": "m", "messages": [{"role": "user", "content": [' + b"1, " * MANY + b"1]}]}",
        b'{"model": "m", "messages": [{"role": "%s", "content": "a"}]}' % (b"x" * MANY),
        b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "%s"}]}]}' % (b"x" * MANY),
        b'{"model": "m", "messages": [{"role": "user", "content": "a", "%s": 1}]}' % (b"x" * MANY),
    ],
    ids=lambda body: body[:72].decode(),
)
def test_many_faults_in_messages_make_one_short_error(body: bytes) -> None:
    error_of(body, ChatRequest)
