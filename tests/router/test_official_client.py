"""OpenAI's own client understands what the HTTP API sends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from common.deadlines import Deadlines
from common.errors import EngineFailure, InvalidRequest, KVRelayError, NoWorker, Overloaded
from common.text.text_model import TextModel
from tests.support.fakes import FakePipeline
from tests.support.http_tools import CHAT, HELLO, LOGPROBS, MODEL, PATIENCE_S, delta, eventually, serve
from tests.support.tiny_text import model_directory

pytestmark = pytest.mark.slow


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
    async with client_of(text, delta("a"), EngineFailure("torch said no")) as client:
        stream = await client.completions.create(model=MODEL, prompt="hello", stream=True)
        with pytest.raises(openai.APIError, match="computation failed"):
            [chunk async for chunk in stream]


async def test_keep_alives_are_skipped(text: TextModel) -> None:
    async with client_of(text, 0.05, *HELLO, deadlines=Deadlines(keepalive_s=0.01)) as client:
        stream = await client.completions.create(model=MODEL, prompt="hello", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello"


MESSAGES: Any = CHAT["messages"]


async def test_models(text: TextModel) -> None:
    async with client_of(text) as client:
        (listed,) = (await client.models.list()).data
        assert await client.models.retrieve(MODEL) == listed
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("other/model")
    assert caught.value.code == "model_not_found"


async def test_several_answers_to_several_prompts_streamed(text: TextModel) -> None:
    steps = [
        delta(letter, index, finish_reason=end) for letter, end in (("a", None), ("b", "stop")) for index in (0, 1)
    ]
    async with client_of(text, *steps) as client:
        whole = await client.completions.create(model=MODEL, prompt=["one", "two"], n=2)
        stream = await client.completions.create(model=MODEL, prompt=["one", "two"], n=2, stream=True)
        texts, ends = [""] * 4, [None] * 4
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert [choice.text for choice in whole.choices] == texts == ["ab"] * 4
    assert ends == ["stop"] * 4


async def test_logprobs_streamed_are_those_of_the_whole(text: TextModel) -> None:
    async with client_of(text, *LOGPROBS) as client:
        options: Any = {"model": MODEL, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
        whole = await client.chat.completions.create(**options)
        stream = await client.chat.completions.create(**options, stream=True)
        parts = [chunk.choices[0].logprobs async for chunk in stream if chunk.choices]
    assert whole.choices[0].logprobs is not None
    entries = [entry for part in parts if part is not None for entry in part.content or []]
    assert entries == whole.choices[0].logprobs.content


async def test_the_clients_own_stream_helper(text: TextModel) -> None:
    async with (
        client_of(text, *HELLO) as client,
        client.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream,
    ):
        events = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello"
    assert "content.done" in events


async def test_every_sampling_parameter_reaches_the_pipeline(text: TextModel) -> None:
    async with (
        serve(text, *HELLO) as served,
        openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            temperature=0.5,
            top_p=0.9,
            n=2,
            seed=7,
            stop=["a", "b"],
            max_completion_tokens=9,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            logit_bias={"5": 1},
            user="somebody",
            extra_body={"top_k": 3, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 2, "ignore_eos": True},
        )
        (request,) = served.pipeline.requests
    params = request.params
    assert (request.n, request.stop, params.seed, params.max_tokens, params.min_tokens) == (2, ("a", "b"), 7, 9, 2)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 3, 0.01)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.1, 0.2, 1.2)
    assert (params.logit_bias, params.ignore_eos) == (((5, 1.0),), True)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ({"temperature": -1}, "temperature"),
        ({"messages": []}, "messages"),
    ],
)
async def test_what_is_refused_is_a_bad_request(text: TextModel, more: Any, param: str | None) -> None:
    async with client_of(text, *HELLO) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **more})
    assert caught.value.type == "invalid_request_error"
    assert param is None or caught.value.param == param


@pytest.mark.parametrize(("key", "allowed"), [("right", True), ("wrong", False)])
async def test_keys(text: TextModel, key: str, allowed: bool) -> None:
    async with (
        serve(text, *HELLO, api_keys=("right",)) as served,
        openai.AsyncOpenAI(base_url=served.url + "/v1", api_key=key, max_retries=0) as client,
    ):
        if allowed:
            assert (await client.completions.create(model=MODEL, prompt="x")).choices[0].text == "Hello"
        else:
            with pytest.raises(openai.AuthenticationError):
                await client.completions.create(model=MODEL, prompt="x")


async def test_a_refusal_for_load_is_tried_again_when_it_says(text: TextModel) -> None:
    """The client waits for as long as Retry-After says, and then succeeds."""
    tries = iter([(Overloaded("full", retry_after_s=0.01),), HELLO])
    async with (
        serve(text, pipeline=FakePipeline(script=lambda request: next(tries))) as served,
        openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=1) as client,
    ):
        reply = await client.completions.create(model=MODEL, prompt="x")
        assert len(served.pipeline.requests) == 2
    assert reply.choices[0].text == "Hello"


async def test_a_closed_stream_and_a_timed_out_request_leave_nothing_running(text: TextModel) -> None:
    pipeline = FakePipeline(delta("a"), asyncio.Event())
    async with (
        serve(text, pipeline=pipeline) as served,
        openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
        await anext(aiter(stream))
        await stream.close()
        await eventually(lambda: not pipeline.running)
        with pytest.raises(openai.APITimeoutError):
            await client.completions.create(model=MODEL, prompt="x", timeout=0.2)
        await eventually(lambda: not pipeline.running)


async def test_raw_replies_have_the_headers(text: TextModel) -> None:
    async with client_of(text, *HELLO) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL, messages=MESSAGES, extra_headers={"X-Request-Id": "mine"}
        )
    assert raw.headers["X-Request-Id"] == "mine"
    assert "prefill;dur=" in raw.headers["Server-Timing"]
    assert raw.parse().choices[0].message.content == "Hello"
