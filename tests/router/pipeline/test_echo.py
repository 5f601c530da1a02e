"""A completion's answers begin with its prompt where asked for, and prompts' log-probabilities have vLLM's shape."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from common.sampling import Logprob
from common.text.text_model import TextModel
from router.pipeline.generation import Delta, Generation
from tests.support.fakes import FakePipeline
from tests.support.http_tools import CHAT, COMPLETION, data_of, delta, serve, token
from tests.support.tiny_text import byte_level, model_directory, sentencepiece_directory

PATH = "/v1/completions"
ANSWER = (delta("a", tokens=(token(7, (8, -1.0)),)), delta("b", tokens=(token(8),), finish_reason="length"))


def score(token_id: int, position: int) -> tuple[Logprob, ...]:
    """Of a prompt token: its own, rank 3, and two that are likelier."""
    return Logprob(token_id, -position - 0.5, 3), Logprob(3, -0.25, 1), Logprob(4, float("-inf"), 2)


class ScoringPipeline(FakePipeline):
    """Gives each prompt token log-probabilities, before its first delta."""

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        asked = generation.request.params.prompt_logprobs
        if asked is not None:
            for position, token_id in enumerate(generation.request.prompt_ids[1:], 1):
                generation.prompt_logprobs.append(score(token_id, position)[: 1 + asked])
        async for one in super().generate(generation):
            yield one


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(model_directory(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(model_directory(tmp_path_factory.mktemp("bos"), tokenizer=byte_level(bos=True)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hello", "  Über 東京 <|im_end|>\n", "\U0001f600"])
async def test_echo_is_the_prompt_as_it_was_sent(text: TextModel, prompt: str, stream: bool) -> None:
    body = {**COMPLETION, "prompt": [prompt, "x"], "echo": True, "n": 2}
    pipeline = FakePipeline(
        script=lambda _: [delta("a"), delta("c", 1, finish_reason="stop"), delta("b", finish_reason="stop")]
    )
    async with serve(text, pipeline=pipeline) as served:
        if stream:
            _, events = await served.stream(PATH, body)
            texts = ["", "", "", ""]
            for chunk in data_of(events):
                for choice in chunk["choices"]:
                    texts[choice["index"]] += choice["text"]
        else:
            _, reply = await served.post(PATH, body)
            texts = [choice["text"] for choice in reply["choices"]]
    assert texts == [prompt + "ab", prompt + "c", "xab", "xc"]


async def test_echo_of_token_ids_is_their_text_with_special_tokens(text: TextModel) -> None:
    ids = text.encode("Über<|im_end|>")
    async with serve(text, *ANSWER) as served:
        _, reply = await served.post(PATH, {**COMPLETION, "prompt": ids, "echo": True})
    assert reply["choices"][0]["text"] == "Über<|im_end|>ab"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_alone_asks_no_worker(text: TextModel, stream: bool) -> None:
    body = {**COMPLETION, "prompt": ["hello", "x"], "echo": True, "max_tokens": 0, "n": 2}
    async with serve(text) as served:
        if stream:
            body["stream_options"] = {"include_usage": True}
            _, events = await served.stream(PATH, body)
            *chunks, last = data_of(events)
            choices, usage = [chunk["choices"][0] for chunk in chunks], last["usage"]
            choices.sort(key=lambda choice: choice["index"])
        else:
            _, reply = await served.post(PATH, body)
            choices, usage = reply["choices"], reply["usage"]
        assert not served.pipeline.generations
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
        ("hello", "length"),
        ("hello", "length"),
        ("x", "length"),
        ("x", "length"),
    ]
    count = len(text.encode("hello")) + 1
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (count, 0, count)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("top", [0, 1])
async def test_logprobs_of_an_echo_begin_with_the_prompts(
    text: TextModel, max_tokens: int, top: int, stream: bool
) -> None:
    body = {**COMPLETION, "prompt": "hello", "echo": True, "max_tokens": max_tokens, "logprobs": top}
    answer = ANSWER if max_tokens else (delta("dropped", tokens=(token(7),), finish_reason="stop"),)
    async with serve(text, pipeline=ScoringPipeline(*answer)) as served:
        if stream:
            _, events = await served.stream(PATH, body)
            parts = [chunk["choices"][0] for chunk in data_of(events)]
        else:
            _, reply = await served.post(PATH, body)
            parts = reply["choices"]
            assert reply["usage"]["completion_tokens"] == (2 if max_tokens else 0)
            assert "prompt_logprobs" not in parts[0]
        (request,) = served.pipeline.requests
    assert (request.params.max_tokens, request.params.prompt_logprobs) == (max_tokens or 1, top)
    ids = list(request.prompt_ids)
    words = [text.decode([one]) for one in ids]
    assert "".join(part["text"] for part in parts) == "hello" + ("ab" if max_tokens else "")

    def joined(name: str) -> list[Any]:
        return [item for part in parts for item in part["logprobs"][name]]

    assert joined("tokens")[: len(ids)] == words
    assert joined("token_logprobs")[: len(ids)] == [None, *(-place - 0.5 for place in range(1, len(ids)))]
    three = {text.decode([3]): -0.25} if top else {}
    wanted = [None, *({words[place]: -place - 0.5} | three for place in range(1, len(ids)))]
    assert joined("top_logprobs")[: len(ids)] == wanted
    offsets = joined("text_offset")
    assert offsets[: len(ids)] == [sum(map(len, words[:place])) for place in range(len(ids))]
    assert offsets[len(ids) :] == ([5, 5 + len("<7>")] if max_tokens else [])


@pytest.mark.parametrize("prompt", ["hello", "hello <|im_end|> you", "\U0001f600x"])
async def test_offsets_of_an_echo_leave_out_a_bos_that_the_tokenizer_adds(
    with_bos: TextModel, tmp_path: Path, prompt: str
) -> None:
    for text in (with_bos, TextModel.load(sentencepiece_directory(tmp_path))):
        body = {**COMPLETION, "prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 0}
        pipeline = ScoringPipeline(delta("", finish_reason="length"))
        async with serve(text, pipeline=pipeline) as served:
            _, reply = await served.post(PATH, body)
        tokens, offsets = (reply["choices"][0]["logprobs"][name] for name in ("tokens", "text_offset"))
        assert (offsets[0], reply["choices"][0]["text"]) == (0, prompt)
        if text is with_bos or "<|im_end|>" not in prompt:  # after which SentencePiece puts a space
            assert "".join(tokens) == prompt
            assert offsets == [len("".join(tokens[:place])) for place in range(len(tokens))]
        if text is with_bos:
            assert (tokens[0], offsets[:2]) == ("", [0, 0])


@pytest.mark.parametrize("top", [0, 1, 2])
async def test_prompt_logprobs_of_a_completion_are_in_its_choices(text: TextModel, top: int) -> None:
    body = {**COMPLETION, "prompt": [[5, 6, 7], [8]], "prompt_logprobs": top}
    async with serve(text, pipeline=ScoringPipeline(*ANSWER)) as served:
        _, reply = await served.post(PATH, body)
    assert [choice["text"] for choice in reply["choices"]] == ["ab", "ab"]
    first, second = [choice["prompt_logprobs"] for choice in reply["choices"]]
    wanted = {
        "6": {"logprob": -1.5, "rank": 3, "decoded_token": text.decode([6])},
        "3": {"logprob": -0.25, "rank": 1, "decoded_token": text.decode([3])},
        "4": {"logprob": -9999.0, "rank": 2, "decoded_token": text.decode([4])},
    }
    assert first[:2] == [None, dict(list(wanted.items())[: 1 + top])]
    assert len(first) == 3
    assert second == [None]


async def test_prompt_logprobs_of_a_chat_are_beside_its_choices(text: TextModel) -> None:
    async with serve(text, pipeline=ScoringPipeline(*ANSWER)) as served:
        _, reply = await served.post("/v1/chat/completions", {**CHAT, "prompt_logprobs": 0})
        (request,) = served.pipeline.requests
    assert [list(one or {}) for one in reply["prompt_logprobs"]] == [
        [],
        *([str(one)] for one in request.prompt_ids[1:]),
    ]


async def test_as_many_are_computed_as_the_larger_of_both_wishes_needs(text: TextModel) -> None:
    body = {**COMPLETION, "prompt": [5, 6], "echo": True, "logprobs": 0, "prompt_logprobs": 2}
    async with serve(text, pipeline=ScoringPipeline(*ANSWER)) as served:
        _, reply = await served.post(PATH, body)
        assert served.pipeline.requests[0].params.prompt_logprobs == 2
    (choice,) = reply["choices"]
    assert (len(choice["logprobs"]["top_logprobs"][1]), len(choice["prompt_logprobs"][1])) == (1, 3)


async def test_scores_that_did_not_come_are_an_error_and_no_wrong_answer(text: TextModel) -> None:
    async with serve(text, *ANSWER) as served:
        response, _ = await served.post(PATH, {**COMPLETION, "prompt": [5, 6], "prompt_logprobs": 2})
    assert response.status == 500


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"echo": 1}, "echo"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
async def test_what_cannot_be_is_refused(text: TextModel, fields: dict[str, Any], field: str) -> None:
    async with serve(text) as served:
        response, reply = await served.post(PATH, {**COMPLETION, **fields})
    assert (response.status, reply["error"]["param"]) == (400, field)
