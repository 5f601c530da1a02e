"""Between wire messages and what both sides know beneath them, one pair of functions a noun."""

from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.message import Message

from common.errors import InvalidRequest, KVRelayError, from_wire
from common.rpc.pb import types_pb2
from common.sampling import FinishReason, Logprob, SamplingParams

Envelope = TypeVar("Envelope", bound=Message)
FINISH_REASONS = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
}
FINISHED = {number: reason for reason, number in FINISH_REASONS.items()}


def envelopes(kind: type[Envelope]) -> Callable[[Message], Envelope]:
    """Puts a message into such an envelope (a command or an event), under the one field of its type."""
    [oneof] = kind.DESCRIPTOR.oneofs
    names = {field.message_type.full_name: field.name for field in oneof.fields if field.message_type is not None}
    return lambda message: kind(**{names[message.DESCRIPTOR.full_name]: message})


def content_of(envelope: Message) -> Any:
    """The message in a command or an event, to be matched by its type; None: nothing, or what only newer peers know."""
    name = envelope.WhichOneof(envelope.DESCRIPTOR.oneofs[0].name)
    return None if name is None else getattr(envelope, name)


def params_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    """Raises InvalidRequest for a count that the wire can't carry; validate() has no upper bound for it."""
    for name in ("max_tokens", "min_tokens"):
        if not 0 <= getattr(params, name) < 2**32:
            raise InvalidRequest(f"{name} must be below 2^32, got {getattr(params, name)}", field=name)
    return types_pb2.SamplingParams(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=params.seed,
        logit_bias=[types_pb2.LogitBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias],
        logprobs=params.logprobs,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        bad_words=[types_pb2.TokenIds(ids=word) for word in params.bad_words],
        prompt_logprobs=params.prompt_logprobs,
    )


def params_from_proto(message: types_pb2.SamplingParams) -> SamplingParams:
    """Not validated; only a worker knows the vocabulary."""
    return SamplingParams(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        seed=message.seed,
        logit_bias=tuple((item.token_id, item.bias) for item in message.logit_bias),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


def logprob_to_proto(logprob: Logprob) -> types_pb2.Logprob:
    return types_pb2.Logprob(token_id=logprob.token_id, logprob=logprob.logprob, rank=logprob.rank)


def logprob_from_proto(message: types_pb2.Logprob) -> Logprob:
    return Logprob(message.token_id, message.logprob, message.rank)


def scores_from_proto(message: types_pb2.PromptLogprobs) -> list[tuple[Logprob, ...]]:
    """Of the tokens from message.first on."""
    return [tuple(map(logprob_from_proto, token.logprobs)) for token in message.tokens]


def finish_reason_to_proto(reason: FinishReason | None) -> types_pb2.FinishReason:
    return types_pb2.FINISH_REASON_UNSPECIFIED if reason is None else FINISH_REASONS[reason]


def finish_reason_from_proto(message: types_pb2.Token) -> FinishReason | None:
    """None: the fork goes on. Raises KVRelayError for an unknown reason."""
    number = message.finish_reason
    if number == types_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    if number not in FINISHED:
        raise KVRelayError(f"unknown finish reason {number}", field="finish_reason")
    return FINISHED[number]


def error_to_proto(error: KVRelayError) -> types_pb2.Error:
    return types_pb2.Error(code=error.code, message=error.message, field=error.field or "")


def error_from_proto(message: types_pb2.Error) -> KVRelayError:
    """The same class as on the other side; an unknown code is a plain KVRelayError."""
    return from_wire(message.code, message.message, message.field)
