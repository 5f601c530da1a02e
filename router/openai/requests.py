"""Wire models of the OpenAI API's requests. What kvrelay can't do is refused, never ignored.

Beside OpenAI's fields come some of vLLM's, under vLLM's names.
"""

from typing import Annotated, Any, ClassVar, Literal, cast

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

from router.openai.strict_json import Neutral, Wire, field_kind, text_or_items

# The most that any server takes; its settings may allow less (RequestLimits).
MAX_N = 128  # answers to one prompt
MAX_STOPS = 128
MAX_STOP_CHARS = 1024  # of a stop string, and of a bad word
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 1024
MAX_ENTRIES = 8192  # of logit_bias and of stop_token_ids
TEXT_FORMAT = {"type": "text"}


def _few(value: Any) -> Any:
    """Long containers are refused before their items are looked at."""
    if isinstance(value, (list, dict)) and len(value) > MAX_ENTRIES:
        raise PydanticCustomError("too_long", "must have at most {limit} entries", {"limit": MAX_ENTRIES})
    return value


def _is_token_id(key: str) -> str:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10 and key == str(int(key))):
        raise PydanticCustomError("token_id", "must be named by a token id, in digits")
    return key


Whole = Annotated[int, Field(ge=-(2**31), lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = Annotated[
    Annotated[StopString, Tag("<text>")]
    | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True), Tag("<items>")],
    Discriminator(text_or_items, "stop_kind", "must be a string or a list of strings"),
    BeforeValidator(_few),
]
Bias = Annotated[float, Field(ge=-100, le=100)]
LogitBias = Annotated[
    dict[Annotated[str, AfterValidator(_is_token_id)], Bias],
    BeforeValidator(_few),
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
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
BadWords = Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS, fail_fast=True), BeforeValidator(_few)]
Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag("<texts>")]
    | Annotated[list[Tokens], Field(min_length=1, fail_fast=True), Tag("<lists>")]
    | Annotated[Tokens, Tag("<items>")],
    Discriminator(field_kind, "prompt_kind", "must be a string, strings, token ids or lists of token ids"),
]
Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class TextPart(Wire):
    """The one kind of content part that a text model reads."""

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


class Message(Wire):
    NEUTRAL: ClassVar[Neutral] = {"tool_calls": ([],), "annotations": ([],)}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content
    name: Name | None = None
    tool_call_id: Name | None = None

    def for_template(self) -> dict[str, str]:
        """Content parts are put on lines of their own, as vLLM does for templates that take strings."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        others = {"name": self.name, "tool_call_id": self.tool_call_id}
        return {"role": self.role, "content": text, **{key: value for key, value in others.items() if value}}


class StreamOptions(Wire):
    HARMLESS = frozenset(("include_obfuscation",))

    include_usage: bool = False
    continuous_usage_stats: bool = False  # in every chunk; only together with include_usage


class Request(Wire):
    """What both endpoints take. None: the model's or the endpoint's default.

    HARMLESS are the fields that OpenAI's clients add and that change no answer here.
    """

    HARMLESS = frozenset(
        ("metadata", "store", "service_tier", "user", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
    )

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    min_tokens: Annotated[Whole, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=1e4)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=1e4)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stop | None = None
    include_stop_str_in_output: bool = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_ENTRIES, fail_fast=True), BeforeValidator(_few)] = (
        Field(default_factory=list)
    )
    bad_words: BadWords = Field(default_factory=list)
    ignore_eos: bool = False
    logit_bias: LogitBias = Field(default_factory=dict)
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    priority: Whole = 0  # lower goes first
    prompt_logprobs: Logprobs | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "Request":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream", "is only allowed when stream is true", {"key": "stream_options"})
        if self.prompt_logprobs is not None and self.stream:
            raise PydanticCustomError("stream", "is not available when stream is true", {"key": "prompt_logprobs"})
        return self

    @property
    def top_count(self) -> int | None:
        """How many alternatives each token's log-probability comes with; None: not even its own is asked for."""
        raise NotImplementedError

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(Request):
    NEUTRAL: ClassVar[Neutral] = {
        "tools": ([],),
        "tool_choice": ("none",),
        "functions": ([],),
        "function_call": ("none",),
        "response_format": (TEXT_FORMAT,),
        "modalities": (["text"],),
    }

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Logprobs | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("logprobs", "is only allowed when logprobs is true", {"key": "top_logprobs"})
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError("max_tokens", "differs from max_tokens", {"key": "max_completion_tokens"})
        return self

    @property
    def top_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Request):
    NEUTRAL: ClassVar[Neutral] = {"best_of": (1,), "suffix": ("",), "response_format": (TEXT_FORMAT,)}

    prompt: Prompt
    max_tokens: Annotated[Whole, Field(ge=0)] | None = None
    echo: bool = False
    logprobs: Logprobs | None = None

    @model_validator(mode="after")
    def _only_an_echo_may_be_all(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("max_tokens", "must be at least 1 unless echo is true", {"key": "max_tokens"})
        if self.max_tokens == 0 and self.min_tokens:
            raise PydanticCustomError("min_tokens", "must be 0 when max_tokens is 0", {"key": "min_tokens"})
        return self

    @property
    def top_count(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """All prompts, be it one; each is text or token ids."""
        alone = field_kind(self.prompt) in ("<text>", "<items>")
        return cast(list[str | list[int]], [self.prompt] if alone else self.prompt)
