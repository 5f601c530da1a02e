"""From a submission to sequences of the engine, checked before anything runs."""

from collections.abc import Sequence as Sequenced

from common.block_hash import root_hash
from common.convert import params_from_proto
from common.engine.engine import Engine
from common.engine.sequence import Sequence
from common.errors import InvalidRequest
from common.rpc import types_pb2


def sequences_of(
    submission: types_pb2.Submission, *, key: str, engine: Engine, model_revision: str, vocab_size: int
) -> list[Sequence]:
    """A sequence for each group of forks with the same output so far; on a first attempt that is one.

    Raises InvalidRequest.
    """
    params = params_from_proto(submission.params)
    params.validate(vocab_size)
    groups: dict[tuple[int, ...], list[int]] = {}
    for fork in submission.forks:
        groups.setdefault(tuple(fork.output_ids), []).append(fork.index)
    prompt = list(submission.prompt_ids)
    _check_ids(prompt, vocab_size, "prompt_ids")
    root = root_hash(model_revision, cache_salt=submission.cache_salt)
    sequences = []
    for output, forks in groups.items():
        _check_ids(output, vocab_size, "forks")
        tokens = prompt + list(output)
        engine.check(len(tokens), len(submission.forks))
        sequences.append(Sequence(key, tokens, len(prompt), params, forks=tuple(forks), root=root))
    if not sequences:
        raise InvalidRequest("no fork is to be answered", field="forks")
    return sequences


def _check_ids(ids: Sequenced[int], vocab_size: int, field: str) -> None:
    if ids and max(ids) >= vocab_size:
        raise InvalidRequest(f"{field} has token {max(ids)}, beyond {vocab_size} tokens", field=field)
