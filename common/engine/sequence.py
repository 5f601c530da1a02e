"""A sequence: its tokens, its blocks, how far it is computed, and what decides its next token."""

from dataclasses import dataclass, field, replace

from common.sampling import SamplingParams


@dataclass(eq=False, slots=True)
class Sequence:
    """One sequence in one engine. The scheduler owns all fields but the first five.

    Before its first sampling a sequence may stand for several forks with the same tokens; then it
    splits into one a fork, which share their blocks.
    """

    key: str  # of its attempt; forks share it
    token_ids: list[int] = field(repr=False)  # prompt, then output; the engine appends
    num_prompt_tokens: int
    params: SamplingParams
    forks: tuple[int, ...] = (0,)
    prefill_only: bool = False  # leave the engine with the first token, blocks kept
    root: bytes = b""  # parent hash of the first block

    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None  # found in the prefix cache when it first ran; None until then
    num_scored_tokens: int = 0  # of the prompt behind its first token, whose log-probabilities are out
    uncached: bool = False  # computed anew after a bad row: takes no cached blocks, and there is no third time
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of full blocks, as far as tokens go
    arrival: int = 0  # order of arrival in its engine, kept over preemptions
    in_flight: bool = False  # part of the batch that is being computed
    aborted_forks: frozenset[int] = frozenset()  # leave when the step that computes them has ended
    arrived_s: float = 0.0  # by the engine's clock
    started_s: float | None = None  # its first step began

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_unscored_tokens(self) -> int:
        """Prompt tokens whose log-probabilities are asked for and still to come."""
        wanted = self.params.prompt_logprobs is not None
        return self.num_prompt_tokens - 1 - self.num_scored_tokens if wanted else 0

    @property
    def prompt_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def split(self, index: int) -> "Sequence":
        """A sequence of its own for one fork, with the same tokens and blocks (whose references it doesn't count)."""
        return replace(
            self,
            forks=(index,),
            token_ids=list(self.token_ids),
            block_ids=list(self.block_ids),
            block_hashes=list(self.block_hashes),
        )
