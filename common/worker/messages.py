"""Between wire messages and the engine: a submission becomes sequences, checked first; their tokens become messages."""

from collections.abc import Sequence as Sequenced

from common.block_hash import root_hash
from common.engine.batch import EngineLoad, PromptScores, TokenOutput
from common.engine.engine import Engine
from common.engine.sequence import Sequence
from common.errors import InvalidRequest
from common.rpc.convert import finish_reason_to_proto, logprob_to_proto, params_from_proto
from common.rpc.pb import types_pb2
from common.sampling import SamplingParams


def sequences_of(
    submission: types_pb2.Submission, *, key: str, engine: Engine, model_revision: str, vocab_size: int
) -> list[Sequence]:
    """A sequence for each group of forks with the same output so far; on a first attempt that is one.

    Raises InvalidRequest.
    """
    params = params_from_proto(submission.params)
    params.validate(vocab_size)
    prompt = list(submission.prompt_ids)
    if not prompt:
        raise InvalidRequest("prompt is empty", field="prompt_ids")
    _check_ids(prompt, vocab_size, "prompt_ids")
    _check_forks(submission.forks, params, vocab_size)
    groups: dict[tuple[int, ...], list[int]] = {}
    for fork in submission.forks:
        groups.setdefault(tuple(fork.output_ids), []).append(fork.index)
    for output in groups:
        engine.check(len(prompt) + len(output), len(submission.forks))
    root = root_hash(model_revision, cache_salt=submission.cache_salt)
    return [
        Sequence(key, [*prompt, *output], len(prompt), params, forks=tuple(forks), root=root)
        for output, forks in groups.items()
    ]


def token_to_proto(token: TokenOutput) -> types_pb2.Token:
    """Without the sequence: the message around it says whose token it is."""
    return types_pb2.Token(
        fork=token.fork,
        index=token.index,
        token_id=token.sample.token_id,
        logprobs=[logprob_to_proto(logprob) for logprob in token.sample.logprobs],
        finish_reason=finish_reason_to_proto(token.finish_reason),
        stop_token_id=token.stop_token_id,
    )


def scores_to_proto(scores: PromptScores, key: types_pb2.AttemptKey) -> types_pb2.PromptLogprobs:
    tokens = [types_pb2.TokenLogprobs(logprobs=map(logprob_to_proto, token)) for token in scores.logprobs]
    return types_pb2.PromptLogprobs(key=key, first=scores.first, tokens=tokens)


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


def _check_forks(forks: Sequenced[types_pb2.Fork], params: SamplingParams, vocab_size: int) -> None:
    if not forks:
        raise InvalidRequest("no fork is to be answered", field="forks")
    if len({fork.index for fork in forks}) != len(forks):
        raise InvalidRequest("a fork comes twice", field="forks")
    for fork in forks:
        _check_ids(fork.output_ids, vocab_size, "forks")
        if len(fork.output_ids) >= params.max_tokens:
            raise InvalidRequest(f"fork {fork.index} has all its {params.max_tokens} tokens", field="forks")


def _check_ids(ids: Sequenced[int], vocab_size: int, field: str) -> None:
    if ids and max(ids) >= vocab_size:
        raise InvalidRequest(f"{field} has token {max(ids)}, beyond {vocab_size} tokens", field=field)
