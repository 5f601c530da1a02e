"""From a submission to sequences of the engine, checked before anything runs."""

from collections.abc import Sequence as Sequenced

from common.block_hash import root_hash
from common.engine.engine import Engine
from common.engine.sequence import Sequence
from common.errors import InvalidRequest
from common.rpc.convert import params_from_proto
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
