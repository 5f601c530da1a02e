"""What decides a sequence's next token, and what is told of it."""

import enum
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Logprob:
    token_id: int
    logprob: float
    rank: int  # 1: the most likely
