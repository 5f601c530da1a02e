"""Replies have OpenAI's form, and streamed pieces joined are the whole."""

from typing import Any

import pytest

from common.text.text_model import TextModel
from router.pipeline.generation import Delta, GenerationRequest
from tests.support.fakes import FakePipeline
from tests.support.http_tools import BOTH, CHAT, COMPLETION, HELLO, LOGPROBS, MODEL, data_of, delta, serve
from tests.support.tiny_text import model_directory


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(model_directory(tmp_path_factory.mktemp("model")))


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


class TestLogprobs:
    async def test_of_chat_have_bytes_and_are_finite(self, text: TextModel) -> None:
        async with serve(text, *LOGPROBS) as served:
            _, body = await served.post("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2})
        content = body["choices"][0]["logprobs"]["content"]

        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            data = f"<{token_id}>".encode()  # which is how they read here
            return {"token": data.decode(), "logprob": logprob, "bytes": list(data)}

        assert content[0] == {**entry(7, -0.25), "top_logprobs": [entry(8, -1.0), entry(9, -9999.0)]}
        assert content[1] == {**entry(8, -9999.0), "top_logprobs": [entry(7, -0.125), entry(9, -3.0)]}
        assert len(content) == 4

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
