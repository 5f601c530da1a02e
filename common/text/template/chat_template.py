"""A model's chat template, rendered as Hugging Face's library renders it, and nothing of a message lost in silence."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

import jinja2

from common.errors import InvalidRequest, ModelError
from common.text.template.budget import TooMuchWork, budget_for
from common.text.template.sandbox import TemplateEnvironment

MAX_TEMPLATE_CHARS = 2**18
MAX_REASON_CHARS = 300
SHAPES, SHORT = 1024, 64  # shapes of conversations that are remembered, and messages in one
DIGITS = 12  # of a mark
# What a template raises when messages are not as it wants them: its own errors, and Python's on odd types.
REFUSALS = (*(jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),)
TOO_MUCH = (TooMuchWork, RecursionError, MemoryError)
# What a client can't set: the rest of what a template gets.
RESERVED = frozenset(
    (
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "tokenize"),
        *("dict", "namespace", "raise_exception", "range", "strftime_now", "self", "loop", "caller"),
    )
)


class Shape(NamedTuple):
    """All of a message that decides whether a template writes it."""

    role: str
    has_content: bool
    num_calls: int
    others: tuple[str, ...]  # names of its other fields


class ChatTemplate:
    """Renders messages to the text that the model was trained on."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime],
        name: str = "the chat template",
    ) -> None:
        """special_tokens: bos_token, eos_token and the like, as the template names them. Raises ModelError."""
        self._name = name
        self._special_tokens = dict(special_tokens)
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"the chat template has {len(source)} characters; {MAX_TEMPLATE_CHARS} are allowed")
        environment = TemplateEnvironment(lambda pattern: now().strftime(pattern))
        try:
            self._template = environment.template(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from None
        except (SyntaxError, RecursionError, MemoryError, *REFUSALS) as error:  # Python's, of what Jinja makes of it
            raise ModelError(f"the chat template can't be compiled: {_reason(error)}") from None
        self._knows_developer = "developer" in source
        self._knows_calls = "tool_calls" in source
        self._mark = str(secrets.randbelow(10**DIGITS)).zfill(DIGITS)  # digits: no filter makes others of them
        self._unwritten = lru_cache(SHAPES)(self._find_unwritten)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Raises InvalidRequest with the template's own words when it refuses the messages.

        Raises ModelError when it asks for more work than an honest template would.
        """
        given = [self._adapted(message) for message in messages]
        try:
            return self._render(given, add_generation_prompt, variables or {})
        except TOO_MUCH as error:
            raise ModelError(f"{self._name} was stopped: {_reason(error)}", field="messages") from None
        except REFUSALS as error:
            reason = f"the chat template refuses these messages: {_reason(error)}"
            raise InvalidRequest(reason, field="messages") from error

    def check_written(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raises InvalidRequest if the template leaves out one of the messages."""
        find = self._unwritten if len(messages) <= SHORT else self._find_unwritten
        if (number := find(tuple(_shape(self._adapted(message)) for message in messages))) is not None:
            field, role = f"messages[{number}]", messages[number]["role"]
            raise InvalidRequest(f"{field}: the chat template leaves out this message, of role {role}", field=field)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        with budget_for([*messages, variables]):
            return self._template.render(
                **{
                    **variables,
                    "messages": messages,
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                    **self._special_tokens,
                }
            )

    def _adapted(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """For templates that don't know OpenAI's newer roles and fields."""
        adapted = dict(message)
        if adapted["role"] == "developer" and not self._knows_developer:
            adapted["role"] = "system"  # which it is called in older models
        if not self._knows_calls and (calls := adapted.pop("tool_calls", None)):
            texts = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
            adapted["content"] = "\n".join((*filter(None, [adapted["content"]]), *texts))
        return adapted

    def _find_unwritten(self, shapes: Sequence[Shape]) -> int | None:
        """The first message of which something isn't written, as marks in the messages' places show."""
        marks = [f"{self._mark}{number:06d}" for number in range(len(shapes))]
        try:
            text = self._render(list(map(_marked, shapes, marks)), False, {})
        except (*TOO_MUCH, *REFUSALS):
            return None  # of the marks, perhaps, and not of the roles
        for number, (shape, mark) in enumerate(zip(shapes, marks, strict=True)):
            calls_written = all(f"{mark}-{call}-" in text for call in range(shape.num_calls))
            if not (calls_written and (mark + "." in text or not shape.has_content)):
                return number
        return None


def up_to_end_of(messages: Sequence[Mapping[str, Any]], text: str) -> str:
    """A rendered conversation without what comes behind its last message's text, as Hugging Face's library cuts it."""
    content, last = messages[-1]["content"], len(messages) - 1
    found = text[::-1].find(content.strip()[::-1]) if content.strip() else -1  # rfind may take its product in time
    start = len(text) - found - len(content.strip())
    if found < 0:
        field = f"messages[{last}]"
        raise InvalidRequest(f"{field} has no text in the prompt that could be continued", field=field)
    whole = content.lstrip()
    return text[: start + len(whole if text.startswith(whole, start) else content.strip())]


def _shape(message: Mapping[str, Any]) -> Shape:
    others = sorted(message.keys() - {"role", "content", "tool_calls"})
    has_content = bool(message["content"] and not message["content"].isspace())
    return Shape(message["role"], has_content, len(message.get("tool_calls", ())), tuple(others))


def _marked(shape: Shape, mark: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": shape.role, "content": mark + "." if shape.has_content else ""}
    message |= dict.fromkeys(shape.others, "x" * 9)  # as long as Mistral's ids
    if shape.num_calls:
        message["tool_calls"] = [
            {"id": f"call{number:05d}", "type": "function", "function": {"name": f"{mark}-{number}-", "arguments": {}}}
            for number in range(shape.num_calls)
        ]
    return message


def _reason(error: BaseException) -> str:
    return str(error)[:MAX_REASON_CHARS] or type(error).__name__
