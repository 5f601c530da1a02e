"""Proves, with scripted workers behind real HTTP, the cases of the OpenAI API that need a certain answer or failure."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from common.errors import KVRelayError
from common.text.text_model import TextModel
from tests.support.fake_cluster import QUICK, FakeCluster, fake_cluster, letters
from tests.support.fake_turns import EOS, Turn, endless, silent
from tests.support.http_over import NAME, Over, http_over
from tests.support.redis_tools import eventually

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SPLIT = "Über 東京。 \N{GRINNING FACE}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL} größer \N{THUMBS UP SIGN}!"


@asynccontextmanager
async def served(text: TextModel, **options: Any) -> AsyncIterator[tuple[FakeCluster, Over]]:
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(fake_cluster(text, **options))
        deadlines = cluster.deadlines
        over = await stack.enter_async_context(
            http_over(cluster.pipeline, text, max_model_len=256, deadlines=deadlines)
        )
        yield cluster, over


def chat(**more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "temperature": 0, **more}


def completion(**more: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": "hello", "temperature": 0, "max_tokens": 200, **more}


BOTH = pytest.mark.parametrize(("path", "body"), [(CHAT, chat), (COMPLETIONS, completion)], ids=["chat", "completions"])


def whole(reply: Any) -> list[str]:
    return [one["text"] if "text" in one else one["message"]["content"] for one in reply["choices"]]


@BOTH
async def test_characters_that_are_split_over_tokens_come_whole(text: TextModel, path: str, body: Any) -> None:
    ids = [token_id for letter in SPLIT.encode() for token_id in letters_of_bytes(text, letter)]
    assert len(ids) == len(SPLIT.encode())
    async with served(text) as (cluster, http):
        cluster.words.answers = [[*ids, EOS]]
        status, reply = await http.ask(path, body())
        streamed = await http.stream(path, body())
    assert (status, whole(reply)) == (200, [SPLIT])
    assert (streamed.text(), streamed.ends()) == (SPLIT, ["stop"])
    parts = [part.get("text") or part.get("delta", {}).get("content") or "" for part in streamed.choices(0)]
    assert [part for part in parts if part] == list(SPLIT)


def letters_of_bytes(text: TextModel, byte: int) -> list[int]:
    """The token that is this byte."""
    return [next(token_id for token_id in range(300) if text.token_bytes(token_id) == bytes([byte]))]


@BOTH
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("said", "stop"), [("so END it", "END"), ("an EN and an END", "END"), ("a\n\n\nb", "\n\n"), ("ENEND", "END")]
)
async def test_no_part_of_a_stop_string_is_ever_sent(
    text: TextModel, path: str, body: Any, include: bool, said: str, stop: str
) -> None:
    before = said[: said.index(stop)]
    async with served(text) as (cluster, http):
        cluster.words.answers = [letters(text, said + "x" * 1000)]  # workers don't know of stop strings
        streamed = await http.stream(path, body(stop=[stop], include_stop_str_in_output=include))
    assert streamed.text() == before + (stop if include else "")
    assert (streamed.ends(), streamed.done) == (["stop"], True)


@BOTH
async def test_a_failure_after_the_first_byte_is_an_event_and_then_the_end(
    text: TextModel, path: str, body: Any
) -> None:
    async def breaking(turn: Turn) -> None:
        turn.accepted()
        turn.admitted()
        turn.say(2)
        raise KVRelayError("it broke")

    async with served(text) as (cluster, http):
        cluster.words.answers = [letters(text, "abcdef")]
        cluster.decode.scripts = [breaking, breaking]
        streamed = await http.stream(path, body())
        status, reply = await http.ask(path, body())
    assert (streamed.status, streamed.text(), streamed.done) == (200, "abc", False)
    assert streamed.error["message"] == "internal error"  # the words are for the log
    assert (status, reply["error"]["message"]) == (500, "internal error")
    assert "choices" not in reply


@BOTH
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [silent, endless], ids=["queued", "running"])
async def test_a_killed_client_frees_both_workers(
    text: TextModel, path: str, body: Any, stream: bool, script: Any
) -> None:
    async with served(text) as (cluster, http):
        cluster.words.answers = [letters(text, "a") * 10_000]
        worker = cluster.prefill if script is silent else cluster.decode
        worker.always = script
        post = asyncio.create_task(http.ask(path, body(stream=stream)))
        await eventually(lambda: bool(worker.running))
        post.cancel()
        await eventually(lambda: not worker.running)
        await eventually(lambda: http.counted(path, 499) == 1)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_others_serve_while_a_worker_is_frozen(text: TextModel, role: str) -> None:
    """Its connection stays; only nothing comes any more."""
    said = "the other pool writes the answer"
    async with served(text, prefill=2, decode=2) as (cluster, http):
        cluster.words.answers = [[*letters(text, said), EOS]]
        assert (await http.stream(CHAT, chat())).text() == said
        frozen = cluster.prefill if role == "prefill" else cluster.decode
        frozen.flowing.clear()
        streams = await asyncio.gather(*(http.stream(CHAT, chat()) for _ in range(8)))
        assert [(streamed.text(), streamed.done) for streamed in streams] == [(said, True)] * 8
        frozen.flowing.set()
        cluster.words.held.clear()  # what the frozen one held or was to take: scripted leases don't end by themselves


def test_the_deadlines_of_these_tests_are_short() -> None:
    assert QUICK.dead_s < QUICK.prefill_s < 10.0


@BOTH
async def test_while_the_decode_pool_is_gone_a_stream_gets_a_status_and_a_whole_answer_comes_with_the_pool(
    text: TextModel, path: str, body: Any
) -> None:
    """The stream's headers would go out with a keep-alive, after which a refusal could be no status any more."""
    async with served(text, keepalive_s=0.2) as (cluster, http):
        cluster.words.answers = [[*letters(text, "back"), EOS]]
        gone = cluster.decode
        await cluster.lose(gone)
        waiting = asyncio.create_task(http.ask(path, body()))
        async with http.session.post(http.url + path, json=body(stream=True)) as refusal:
            assert (refusal.status, refusal.headers["Retry-After"]) == (503, "1")
            assert (await refusal.json())["error"]["code"] == "no_worker"
        cluster.fakes.remove(gone)
        await cluster.show(cluster.prefill, await cluster.add("decode", "decode-1"))
        status, reply = await waiting
    assert (status, whole(reply)) == (200, ["back"])
