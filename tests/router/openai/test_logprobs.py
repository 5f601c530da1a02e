"""Tokens with log-probabilities read as they stand in the text: joined they are the text, and offsets point into it."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.rpc.pb import types_pb2
from common.sampling import SamplingParams
from common.text.text_model import TextModel
from router.openai.reply_builder import ChatReply, CompletionReply
from router.openai.requests import ChatRequest, CompletionRequest
from router.pipeline.answer import Answer
from router.pipeline.generation import Delta, Generation, GenerationRequest
from tests.support.fake_turns import a_token
from tests.support.tiny_text import model_directory
from tests.support.tokenizer_kinds import DECODERS, REPLACEMENT, with_special

Case = tuple[TextModel, Tokenizer]
IDS = st.lists(st.integers(0, 620), min_size=1, max_size=10)


@pytest.fixture(
    scope="module", params=["byte_level", "sentencepiece", "gemma_like", "unigram", "wordpiece", "word_ends"]
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    tokenizer = with_special(with_special(DECODERS[request.param](), "<s>"), "<|im_end|>")
    directory = model_directory(tmp_path_factory.mktemp("model"), tokenizer=tokenizer)
    return TextModel.load(directory), tokenizer


def answered(text: TextModel, prompt: list[int], ids: list[int], reason: str = "length", **more: Any) -> list[Delta]:
    """The deltas of these tokens, each with the token before as its alternative."""
    request = GenerationRequest("request", tuple(prompt), SamplingParams(logprobs=1), **more)
    answer, deltas = Answer(0, request, text), []
    for index, one in enumerate(ids):
        token = a_token(0, index, one, reason if index == len(ids) - 1 else "")
        for rank, other in enumerate((one, ids[index - 1])):
            token.logprobs.append(types_pb2.Logprob(token_id=other, logprob=-0.5, rank=rank + 1))
        deltas += [delta for delta in [answer.accept(token)] if delta is not None]
    return deltas


def completion(text: TextModel, prompt: list[int], deltas: list[Delta], **fields: Any) -> Any:
    """The choice of a whole reply."""
    asked = CompletionRequest(model="m", prompt=prompt, logprobs=1, **fields)
    echo = text.decode(prompt, whole=False) if asked.echo else None
    request = GenerationRequest("request", tuple(prompt), SamplingParams(prompt_logprobs=1), echo=echo)
    generation = Generation(request)
    generation.prompt_logprobs += [logprobs_of(one, prompt[0]) for one in prompt[1:]]
    reply = CompletionReply(asked, [generation], text, "m", 0)
    for delta in deltas:
        reply.add(0, delta)
    return reply._whole_choice(reply._choices[0])


def logprobs_of(*ids: int) -> tuple[Any, ...]:
    return tuple(types_pb2.Logprob(token_id=one, logprob=-0.5, rank=1) for one in ids)


@settings(max_examples=40, deadline=None)
@given(prompt=IDS, ids=IDS, echo=st.booleans())
def test_tokens_of_a_completion_joined_are_its_text(case: Case, prompt: list[int], ids: list[int], echo: bool) -> None:
    text, tokenizer = case
    prompt, ids = ([one % tokenizer.get_vocab_size() for one in part] for part in (prompt, ids))
    choice = completion(text, prompt, answered(text, prompt, ids), echo=echo)
    tokens = choice.logprobs.tokens
    assert "".join(tokens) == choice.text
    assert choice.logprobs.text_offset == [len("".join(tokens[:place])) for place in range(len(tokens))]
    for token, top in zip(tokens, choice.logprobs.top_logprobs, strict=True):
        assert top is None or token in top


@settings(max_examples=40, deadline=None)
@given(ids=IDS)
def test_tokens_and_bytes_of_a_chat_joined_are_its_text(case: Case, ids: list[int]) -> None:
    text, tokenizer = case
    ids = [one % tokenizer.get_vocab_size() for one in ids]
    asked = ChatRequest(model="m", messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=1)
    reply = ChatReply(asked, [Generation(GenerationRequest("request", (5,), SamplingParams()))], text, "m", 0)
    for delta in answered(text, [5], ids):
        reply.add(0, delta)
    choice = reply._whole_choice(reply._choices[0])
    assert choice.message is not None
    assert choice.logprobs is not None
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    if REPLACEMENT not in choice.message.content:
        data = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
        assert data.decode() == choice.message.content


def test_a_hidden_token_reads_as_nothing_and_an_alternative_by_its_name(tmp_path: Path) -> None:
    text = TextModel.load(model_directory(tmp_path))
    end, letter = text.encode("<|im_end|>a")
    choice = completion(text, [5], answered(text, [5], [letter, end, letter], reason="length"))
    assert choice.logprobs.tokens == ["a", "", "a"]
    assert choice.logprobs.top_logprobs == [{"a": -0.5}, {"": -0.5, "a": -0.5}, {"a": -0.5, "<|im_end|>": -0.5}]


def test_a_character_is_its_last_tokens(tmp_path: Path) -> None:
    text = TextModel.load(model_directory(tmp_path))
    face, (letter,) = text.encode("\N{ROCKET}"), text.encode("a")
    choice = completion(text, [5], answered(text, [5], [face[0], letter, *face, face[0]]))
    lone = REPLACEMENT
    assert choice.logprobs.tokens == ["", f"{lone}a", *[""] * (len(face) - 1), "\N{ROCKET}", lone]
    assert choice.logprobs.text_offset == [0, 0, *[2] * len(face), 3]
    assert choice.text == f"{lone}a\N{ROCKET}{lone}"


@pytest.mark.parametrize("include", [False, True])
def test_the_end_token_reads_as_the_text_shows_it(tmp_path: Path, include: bool) -> None:
    text = TextModel.load(model_directory(tmp_path))
    end, letter = text.encode("<|im_end|>a")
    more = {"skip_special_tokens": False, "include_stop_str_in_output": include}
    choice = completion(text, [5], answered(text, [5], [letter, end], reason="stop", **more))
    assert choice.logprobs.tokens == ["a", "<|im_end|>" if include else ""]
    assert choice.text == "".join(choice.logprobs.tokens)
