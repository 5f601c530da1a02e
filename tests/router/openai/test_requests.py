"""Every field of a request is checked by type and range, and what kvrelay can't do is refused by name."""

import json
from typing import Any

import pytest

from common.errors import InvalidRequest
from router.openai.fields import MAX_ENTRIES, MAX_N, MAX_STOP_CHARS, MAX_STOPS
from router.openai.requests import ChatRequest, CompletionRequest, Request
from router.openai.strict_json import parse

HELLO = {"role": "user", "content": "hello"}


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"model": "m", "messages": [HELLO], **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"model": "m", "prompt": "hello", **fields}).encode())


def refusal(kind: type[Request], **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields) if kind is ChatRequest else completion(**fields)
    assert len(caught.value.message) < 600
    return caught.value


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("model", ["m", "a/b"], [1, True, ["m"]]),
        ("n", [1, MAX_N], [0, -1, MAX_N + 1, 1.5, "1", True]),
        ("max_tokens", [1, 2**31 - 1, 5.0], [0, -1, 2**31, 10**30, 1e30, "5", 5.5, True]),
        ("min_tokens", [0, 1], [-1, "0", True, 10**30]),
        ("temperature", [0, 0.5, 1], ["0.5", True, [0.5], 10**400]),
        ("top_p", [0.5, 1], ["1", True]),
        ("top_k", [-1, 0, 40], [-2, 1.5, "40", True, 2**31]),
        ("min_p", [0, 0.1], ["0.1", False]),
        ("presence_penalty", [-2, 0.5], ["0", True]),
        ("frequency_penalty", [-2, 0.5], ["0", True]),
        ("repetition_penalty", [1, 1.1], ["1", True]),
        ("seed", [0, -1, -(2**63), 2**64 - 1], [2**64, -(2**63) - 1, 1.5, "1", True]),
        ("stop", ["a", ["a", "b"], [], ["a"] * MAX_STOPS, "x" * MAX_STOP_CHARS], ["", 5, {}, ["a"] * (MAX_STOPS + 1)]),
        ("include_stop_str_in_output", [True, False], ["true", 1, 0]),
        ("stop_token_ids", [[], [0, 5]], [5, "5", {}, [1] * (MAX_ENTRIES + 1)]),
        ("ignore_eos", [True], ["true", 1]),
        ("logit_bias", [{}, {"5": 1, "0": -100.0}], [[], 5, "x"]),
        ("skip_special_tokens", [False], ["no", 0]),
        ("stream", [True, False], ["true", 1]),
        ("cache_salt", ["a", "a" * 1024], ["", "a" * 1025, 5]),
        ("priority", [0, -1, 2**31 - 1], [0.5, "1", True, 2**31]),
        ("prompt_logprobs", [0, 20], [-1, 21, "1", True, 0.5]),
        ("bad_words", [[], ["a"], [" a"] * 1024], ["a", {}, ["a"] * 1025]),
    ],
)
def test_field_takes_its_type_and_range(kind: type[Request], field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        parsed = chat(**{field: value}) if kind is ChatRequest else completion(**{field: value})
        assert getattr(parsed, field) == value
    for value in bad:
        assert refusal(kind, **{field: value}).field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": "x" * (MAX_STOP_CHARS + 1)}, "stop"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
        ({"logit_bias": {"01": 1}}, "logit_bias.01"),
        ({"logit_bias": {"٣": 1}}, "logit_bias.٣"),
        ({"logit_bias": {"1": "1"}}, "logit_bias.1"),
        ({"logit_bias": {str(key): 1 for key in range(MAX_ENTRIES + 1)}}, "logit_bias"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [HELLO, {"role": "robot", "content": "a"}]}, "messages[1].role"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
        ({"messages": [{**HELLO, "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{**HELLO, "other": 1}]}, "messages[0].other"),
        ({"messages": [{**HELLO, "name": ""}]}, "messages[0].name"),
    ],
)
def test_chat_names_the_wrong_field(fields: dict[str, Any], field: str) -> None:
    assert refusal(ChatRequest, **fields).field == field


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "refusal"])
def test_part_that_is_no_text_is_named(kind: str) -> None:
    parts = [{"type": "text", "text": "look"}, {"type": kind, kind: {"url": "data:"}}]
    error = refusal(ChatRequest, messages=[{"role": "user", "content": parts}])
    assert error.field == "messages[0].content[1]"
    assert kind in error.message


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (None, "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([True], "prompt[0]"),
        ([1.0], "prompt[0]"),
        ([1, "a"], "prompt[1]"),
        ([1, -1], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([[1, 2], [3, "a"]], "prompt[1][1]"),
        ([{}], "prompt[0]"),
    ],
)
def test_completion_names_the_wrong_prompt(prompt: Any, field: str) -> None:
    assert refusal(CompletionRequest, prompt=prompt).field == field


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([0], [[0]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_every_form_of_prompt_is_a_list_of_prompts(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("kind", "field", "value", "allowed"),
    [
        (ChatRequest, "tools", [{"type": "function"}], []),
        (ChatRequest, "tool_choice", "auto", "none"),
        (ChatRequest, "functions", [{}], []),
        (ChatRequest, "function_call", "auto", "none"),
        (ChatRequest, "response_format", {"type": "json_object"}, {"type": "text"}),
        (ChatRequest, "modalities", ["text", "audio"], ["text"]),
        (ChatRequest, "audio", {"voice": "alloy"}, None),
        (ChatRequest, "web_search_options", {}, None),
        (CompletionRequest, "best_of", 2, 1),
        (CompletionRequest, "best_of", True, 1),
        (CompletionRequest, "suffix", "x", ""),
        (CompletionRequest, "response_format", {"type": "json_schema"}, {"type": "text"}),
    ],
)
def test_unsupported_field_is_refused_unless_it_asks_for_nothing(
    kind: type[Request], field: str, value: Any, allowed: Any
) -> None:
    error = refusal(kind, **{field: value})
    assert (error.field, "not supported" in error.message) == (field, True)
    ask = chat if kind is ChatRequest else completion
    assert ask(**{field: allowed}) == ask() == ask(**{field: None})


@pytest.mark.parametrize(
    "field",
    [
        "guided_json",
        "guided_regex",
        "structured_outputs",
        "kv_transfer_params",
        "request_id",
        "max_token",
        "x",
    ],
)
@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_unknown_field_is_refused(kind: type[Request], field: str) -> None:
    assert refusal(kind, **{field: 1}).field == field


def test_completions_have_no_field_of_chat() -> None:
    for field in ("messages", "max_completion_tokens", "top_logprobs"):
        assert refusal(CompletionRequest, **{field: 1}).field == field


@pytest.mark.parametrize(
    "field",
    [
        *("metadata", "store", "service_tier", "user", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"),
        *("verbosity", "prediction", "prompt_cache_retention"),
    ],
)
def test_harmless_field_is_taken(field: str) -> None:
    assert chat(**{field: {"a": [1]}}) == chat()
    assert completion(**{field: "x"}) == completion()


@pytest.mark.parametrize("field", [name for name in ChatRequest.model_fields if name not in ("model", "messages")])
def test_null_is_the_default(field: str) -> None:
    assert chat(**{field: None}) == chat()


def test_content_parts_and_names_reach_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts, "name": "u"}, {"role": "tool", "content": "c", "tool_call_id": "t"}]
    assert [message.for_template() for message in chat(messages=messages).messages] == [
        {"role": "user", "content": "a\nb", "name": "u"},
        {"role": "tool", "content": "c", "tool_call_id": "t"},
    ]


def test_stop_is_always_a_tuple() -> None:
    assert (chat().stops, chat(stop="a").stops, chat(stop=["a", "b"]).stops) == ((), ("a",), ("a", "b"))


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 16.0},
        {"n": 2.0},
        {"seed": -5.0},
        {"seed": 1e18},
        {"top_k": -1.0},
        {"logprobs": True, "top_logprobs": 3.0},
        {"priority": -2.0},
        {"min_tokens": 0.0},
    ],
)
def test_a_whole_number_may_be_written_as_a_float(fields: dict[str, Any]) -> None:
    request = chat(**fields)
    for field, value in fields.items():
        assert getattr(request, field) == value
        assert type(getattr(request, field)) is type(int(value)) or field == "logprobs"


def test_a_byte_order_mark_before_the_body_is_skipped() -> None:
    body = json.dumps({"messages": [HELLO]}).encode()
    assert parse(ChatRequest, b"\xef\xbb\xbf" + body) == parse(ChatRequest, body)


ARGUMENTS = '{"city": "Paris", "days": [1, 2]}'
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}


@pytest.mark.parametrize(
    ("sent", "given"),
    [
        ({"content": "a", "refusal": None, "annotations": [], "audio": None}, {"content": "a"}),
        ({"content": "a", "reasoning_content": "hm"}, {"content": "a", "reasoning_content": "hm"}),
        ({"content": "a", "reasoning": "hm"}, {"content": "a", "reasoning_content": "hm"}),
        ({"content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}, {"content": "a"}),
        (
            {"content": None, "tool_calls": [CALL], "function_call": None},
            {
                "content": "",
                "tool_calls": [
                    {**CALL, "function": {"name": "weather", "arguments": {"city": "Paris", "days": [1, 2]}}}
                ],
            },
        ),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": "{broken"}}]},
            {
                "content": "",
                "tool_calls": [{"id": "", "type": "function", "function": {"name": "f", "arguments": "{broken"}}],
            },
        ),
    ],
)
def test_an_earlier_answer_is_taken_as_clients_send_it_back(sent: dict[str, Any], given: dict[str, Any]) -> None:
    (message,) = chat(messages=[{"role": "assistant", **sent}]).messages
    assert message.for_template() == {"role": "assistant", **given}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs.a b"),
        ({"chat_template_kwargs": {"x": json.loads("[" * 40 + "]" * 40)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"reasoning_effort": "a lot"}, "reasoning_effort"),
        ({"messages": [{**HELLO, "reasoning_content": "x"}]}, "messages[0].reasoning_content"),
        ({"messages": [{**HELLO, "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ],
)
def test_what_a_template_can_not_be_given_is_named(fields: dict[str, Any], field: str) -> None:
    assert refusal(ChatRequest, **fields).field == field


def test_variables_of_the_template_win_over_the_field_of_the_api() -> None:
    assert chat(reasoning_effort="low").template_variables == {"reasoning_effort": "low"}
    asked = {"reasoning_effort": "high", "enable_thinking": False}
    assert chat(reasoning_effort="low", chat_template_kwargs=asked).template_variables == asked
    assert chat().template_variables == {}
