"""Wire models of the OpenAI API's requests. What kvrelay can't do is refused, never ignored.

Beside OpenAI's fields come some of vLLM's, under vLLM's names.
"""

from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError, from_json

from router.openai.fields import (
    MAX_TOOL_CALLS,
    BadWords,
    Content,
    Count,
    LogitBias,
    Logprobs,
    Name,
    NotNegative,
    Penalty,
    Positive,
    Prompt,
    Seed,
    Stop,
    StopTokenIds,
    TemplateVariables,
    TopK,
    Whole,
    few,
    is_shallow,
)
from router.openai.strict_json import Neutral, Wire, field_kind

TEXT_FORMAT = {"type": "text"}


class FunctionCall(Wire):
    name: Name
    arguments: str

    def for_template(self) -> dict[str, Any]:
        """Templates write arguments as JSON; what a model has written may be none, and stays as it is."""
        try:
            arguments = from_json(self.arguments, allow_inf_nan=False)
        except ValueError:
            arguments = None
        usable = isinstance(arguments, dict) and is_shallow(arguments)
        return {"name": self.name, "arguments": arguments if usable else self.arguments}


class ToolCall(Wire):
    """Of an earlier answer."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        return {"id": self.id or "", "type": self.type, "function": self.function.for_template()}


class Message(Wire):
    HARMLESS = frozenset(("cache_control",))
    NEUTRAL: ClassVar[Neutral] = {"annotations": ([],)}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Name | None = None
    tool_call_id: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] = Field(
        default_factory=list
    )
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name for it

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        if self.role != "assistant":
            for field in ("tool_calls", "reasoning_content", "reasoning"):
                if getattr(self, field):
                    raise PydanticCustomError("assistant", "is an assistant's only", {"key": field})
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("content", "is required", {"key": "content"})
        return self

    def for_template(self) -> dict[str, Any]:
        """Content parts are put on lines of their own, as vLLM does for templates that take strings."""
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        others = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.for_template() for call in self.tool_calls],
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        return {"role": self.role, "content": text, **{key: value for key, value in others.items() if value}}


class Conversation(Wire):
    """How messages become a prompt."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_end(self) -> "Conversation":
        if self.continue_final_message and self.add_generation_prompt:
            raise PydanticCustomError(
                "ends", "is only allowed when add_generation_prompt is false", {"key": "continue_final_message"}
            )
        return self


class StreamOptions(Wire):
    HARMLESS = frozenset(("include_obfuscation",))

    include_usage: bool = False
    continuous_usage_stats: bool = False  # in every chunk; only together with include_usage


class Request(Wire):
    """What both endpoints take. None: the model's or the endpoint's default.

    HARMLESS are fields of OpenAI's API that only hint, and change no answer here.
    """

    HARMLESS = frozenset(
        (
            *("metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention"),
            *("safety_identifier", "service_tier", "store", "user", "verbosity"),
        )
    )

    model: str | None = None
    n: Count = 1
    max_tokens: Positive | None = None
    min_tokens: NotNegative = 0
    temperature: Annotated[float, Field(ge=0, le=1e4)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=1e4)] | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    include_stop_str_in_output: bool = False
    stop_token_ids: StopTokenIds = Field(default_factory=list)
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


class ChatRequest(Conversation, Request):
    NEUTRAL: ClassVar[Neutral] = {
        "tools": ([],),
        "tool_choice": ("none",),
        "functions": ([],),
        "function_call": ("none",),
        "response_format": (TEXT_FORMAT,),
        "modalities": (["text"],),
    }

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True), BeforeValidator(few)]
    max_completion_tokens: Positive | None = None
    logprobs: bool = False
    top_logprobs: Logprobs | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None

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

    @property
    def template_variables(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **self.chat_template_kwargs}


class CompletionRequest(Request):
    NEUTRAL: ClassVar[Neutral] = {"best_of": (1,), "suffix": ("",), "response_format": (TEXT_FORMAT,)}

    prompt: Prompt
    max_tokens: NotNegative | None = None
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
