"""Types of the fields of requests: what each takes, and how much of it."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from common.text.template.chat_template import RESERVED
from router.openai.strict_json import Wire, field_kind, text_or_items

# The most that any server takes; its settings may allow less (RequestLimits).
MAX_N = 128  # answers to one prompt
MAX_STOPS = 128
MAX_STOP_CHARS = 1024  # of a stop string, and of a bad word
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 1024
MAX_ENTRIES = 8192  # of logit_bias, of stop_token_ids, of messages
MAX_PROMPTS = 2048  # of a completion
MAX_DEPTH = 32  # of values in values, where any are taken
MAX_TOOL_CALLS = 128  # of a message
MAX_VARIABLES = 64  # of chat_template_kwargs


def few(value: Any) -> Any:
    """Long containers are refused before their items are looked at."""
    if isinstance(value, (list, dict)) and len(value) > MAX_ENTRIES:
        raise PydanticCustomError("too_long", "must have at most {limit} entries", {"limit": MAX_ENTRIES})
    return value


def _few_prompts(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_PROMPTS and field_kind(value) != "<items>":
        raise PydanticCustomError("too_long", "must have at most {limit} prompts", {"limit": MAX_PROMPTS})
    return value


def _is_token_id(key: str) -> str:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10 and key == str(int(key))):
        raise PydanticCustomError("token_id", "must be named by a token id, in digits")
    return key


def _as_int(value: Any) -> Any:
    """A whole number may be written 16.0, as some languages write all their numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_shallow(value: Any) -> bool:
    """Whether a template may get it."""
    level, depth = [value], 0
    while depth <= MAX_DEPTH and (level := [item for outer in level for item in _inside(outer)]):
        depth += 1
    return depth <= MAX_DEPTH


def _shallow(value: Any) -> Any:
    if not is_shallow(value):
        raise PydanticCustomError("too_deep", "must not nest more than {limit} deep", {"limit": MAX_DEPTH})
    return value


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _free_names(values: dict[str, Any]) -> dict[str, Any]:
    for name in values:
        if name in RESERVED or not (name.isascii() and name.isidentifier()):
            raise PydanticCustomError("reserved", "can't be set for a template", {"key": name})
    return values


AsInt = BeforeValidator(_as_int)
Whole = Annotated[int, Field(ge=-(2**31), lt=2**31), AsInt]
NotNegative = Annotated[int, Field(ge=0, lt=2**31), AsInt]
Positive = Annotated[int, Field(ge=1, lt=2**31), AsInt]
TopK = Annotated[int, Field(ge=-1, lt=2**31), AsInt]
Count = Annotated[int, Field(ge=1, le=MAX_N), AsInt]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64), AsInt]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = Annotated[
    Annotated[StopString, Tag("<text>")]
    | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True), Tag("<items>")],
    Discriminator(text_or_items, "stop_kind", "must be a string or a list of strings"),
    BeforeValidator(few),
]
Bias = Annotated[float, Field(ge=-100, le=100)]
LogitBias = Annotated[
    dict[Annotated[str, AfterValidator(_is_token_id)], Bias],
    BeforeValidator(few),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_ENTRIES,
            "patternProperties": {"^(0|[1-9][0-9]{0,9})$": {"type": "number", "minimum": -100, "maximum": 100}},
            "additionalProperties": False,
        }
    ),
]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), AsInt]
StopTokenIds = Annotated[list[TokenId], Field(max_length=MAX_ENTRIES, fail_fast=True), BeforeValidator(few)]
BadWords = Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS, fail_fast=True), BeforeValidator(few)]
Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag("<texts>")]
    | Annotated[list[Tokens], Field(min_length=1, fail_fast=True), Tag("<lists>")]
    | Annotated[Tokens, Tag("<items>")],
    Discriminator(field_kind, "prompt_kind", "must be a string, strings, token ids or lists of token ids"),
    BeforeValidator(_few_prompts),
]
Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
TemplateVariables = Annotated[
    dict[str, Any],
    Field(max_length=MAX_VARIABLES),
    AfterValidator(_free_names),
    AfterValidator(_shallow),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_VARIABLES,
            "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "not": {"enum": sorted(RESERVED)}},
        }
    ),
]


class TextPart(Wire):
    """The one kind of content part that a text model reads."""

    HARMLESS = frozenset(("cache_control",))

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise PydanticCustomError("part", "is not supported: its type is {kind}, not text", {"kind": kind})
        return data


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), Tag("<items>")],
    Discriminator(text_or_items, "content_kind", "must be a string or a list of text parts"),
]
