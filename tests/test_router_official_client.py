"""OpenAI's own client understands what the HTTP API sends."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from http_tools import CHAT, HELLO, LOGPROBS, MODEL, PATIENCE_S, delta, serve
from tiny_text import model_directory

from common.deadlines import Deadlines
from common.errors import EngineFailure, InvalidRequest, KVRelayError, NoWorker, Overloaded
from router.text import TextModel


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(model_directory(tmp_path_factory.mktemp("model")))


@asynccontextmanager
async def client_of(text: TextModel, *steps: Any, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serve(text, *steps, **options) as served,
        openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client,
    ):
        yield client


async def test_chat_whole_and_streamed(text: TextModel) -> None:
    messages: Any = CHAT["messages"]
    async with client_of(text, *LOGPROBS) as client:
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


async def test_completion_whole_and_streamed(text: TextModel) -> None:
    async with client_of(text, *HELLO) as client:
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
async def test_errors_are_the_clients_own(text: TextModel, error: KVRelayError, wanted: type[Exception]) -> None:
    async with client_of(text, error) as client:
        with pytest.raises(wanted) as caught:
            await client.completions.create(model=MODEL, prompt="hello")
    assert isinstance(caught.value, openai.APIStatusError)
    assert (caught.value.code, caught.value.param) == (error.code, error.field)


async def test_error_event_ends_the_stream_with_an_error(text: TextModel) -> None:
    async with client_of(text, delta("a"), EngineFailure("broken")) as client:
        stream = await client.completions.create(model=MODEL, prompt="hello", stream=True)
        with pytest.raises(openai.APIError, match="broken"):
            [chunk async for chunk in stream]


async def test_keep_alives_are_skipped(text: TextModel) -> None:
    async with client_of(text, 0.05, *HELLO, deadlines=Deadlines(keepalive_s=0.01)) as client:
        stream = await client.completions.create(model=MODEL, prompt="hello", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello"
