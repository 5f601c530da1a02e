"""Wire models of the OpenAI API's replies, whole and in chunks."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from common.errors import KVRelayError, Overloaded
from router.pipeline.generation import Report


class CachedTokens(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    """Counted over all prompts of a request, a prompt once whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens

    @classmethod
    def of(cls, reports: Sequence[Report], completion: int | None = None) -> "Usage":
        """completion: the answers' tokens so far, where they are not the reports'."""
        prompt = sum(report.prompt_tokens for report in reports)
        if completion is None:
            completion = sum(report.completion_tokens for report in reports)
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=CachedTokens(cached_tokens=sum(report.cached_tokens for report in reports)),
        )


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]  # None: the first of a prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # characters of the text before the token's


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


class ChatMessage(BaseModel):
    """Also a chunk's delta, with what is new in it."""

    role: str = "assistant"
    content: str = ""


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage | None = None
    delta: ChatMessage | None = None
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


ChoiceType = TypeVar("ChoiceType", ChatChoice, CompletionChoice)


class Body(BaseModel, Generic[ChoiceType]):
    """A reply or a chunk of one. `kvrelay` is what the request took, for whoever asks with X-KVRelay-Report."""

    id: str
    object: str
    created: int  # Unix time, seconds
    model: str
    choices: list[ChoiceType]
    usage: Usage | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None  # of a chat; a completion's are in its choices
    kvrelay: dict[str, Any] | list[dict[str, Any]] | None = None


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail

    @classmethod
    def of(cls, error: KVRelayError) -> "ErrorBody":
        if isinstance(error, Overloaded):
            kind = "rate_limit_error"
        else:
            kind = "invalid_request_error" if 400 <= error.http_status < 499 else "server_error"
        param = None if error.public else error.field  # of messages between our own processes
        return cls(error=ErrorDetail(message=error.told, type=kind, param=param, code=error.code))


def server_timing(reports: Sequence[Report]) -> dict[str, str]:
    """The header that tells where the time went, milliseconds, as far as it is known; of the prompt that took longest.

    A hand-over and the wait at the decode worker are over before a whole reply, and not before a stream's headers.
    """
    spans = {
        "queue": max(report.router_queue_s + report.prefill_queue_s for report in reports),
        "prefill": max(report.prefill_s for report in reports),
    }
    if any(report.transport for report in reports):
        spans["handover"] = max(report.handover_s for report in reports)
        spans["decode-queue"] = max(report.decode_queue_s for report in reports)
    return {"Server-Timing": ", ".join(f"{name};dur={seconds * 1e3:.1f}" for name, seconds in spans.items())}
