"""Requests with their times, made from a seed alone. Imports no torch: a client should be light."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import trace
from bench.options import TrafficOptions
from common.errors import ConfigError

FIRST_ID = 256  # special tokens tend to come before


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One prompt, when it is sent, and how many tokens its answer has."""

    at_s: float  # from the start
    prompt_ids: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """All requests of one run, and how they were made."""

    requests: tuple[TimedRequest, ...]
    arrivals: str
    rate: float | None  # requests a second, on average
    length_scale: float = 1.0
    time_scale: float = 1.0


def make(options: TrafficOptions, seed: int) -> Workload:
    """What these options and this seed always give. Raises ConfigError."""
    if options.trace is not None:
        return _from_trace(Path(options.trace), options, seed)
    rate = options.rate or 1.0
    random_number = random.Random(f"{seed}/arrivals")
    pauses = (random_number.expovariate(rate) if options.arrivals == "poisson" else 1 / rate for _ in itertools.count())
    times = itertools.accumulate(pauses, initial=0.0)
    prompts = unique_prompts(options.prompt_tokens, seed, options.vocab_size)
    return Workload(
        tuple(TimedRequest(next(times), next(prompts), options.output_tokens) for _ in range(options.requests)),
        options.arrivals,
        rate,
    )


def unique_prompts(tokens: int, seed: int | str, vocab_size: int) -> Iterator[tuple[int, ...]]:
    """Random prompts without end, that have nothing in common."""
    random_number = random.Random(f"{seed}/prompts")
    ids = range(min(FIRST_ID, vocab_size - 1), vocab_size)
    while True:
        yield tuple(random_number.choices(ids, k=tokens))


def _from_trace(path: Path, options: TrafficOptions, seed: int) -> Workload:
    rows = trace.read(path, options.requests)
    time_scale = options.scale
    if options.rate is not None:
        natural = trace.rate(rows)
        if natural is None:
            raise ConfigError(f"--rate: the first {len(rows)} requests of {path} come at once", field="rate")
        time_scale = natural / options.rate
    rows = trace.scaled(rows, options.scale, time_scale)
    requests = (
        TimedRequest(row.at_s, trace.prompt_ids(row, number, seed, FIRST_ID, options.vocab_size), row.output_tokens)
        for number, row in enumerate(rows)
    )
    return Workload(tuple(requests), path.name, trace.rate(rows), options.scale, time_scale)
