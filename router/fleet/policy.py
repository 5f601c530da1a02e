"""Which worker gets a request: filter, score, pick. Pure functions over what the router knows.

Everything is counted in tokens. A prefill worker's score is the number of tokens it has to compute until this
prompt is done: those queued before it, and those of it that its prefix cache lacks. So a cached prefix is worth
exactly the computing that it saves, and never wins over a worker that is less busy by more than that. A pair that
rounds alike is worth as much as the whole context.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from common.block_hash import BLOCK_SIZE

HANDOVER_S = 0.005  # from a claim to its confirmation, between processes of one host


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as the router sees it at this moment."""

    worker_id: str
    fingerprint: str
    healthy: bool = True
    draining: bool = False
    charged_tokens: int = 0  # of requests dispatched here that no report counts yet
    reported_tokens: int = 0  # that the worker has to compute, by its last report
    in_flight: int = 0  # requests
    free_blocks: int = 0  # by its last report
    total_blocks: int = 0  # 0: not known yet
    prefix_blocks: int = 0  # of this prompt, expected ones included
    failed: bool = False  # this request was there before, in vain
    running: int = 0  # sequences, by its last report
    token_s: float = 0.0  # a prompt's token there takes, as measured; 0: not known
    step_s: float = 0.0  # a step of few tokens takes
    mixed: bool = False  # whom it would be paired with rounds otherwise


def pick_prefill(
    candidates: Iterable[Candidate],
    prompt_tokens: int,
    *,
    fingerprints: Collection[str] | None = None,
    turn: int = 0,
) -> Candidate | None:
    """Who is done with this prompt first; None when nobody can take it.

    `fingerprints` are those that some decode worker has (None: any will do). `turn` decides between equals: a
    counter for round-robin, or a random number.
    """

    def tokens_until_done(worker: Candidate) -> int:
        return _queued(worker) + prompt_tokens - _cached(worker, prompt_tokens)

    return _pick(candidates, prompt_tokens, fingerprints, tokens_until_done, turn)


def pick_decode(
    candidates: Iterable[Candidate],
    context_tokens: int,
    *,
    output_tokens: int = 0,
    fingerprint: str | None = None,
    turn: int = 0,
) -> Candidate | None:
    """Who would hold the fewest tokens with this sequence; None when nobody can take it.

    `context_tokens` are to be brought there, `output_tokens` (an estimate) are to come. Its fingerprint is the
    prefill worker's.
    """

    def tokens_held(worker: Candidate) -> int:
        held = (worker.total_blocks - worker.free_blocks) * BLOCK_SIZE
        return held + _queued(worker) + context_tokens - _cached(worker, context_tokens)

    fingerprints = None if fingerprint is None else (fingerprint,)
    return _pick(candidates, context_tokens + output_tokens, fingerprints, tokens_held, turn)


def goes_unsplit(prefill: Candidate | None, decode: Candidate, num_tokens: int, *, most_tokens: int) -> str:
    """Why the decode worker should compute the prompt itself, in one word; "": it should not.

    It should, if there is nobody else, or if everybody together loses less time by it: a token of the prompt there
    delays all sequences that run, and saves the hand-over. Prompts with more than `most_tokens` that are not cached
    there are never worth a long step in which nobody else gets a token.
    """
    if prefill is None:
        return "alone"
    uncached = num_tokens - _cached(decode, num_tokens)
    if uncached > most_tokens or not (prefill.token_s and decode.token_s):
        return ""
    unsplit_s = (_queued(decode) + uncached * (1 + decode.running)) * decode.token_s
    hop_s = (_queued(prefill) + num_tokens - _cached(prefill, num_tokens)) * prefill.token_s
    return "quicker" if unsplit_s < hop_s + HANDOVER_S + decode.step_s else ""


def _pick(
    candidates: Iterable[Candidate],
    num_tokens: int,
    fingerprints: Collection[str] | None,
    score: Callable[[Candidate], int],
    turn: int,
) -> Candidate | None:
    """The lowest score of those with room, else of those that must make room first; then fewest in flight.

    Who has failed this request comes after all others: a sick worker is idle, and would draw it again and again.
    """
    needed = -(-num_tokens // BLOCK_SIZE)

    def available(worker: Candidate) -> bool:
        fits = not worker.total_blocks or needed <= worker.total_blocks
        paired = fingerprints is None or worker.fingerprint in fingerprints
        return worker.healthy and not worker.draining and paired and fits

    def has_to_wait(worker: Candidate) -> bool:
        promised = -(-worker.charged_tokens // BLOCK_SIZE)
        new = needed - _cached(worker, num_tokens) // BLOCK_SIZE
        return bool(worker.total_blocks) and promised + new > worker.free_blocks

    ranked = [
        ((worker.failed, has_to_wait(worker), score(worker) + worker.mixed * num_tokens, worker.in_flight), worker)
        for worker in filter(available, candidates)
    ]
    if not ranked:
        return None
    lowest = min(rank for rank, _ in ranked)
    equals = sorted((worker for rank, worker in ranked if rank == lowest), key=lambda worker: worker.worker_id)
    return equals[turn % len(equals)]


def _queued(worker: Candidate) -> int:
    return worker.charged_tokens + worker.reported_tokens


def _cached(worker: Candidate, num_tokens: int) -> int:
    """Tokens that a prefix hit saves: whole blocks, and never the last token, whose logits are needed."""
    return min(worker.prefix_blocks, max(0, num_tokens - 1) // BLOCK_SIZE) * BLOCK_SIZE
