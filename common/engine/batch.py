"""What one step computes and what came of it: plain data, complete when built."""

from collections.abc import Iterable
from dataclasses import dataclass

from common.engine.sequence import Sequence
from common.errors import KVRelayError
from common.sampling import FinishReason, Logprob


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The next len(token_ids) tokens of one sequence; their KV goes into its blocks at `start`."""

    sequence: Sequence
    start: int  # position of the first token: all before it are computed
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]  # cover positions 0 .. start + len(token_ids) - 1
    sampled: range = range(0)  # of token_ids: their logits decide the tokens behind them, such as the sequence's next
    scored: range = range(0)  # of token_ids: their logits give the prompt tokens behind them log-probabilities


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. `copies` (source, destination block) come before anything is computed."""

    chunks: tuple[ScheduledChunk, ...]
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled token, with the log-probabilities asked for: the chosen token's, then the top k."""

    token_id: int
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of prompt tokens from position `first` on, for each the token's own and the top k."""

    sequence: Sequence
    first: int
    logprobs: tuple[tuple[Logprob, ...], ...]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row of logits that gave nothing: its sequence is computed anew, all others go on."""

    sequence: Sequence
    reason: str  # for clients
    error: Exception | None = None  # for the log; None: the logits are not finite


def bad_rows(results: Iterable[object]) -> dict[Sequence, BadRow]:
    """The bad ones of a step's results, one a sequence."""
    return {row.sequence: row for row in results if isinstance(row, BadRow)}


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """A new token of one fork of a sequence."""

    sequence: Sequence
    fork: int
    index: int  # position in the fork's output, from 0
    sample: Sample
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Counts at the end of a step."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # not computed yet, of running and waiting sequences
    total_blocks: int = 0
    free_blocks: int = 0  # allocatable: unused or only cached
    reserved_blocks: int = 0  # waiting for their KV
    steps: int = 0  # done since the start
    blocked: bool = False  # the last look for something to compute found nothing: all there is waits for room


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step changed. Parked sequences have left the engine; their blocks are now the receiver's."""

    tokens: tuple[TokenOutput, ...] = ()
    parked: tuple[tuple[Sequence, tuple[int, ...]], ...] = ()
    progress: tuple[tuple[Sequence, int], ...] = ()  # computed tokens of sequences that are not sampling yet
    scores: tuple[PromptScores, ...] = ()
    failed: tuple[tuple[Sequence, KVRelayError], ...] = ()
    load: EngineLoad = EngineLoad()
    stored: tuple[bytes, ...] = ()  # block hashes that entered the prefix cache
    removed: tuple[bytes, ...] = ()
    num_batched_tokens: int = 0
    num_preemptions: int = 0
    step_s: float = 0.0
