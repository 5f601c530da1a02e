"""A body with more in it than any request needs is refused before it is parsed, and large ones share bounded memory."""

import json

import pytest

from common.errors import InvalidRequest, Overloaded
from common.text.text_model import TextModel
from router.http.bodies import AT_ONCE, INLINE, MAX_CONTAINERS, MAX_STRINGS, Bodies, HeldBody, check_counts
from tests.support.http_tools import CHAT, HELLO, serve
from tests.support.tiny_text import model_directory

MANY = 300_000
VALUES = 2**18


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(model_directory(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b'{"prompt":[' + b"[0]," * MANY + b"[0]]}", "arrays"),
        (b'{"messages":[' + b'{"role":"user","content":"a"},' * MANY + b"{}]}", "strings"),
        (b'{"logit_bias":{' + b'"1":1,' * MANY + b'"1":1}}', "strings"),
        (b'{"stop":[' + b'"\\"",' * MANY + b'"a"]}', "strings"),
        (b'{"prompt":[' + b"0," * MANY + b"0]}", "values"),
        (b"[" * MANY, "arrays"),
        (b"{" * MANY, "arrays"),
    ],
    ids=["lists", "messages", "biases", "stops", "ids", "depth", "objects"],
)
def test_more_than_any_request_needs_is_refused(body: bytes, what: str) -> None:
    with pytest.raises(InvalidRequest, match=what):
        check_counts(body, VALUES)


@pytest.mark.parametrize(
    "value",
    [
        "[{," * MANY,
        '"' * MANY,
        "\\" * MANY,
        '\\"' * MANY,
        '[{"a": 1}, "b"]' * 30_000,
        [[1, 2]] * 10_000,
        ["a"] * 100_000,
    ],
    ids=["brackets", "quotes", "backslashes", "both", "json", "lists", "strings"],
)
def test_texts_of_any_kind_and_honest_numbers_of_values_are_taken(value: object) -> None:
    check_counts(json.dumps({"a": value, "b": 1}).encode(), VALUES)


@pytest.mark.parametrize("count", [-1, 0, 1])
def test_counts_are_exact(count: int) -> None:
    arrays = b"[" + b"[]" * (MAX_CONTAINERS + count - 1)
    strings = b'"a\\\\"' * (MAX_STRINGS + count)
    for body in (arrays, strings):
        if count > 0:
            with pytest.raises(InvalidRequest):
                check_counts(body, VALUES)
        else:
            check_counts(body, VALUES)


def test_large_bodies_share_bounded_memory_and_small_ones_need_none() -> None:
    size = 4 * INLINE
    bodies = Bodies(size, 128, 1.0)
    held = [HeldBody(bodies) for _ in range(AT_ONCE + 1)]
    for one in held[:-1]:
        one.grow(size // 2)
        one.grow(size)
    with pytest.raises(Overloaded):
        held[-1].grow(INLINE + 1)
    held[-1].grow(INLINE)
    held[0].grow(0)
    held[-1].grow(size)
    for one in held:
        one.grow(0)
    assert bodies.num_held == 0


async def test_a_hostile_body_gets_a_400_and_its_memory_is_free_again(text: TextModel) -> None:
    async with serve(text, *HELLO) as served:
        response, reply = await served.post("/v1/completions", b'{"prompt":[' + b"[0]," * MANY + b"[0]]}")
        assert (response.status, "arrays and objects" in reply["error"]["message"]) == (400, True)
        response, reply = await served.post("/v1/chat/completions", b" " * 5 * 2**20)
        assert response.status == 413
        long = json.dumps({**CHAT, "metadata": {"x": "y" * 100_000}}).encode()
        response, _ = await served.post("/v1/chat/completions", long)
        assert response.status == 200
