"""The next token: a pure function of logits, parameters, tokens so far, seed and position.

Order of the steps as in vLLM: masks and bias, penalties, temperature, min-p, top-k, top-p, draw.
Log-probabilities are of the model's own logits, before any of them.
"""

import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Sequenced
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from common.engine.batch import BadRow, Batch, PromptScores, Sample
from common.engine.sequence import Sequence
from common.sampling import Logprob, SamplingParams, fork_seed

NOT_FINITE = "the model gave logits that are not finite"
T = TypeVar("T")
LARGEST = 1e30  # of an adjusted logit: stays finite when it is divided by the smallest temperature


def uniform(seed: int, position: int) -> float:
    """The one number in [0, 1) of a seed and an output position (Philox4x64-10, Salmon et al. 2011)."""
    return float(int(np.random.Philox(key=seed, counter=position).random_raw()) >> 11) * 2.0**-53


def draw(probabilities: Tensor, number: float) -> int:
    """Inverse CDF in token order: the first token whose cumulated weight exceeds number's share of the whole."""
    cumulated = probabilities.double().cumsum(0)
    total = float(cumulated[-1])
    if not 0 < total < math.inf:
        raise ValueError(f"probabilities have the sum {total}")
    return int(torch.searchsorted(cumulated, total * number, right=True))


def adjust(logits: Tensor, params: SamplingParams, sequence: Sequence, eos_token_ids: Sequenced[int]) -> Tensor:
    """Logits [vocab] after masks, bias and penalties; the input when none applies."""
    if plain(params, sequence):
        return logits
    logits = logits.clone()
    if params.bad_words:
        logits[_ends_of_bad_words(params, sequence)] = -torch.inf
    if sequence.num_output_tokens < params.min_tokens:
        logits[[*eos_token_ids, *params.stop_token_ids]] = -torch.inf
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        logits.index_add_(0, torch.tensor(ids), torch.tensor(biases, dtype=logits.dtype))
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(sequence.token_ids)))
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty).clamp(max=LARGEST)
    if (params.frequency_penalty or params.presence_penalty) and sequence.num_output_tokens:
        written = Counter(sequence.output_ids)
        counts = torch.tensor(list(written.values()))
        logits[list(written)] -= params.frequency_penalty * counts + params.presence_penalty
    return logits


def _ends_of_bad_words(params: SamplingParams, sequence: Sequence) -> list[int]:
    """Tokens that would now complete a bad word within the output."""

    def begun(prefix: tuple[int, ...]) -> bool:
        start = max(sequence.num_tokens - len(prefix), sequence.num_prompt_tokens)
        return tuple(sequence.token_ids[start:]) == prefix

    return [word[-1] for word in params.bad_words if begun(word[:-1])]


def plain(params: SamplingParams, sequence: Sequence) -> bool:
    """Whether the model's logits decide alone, before temperature."""
    return (
        sequence.num_output_tokens >= params.min_tokens
        and not params.logit_bias
        and not params.bad_words
        and params.repetition_penalty == 1.0
        and not params.frequency_penalty
        and not params.presence_penalty
    )


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities [vocab], not normalized after truncation, of adjusted logits."""
    logits = logits / params.temperature
    probabilities = logits.softmax(0)
    keep = torch.ones_like(logits, dtype=torch.bool)
    if params.min_p > 0:
        keep &= probabilities >= params.min_p * probabilities.max()
    if 0 < params.top_k < len(logits):
        keep &= logits >= logits.topk(params.top_k).values[-1]
    if params.top_p < 1:
        truncated = torch.where(keep, probabilities, 0.0)
        ordered, order = truncated.sort(descending=True, stable=True)
        before = ordered.double().cumsum(0) - ordered.double()
        keep[order[before >= params.top_p * truncated.double().sum()]] = False
    return torch.where(keep, probabilities, 0.0)


def logprobs_of(logits: Tensor, token_id: int, count: int) -> tuple[Logprob, ...]:
    """The token's log-probability under logits [vocab], then the `count` highest."""
    values = logits.log_softmax(0)
    chosen = values[token_id]
    result = [Logprob(token_id, float(chosen), int((values > chosen).sum()) + 1)]
    if count:
        top, ids = values.topk(min(count, len(values)))
        result += [Logprob(i, v, rank + 1) for rank, (i, v) in enumerate(zip(ids.tolist(), top.tolist(), strict=True))]
    return tuple(result)


def attempt(sequence: Sequence, compute: Callable[[], T]) -> T | BadRow:
    """What comes of a row, whatever goes wrong with it."""
    try:
        return compute()
    except _NotFinite:
        return BadRow(sequence, NOT_FINITE)
    except Exception as error:
        return BadRow(sequence, "no token could be drawn", error)


class _NotFinite(Exception):
    """A row's logits are not, else its tokens would be drawn in silence."""


def take_scores(logits: Tensor, batch: Batch) -> tuple[Tensor, tuple[PromptScores | BadRow, ...]]:
    """Divides a forward pass's rows: logits [sampled rows, vocab], and what the scored rows say."""
    if not any(chunk.scored for chunk in batch.chunks):
        return logits, ()
    sampled: list[int] = []
    scores: list[PromptScores | BadRow] = []
    row = 0
    for chunk in batch.chunks:
        if chunk.scored:
            first = chunk.start + chunk.scored.start + 1
            rows = logits[row : row + len(chunk.scored)]
            scores.append(attempt(chunk.sequence, partial(_score, rows, chunk.sequence, first)))
        row += len(chunk.scored)
        sampled += range(row, row + len(chunk.sampled))
        row += len(chunk.sampled)
    return logits[sampled], tuple(scores)


def _score(rows: Tensor, sequence: Sequence, first: int) -> PromptScores:
    if not rows.amax(-1).isfinite().all():
        raise _NotFinite
    tokens, top = sequence.token_ids[first : first + len(rows)], sequence.params.prompt_logprobs or 0
    scored = (logprobs_of(row, token, top) for row, token in zip(rows, tokens, strict=True))
    return PromptScores(sequence, first, tuple(scored))


class Sampler:
    """Samples the rows of a batch, each by itself: what one sequence gets never depends on another."""

    def __init__(self, eos_token_ids: Sequenced[int]) -> None:
        self.eos_token_ids = tuple(eos_token_ids)

    def __call__(self, logits: Tensor, batch: Batch) -> list[list[Sample] | BadRow]:
        """Logits [sampled rows, vocab] float32 → for each of these rows a sample a fork."""
        sequences = [chunk.sequence for chunk in batch.chunks for _ in chunk.sampled]
        if not sequences:
            return []
        best, ids = logits.max(-1)
        rows = zip(logits, sequences, ids.tolist(), best.isfinite().tolist(), strict=True)
        return [attempt(row[1], partial(self._row, *row)) for row in rows]

    def _row(self, logits: Tensor, sequence: Sequence, best: int, finite: bool) -> list[Sample]:
        if not finite:
            raise _NotFinite
        params = sequence.params
        if params.greedy:
            if not plain(params, sequence):
                adjusted = adjust(logits, params, sequence, self.eos_token_ids)
                best = int(adjusted.argmax())
                if not adjusted[best].isfinite():
                    raise ValueError("no token is left")
            tokens = [best] * len(sequence.forks)
        else:
            weights = distribution(adjust(logits, params, sequence, self.eos_token_ids), params)
            position = sequence.num_output_tokens
            tokens = [draw(weights, uniform(fork_seed(params.seed, fork), position)) for fork in sequence.forks]
        if params.logprobs is None:
            return [Sample(token) for token in tokens]
        return [Sample(token, logprobs_of(logits, token, params.logprobs)) for token in tokens]
