"""Between wire messages and the engine's dataclasses, one pair of functions a noun."""

from common.engine.batch import EngineLoad, PromptScores, TokenOutput
from common.errors import InvalidRequest, KVRelayError, from_wire
from common.rpc.pb import types_pb2
from common.sampling import FinishReason, Logprob, SamplingParams


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


def scores_to_proto(scores: PromptScores, key: types_pb2.AttemptKey) -> types_pb2.PromptLogprobs:
    tokens = [types_pb2.TokenLogprobs(logprobs=map(logprob_to_proto, token)) for token in scores.logprobs]
    return types_pb2.PromptLogprobs(key=key, first=scores.first, tokens=tokens)


def scores_from_proto(message: types_pb2.PromptLogprobs) -> list[tuple[Logprob, ...]]:
    """Of the tokens from message.first on."""
    return [tuple(map(logprob_from_proto, token.logprobs)) for token in message.tokens]


def token_to_proto(token: TokenOutput) -> types_pb2.Token:
    """Without the sequence: the message around it says whose token it is."""
    return types_pb2.Token(
        fork=token.fork,
        index=token.index,
        token_id=token.sample.token_id,
        logprobs=[logprob_to_proto(logprob) for logprob in token.sample.logprobs],
        finish_reason=token.finish_reason or "",
        stop_token_id=token.stop_token_id,
    )


def finish_reason_from_proto(message: types_pb2.Token) -> FinishReason | None:
    """None: the fork goes on. Raises KVRelayError for an unknown reason."""
    if not message.finish_reason:
        return None
    try:
        return FinishReason(message.finish_reason)
    except ValueError as error:
        raise KVRelayError(f"unknown finish reason {message.finish_reason[:40]!r}", field="finish_reason") from error


def error_to_proto(error: KVRelayError) -> types_pb2.Error:
    return types_pb2.Error(code=error.code, message=error.message, field=error.field or "")


def error_from_proto(message: types_pb2.Error) -> KVRelayError:
    """The same class as on the other side; an unknown code is a plain KVRelayError."""
    return from_wire(message.code, message.message, message.field)


def load_to_proto(load: EngineLoad, *, held_blocks: int = 0, moved_bytes: int = 0) -> types_pb2.Load:
    """The engine's counts, the blocks that its service holds under leases, and what it has copied from others."""
    return types_pb2.Load(
        running=load.running,
        waiting=load.waiting,
        waiting_tokens=load.waiting_tokens,
        total_blocks=load.total_blocks,
        free_blocks=load.free_blocks,
        held_blocks=held_blocks,
        reserved_blocks=load.reserved_blocks,
        progress=load.steps + moved_bytes,
    )
