"""Requests become generations with the right defaults, and lengths are checked to the token."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from common.errors import ContextLengthExceeded, InvalidRequest
from common.sampling import SamplingParams
from common.text.bad_words import bad_word_tokens
from common.text.text_model import TextModel
from router.config import RequestLimits
from router.openai.request_builder import RequestBuilder
from router.openai.requests import ChatRequest, CompletionRequest
from router.openai.strict_json import parse
from router.pipeline.generation import GenerationRequest
from tests.support.tiny_text import byte_level, model_directory

MAX_MODEL_LEN = 64
LIMITS = RequestLimits()
RECOMMENDED = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(model_directory(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def recommending(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(model_directory(tmp_path_factory.mktemp("model"), generation=RECOMMENDED))


def chat(text: TextModel, **fields: Any) -> GenerationRequest:
    messages = [{"role": "user", "content": "hello"}]
    request = parse(ChatRequest, json.dumps({"model": "m", "messages": messages, **fields}).encode())
    (generation,) = RequestBuilder(text, MAX_MODEL_LEN, ("m", "alias")).chat(request)
    return generation


def completions(text: TextModel, **fields: Any) -> list[GenerationRequest]:
    request = parse(CompletionRequest, json.dumps({"model": "m", "prompt": [5], **fields}).encode())
    return RequestBuilder(text, MAX_MODEL_LEN, ("m", "alias")).completion(request)


def test_every_field_reaches_the_pipeline(text: TextModel) -> None:
    generation = chat(
        text,
        n=3,
        max_tokens=7,
        min_tokens=2,
        temperature=0.25,
        top_p=0.5,
        top_k=5,
        min_p=0.125,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        seed=11,
        logit_bias={"5": -100, "7": 1.5},
        logprobs=True,
        top_logprobs=4,
        stop_token_ids=[9],
        ignore_eos=True,
        stop=["a", "b"],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        cache_salt="salt",
        bad_words=["x"],
        priority=-3,
        prompt_logprobs=6,
    )
    assert generation.params == SamplingParams(
        max_tokens=7,
        min_tokens=2,
        temperature=0.25,
        top_p=0.5,
        top_k=5,
        min_p=0.125,
        presence_penalty=1.0,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        seed=11,
        logit_bias=((5, -100.0), (7, 1.5)),
        logprobs=4,
        stop_token_ids=(9,),
        ignore_eos=True,
        bad_words=bad_word_tokens(["x"], text),
        prompt_logprobs=6,
    )
    assert generation.prompt_ids == tuple(text.encode_chat([{"role": "user", "content": "hello"}]))
    assert (generation.n, generation.stop, generation.cache_salt) == (3, ("a", "b"), "salt")
    assert (generation.priority, generation.echo) == (-3, None)
    assert (generation.include_stop_str_in_output, generation.skip_special_tokens) == (True, False)


def test_the_models_recommendation_is_the_default_and_the_client_overrides_it(recommending: TextModel) -> None:
    params = chat(recommending).params
    assert {name: getattr(params, name) for name in RECOMMENDED} == RECOMMENDED
    own = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    params = chat(recommending, **own).params
    assert {name: getattr(params, name) for name in own} == own


def test_without_any_wish_the_distribution_is_the_models(text: TextModel) -> None:
    params = chat(text, seed=0).params
    assert params == SamplingParams(max_tokens=params.max_tokens)


@pytest.mark.parametrize(("top_k", "wanted"), [(-1, 0), (0, 0), (1, 1)])
def test_top_k_is_off_at_minus_one_and_zero(recommending: TextModel, top_k: int, wanted: int) -> None:
    assert chat(recommending, top_k=top_k).params.top_k == wanted


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 20}, 20)],
)
def test_logprobs_of_chat(text: TextModel, fields: dict[str, Any], logprobs: int | None) -> None:
    assert chat(text, **fields).params.logprobs == logprobs


def test_seed_is_drawn_for_each_prompt_where_none_is_given(text: TextModel) -> None:
    seeds = {generation.params.seed for generation in completions(text, prompt=[[5]] * 20)}
    assert len(seeds) == 20
    assert {generation.params.seed for generation in completions(text, prompt=[[5], [6]], seed=3)} == {3}
    assert chat(text, seed=-1).params.seed == 2**64 - 1


def test_every_generation_has_an_id_of_its_own(text: TextModel) -> None:
    assert len({generation.request_id for generation in completions(text, prompt=[[5]] * 20)}) == 20


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1e5),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("logit_bias", {"1024": 1}),
        ("stop_token_ids", [1024]),
        ("min_tokens", 500),
    ],
)
def test_value_out_of_range_is_named(text: TextModel, field: str, value: Any) -> None:
    for ask in (chat, completions):
        with pytest.raises(InvalidRequest) as caught:
            ask(text, **{field: value})
        assert caught.value.field == field


def test_a_bias_out_of_range_is_named_by_its_token(text: TextModel) -> None:
    for ask in (chat, completions):
        with pytest.raises(InvalidRequest) as caught:
            ask(text, logit_bias={"1": 101})
        assert caught.value.field == "logit_bias.1"


def test_tiny_positive_number_stays_positive_in_32_bits(text: TextModel) -> None:
    params = chat(text, top_p=1e-300).params
    assert struct.unpack("f", struct.pack("f", params.top_p))[0] > 0


@pytest.mark.parametrize(("length", "room"), [(MAX_MODEL_LEN - 2, 2), (MAX_MODEL_LEN - 1, 1), (MAX_MODEL_LEN, 0)])
def test_prompt_leaves_room_for_a_token(text: TextModel, length: int, room: int) -> None:
    if room:
        assert completions(text, prompt=[5] * length)[0].params.max_tokens == room
        return
    with pytest.raises(ContextLengthExceeded, match=rf"{MAX_MODEL_LEN} tokens; prompt has {length}") as caught:
        completions(text, prompt=[5] * length)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize("excess", [-1, 0, 1])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_explicit_max_tokens_must_fit(text: TextModel, field: str, excess: int) -> None:
    prompt = len(chat(text).prompt_ids)
    asked = MAX_MODEL_LEN - prompt + excess
    if excess <= 0:
        assert chat(text, **{field: asked}).params.max_tokens == asked
        return
    with pytest.raises(ContextLengthExceeded, match=rf"{field} is {asked}.* {prompt}, .*leaves {asked - 1}") as caught:
        chat(text, **{field: asked})
    assert caught.value.field == field


def test_absent_max_tokens_is_the_rest_for_chat_and_16_for_completions(text: TextModel) -> None:
    generation = chat(text)
    assert len(generation.prompt_ids) + generation.params.max_tokens == MAX_MODEL_LEN
    assert completions(text)[0].params.max_tokens == 16


def test_min_tokens_must_fit_into_what_is_left(text: TextModel) -> None:
    rest = chat(text).params.max_tokens
    assert chat(text, min_tokens=rest).params.min_tokens == rest
    with pytest.raises(InvalidRequest) as caught:
        chat(text, min_tokens=rest + 1)
    assert caught.value.field == "min_tokens"


def test_long_chat_is_named(text: TextModel) -> None:
    for content in ("word " * 100, "x" * 100_000):
        with pytest.raises(ContextLengthExceeded) as caught:
            chat(text, messages=[{"role": "user", "content": content}])
        assert caught.value.field == "messages"


@pytest.mark.parametrize("prompt", ["", ["a", ""]])
def test_empty_prompt_is_refused(text: TextModel, prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="empty") as caught:
        completions(text, prompt=prompt)
    assert caught.value.field == ("prompt" if isinstance(prompt, str) else "prompt[1]")


@pytest.mark.parametrize(
    ("prompt", "field"), [([1023, 1024], "prompt"), ([[5], [1024]], "prompt[1]"), ([[5], [1023]], None)]
)
def test_token_beyond_the_vocabulary_is_refused(text: TextModel, prompt: Any, field: str | None) -> None:
    if field is None:
        assert [generation.prompt_ids for generation in completions(text, prompt=prompt)] == [(5,), (1023,)]
        return
    with pytest.raises(InvalidRequest, match="1024") as caught:
        completions(text, prompt=prompt)
    assert caught.value.field == field


def test_token_that_only_the_tokenizer_has_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level()
    small = TextModel.load(
        model_directory(tmp_path, tokenizer=tokenizer, config={"vocab_size": tokenizer.get_vocab_size() - 1})
    )
    with pytest.raises(InvalidRequest, match="prompt has token"):
        completions(small, prompt="</think>")


@pytest.mark.parametrize("excess", [0, 1])
def test_answers_of_one_request_are_limited(text: TextModel, excess: int) -> None:
    prompts = [[5]] * (LIMITS.max_answers // LIMITS.max_n + excess)
    if not excess:
        assert len(completions(text, prompt=prompts, n=LIMITS.max_n)) == LIMITS.max_answers // LIMITS.max_n
        return
    with pytest.raises(InvalidRequest, match=str(LIMITS.max_answers)):
        completions(text, prompt=prompts, n=LIMITS.max_n)
