"""A sequence: its tokens, its blocks, how far it is computed, and what decides its next token."""

import enum
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from common.errors import InvalidRequest

GREEDY_BELOW = 1e-5  # temperatures under this are greedy, as in vLLM


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What decides the next token, apart from the tokens themselves. Names and meanings are vLLM's."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0  # drawn by the router when the client gives none
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # k: the chosen token's and the top k
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the output never has
    prompt_logprobs: int | None = None  # k: each prompt token's and the top k at its place

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def validate(self, vocab_size: int, max_logprobs: int = 20) -> None:
        """Raises InvalidRequest that names the first field out of range."""

        def check(name: str, ok: Callable[[float], bool], wanted: str) -> None:
            value = getattr(self, name)
            if not (math.isfinite(value) and ok(value)):
                raise InvalidRequest(f"{name} must be {wanted}, got {value}", field=name)

        check("max_tokens", lambda v: v >= 1, "at least 1")
        check("min_tokens", lambda v: 0 <= v <= self.max_tokens, f"between 0 and max_tokens ({self.max_tokens})")
        check("temperature", lambda v: 0 <= v <= 1e4, "a finite number, 0 or more")
        check("top_p", lambda v: 0 < v <= 1, "in (0, 1]")
        check("top_k", lambda v: 0 <= v < 2**31, "0 (off) or more")
        check("min_p", lambda v: 0 <= v <= 1, "in [0, 1]")
        check("presence_penalty", lambda v: -2 <= v <= 2, "in [-2, 2]")
        check("frequency_penalty", lambda v: -2 <= v <= 2, "in [-2, 2]")
        check("repetition_penalty", lambda v: 0 < v <= 1e4, "a finite number above 0")
        check("seed", lambda v: 0 <= v < 2**64, "a 64-bit unsigned number")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check(name, lambda v: 0 <= v <= max_logprobs, f"between 0 and {max_logprobs}")
        for token_id, bias in self.logit_bias:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"logit_bias names token {token_id}, beyond {vocab_size} tokens", field="logit_bias"
                )
            if not (math.isfinite(bias) and -100 <= bias <= 100):
                raise InvalidRequest(f"logit_bias of {token_id} must be in [-100, 100], got {bias}", field="logit_bias")
        for token_id in self.stop_token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"stop_token_ids names token {token_id}, beyond {vocab_size} tokens", field="stop_token_ids"
                )
        for word in self.bad_words:
            if not word or not all(0 <= token_id < vocab_size for token_id in word):
                raise InvalidRequest(f"bad_words must be of 1 or more of {vocab_size} tokens", field="bad_words")
        banned = len(self.bad_words) + (len(set(self.stop_token_ids)) if self.min_tokens else 0)
        if 2 * banned > vocab_size:
            field = "bad_words" if self.bad_words else "stop_token_ids"
            raise InvalidRequest(f"{field} leaves too few tokens to draw", field=field)


def fork_seed(seed: int, index: int) -> int:
    """The seed of fork `index` of a request; fork 0's is the request's own."""
    if index == 0:
        return seed
    data = seed.to_bytes(8, "little") + index.to_bytes(4, "little")
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


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
