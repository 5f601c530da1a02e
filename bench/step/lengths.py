"""How long requests are, and how much KV memory that leaves unused (as in https://arxiv.org/abs/2309.06180)."""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from bench import trace


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens of one request."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Tokens whose logarithm has a normal distribution; cut at `most`."""

    typical: float  # the median
    sigma: float  # of the logarithm
    most: int

    def draw(self, random_number: random.Random) -> int:
        drawn = round(random_number.lognormvariate(math.log(self.typical), self.sigma))
        return min(max(1, drawn), self.most)


# An eighth of Azure's conversations of 2023 (19,366 requests; fitted: prompts 760 tokens and sigma 0.99, answers 151
# and 0.86, at most 1,000): a small model on few cores should be done in a minute.
PROMPT = LogNormal(95.0, 0.99, 1000)
OUTPUT = LogNormal(18.9, 0.86, 125)


def drawn(count: int, seed: int) -> list[Length]:
    """From the built-in distribution."""
    random_number = random.Random(f"{seed}/lengths")
    return [Length(PROMPT.draw(random_number), OUTPUT.draw(random_number)) for _ in range(count)]


def of_trace(path: Path, count: int, scale: float, skip: int = 0) -> list[Length]:
    """Of `count` requests of a trace, times a factor, after the first `skip`; it starts over at its end."""
    rows = trace.scaled(trace.read(path), scale, scale)
    picked = (rows[(skip + index) % len(rows)] for index in range(count))
    return [Length(row.prompt_tokens, row.output_tokens) for row in picked]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Tokens of one sequence, on average over all steps of all answers."""

    filled: float  # whose KV there is
    held: float  # that there is memory for

    @property
    def unused_share(self) -> float:
        return 1 - self.filled / self.held


def memory_use(lengths: Iterable[Length], set_aside: Callable[[int], int]) -> MemoryUse:
    """`set_aside`: for how many tokens there is memory when so many have KV."""
    steps = [tokens for length in lengths for tokens in range(length.prompt, length.total)]
    return MemoryUse(sum(steps) / len(steps), sum(map(set_aside, steps)) / len(steps))


def paged(block_size: int) -> Callable[[int], int]:
    """Whole blocks, taken as they are needed."""
    return lambda tokens: -(-tokens // block_size) * block_size


def preallocated(max_model_len: int) -> Callable[[int], int]:
    """The longest sequence there may be, from the start."""
    return lambda tokens: max_model_len
