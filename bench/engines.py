"""An engine for measurements: built for given shapes, filled without prefill, and timed by its parts."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch

from common.compute.ops.choose import Ops
from common.engine.build import BuiltEngine, build_engine
from common.engine.config import EngineConfig
from common.engine.engine import Engine
from common.engine.sequence import Sequence as EngineSequence
from common.errors import EngineFailure, KVRelayError
from common.sampling import SamplingParams

FIRST_ID = 256  # special tokens tend to come first


def settings(
    model: str,
    dtype: str,
    *,
    threads: int,
    max_model_len: int,
    max_num_seqs: int,
    caching: bool = False,
    attention_backend: str = "auto",
) -> EngineConfig:
    """With room for max_num_seqs of the longest sequences, memory permitting."""
    return EngineConfig(
        model=model,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=caching,
        attention_backend=attention_backend,
        threads=threads,
    )


def build(config: EngineConfig, max_num_batched_tokens: int = 512) -> BuiltEngine:
    """An engine by the clock that all measurements use."""
    budget = max(max_num_batched_tokens, config.max_num_seqs)
    return build_engine(config, max_num_batched_tokens=budget, shared_pool=False, clock=time.perf_counter)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def random_ids(count: int, vocab_size: int, generator: torch.Generator) -> list[int]:
    first = FIRST_ID if vocab_size > FIRST_ID else 0
    ids: list[int] = torch.randint(first, vocab_size, (count,), generator=generator).tolist()
    return ids


def fill_pool(built: BuiltEngine) -> None:
    """Random KV in every block: what was never written could be read faster, or slower."""
    blocks = built.pool.blocks
    blocks[0].normal_()
    blocks[1:] = blocks[0]


def admit(engine: Engine, batch: int, context: int, max_tokens: int, vocab_size: int) -> list[EngineSequence]:
    """Sequences that have `context` tokens in the cache and the next one at hand, as after a hand-over."""
    generator = torch.Generator().manual_seed(batch)
    sequences = []
    for index in range(batch):
        ids = random_ids(context + 1, vocab_size, generator)
        sequence = EngineSequence(f"running-{index}", ids, len(ids), greedy(max_tokens))
        reservation = engine.reserve([sequence])
        if reservation is None:
            raise KVRelayError(f"no room for {batch} sequences of {context} tokens")
        engine.admit(reservation)
        sequences.append(sequence)
    return sequences


def timed_step(engine: Engine) -> float:
    """Milliseconds of one whole step, scheduling and sampling included."""
    begin = time.perf_counter()
    output = engine.step()
    ms = (time.perf_counter() - begin) * 1e3
    if output is None:
        raise EngineFailure("the engine had nothing to compute")
    if output.failed:
        raise output.failed[0][1]
    return ms


@dataclass(frozen=True, slots=True)
class StepParts:
    """Milliseconds of one step, by who spends them."""

    total: float
    operations: dict[str, float]  # of the model but `prepare`
    prepare: float  # what the backend works out once a step
    sampler: float

    @property
    def kernels(self) -> float:
        return sum(self.operations.values())

    @property
    def outside_kernels(self) -> float:
        """Share of the step."""
        return 1 - self.kernels / self.total


class Stopwatch:
    """Sums up the time in each operation and in the sampler of an engine, while it is entered."""

    def __init__(self, built: BuiltEngine) -> None:
        self._engine = cast(Any, built.engine)  # its parts are private to all others
        self._ops: Ops = self._engine._runner._decoder.ops
        self._sampler = self._engine._sampler
        self._spent: defaultdict[str, float] = defaultdict(float)  # milliseconds

    def __enter__(self) -> "Stopwatch":
        operations = {item.name: getattr(self._ops, item.name) for item in fields(self._ops)}
        timed: dict[str, Any] = {
            name: self._timed(name, operation) for name, operation in operations.items() if callable(operation)
        }
        self._engine._runner._decoder.ops = replace(self._ops, **timed)
        self._engine._sampler = self._timed("sampler", self._sampler)
        return self

    def __exit__(self, *_: object) -> None:
        self._engine._runner._decoder.ops = self._ops
        self._engine._sampler = self._sampler

    def steps(self, count: int) -> list[StepParts]:
        parts = []
        for _ in range(count):
            self._spent.clear()
            total = timed_step(self._engine)
            prepare, sampler = self._spent.pop("prepare", 0.0), self._spent.pop("sampler", 0.0)
            parts.append(StepParts(total, dict(self._spent), prepare, sampler))
        return parts

    def _timed(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = operation(*arguments)
            self._spent[name] += (time.perf_counter() - begin) * 1e3
            return result

        return run


def run_to_end(engine: Engine, sequences: Sequence[EngineSequence]) -> float:
    """Adds the sequences and steps until the engine is idle; milliseconds of all steps."""
    for sequence in sequences:
        engine.add(sequence)
    ms = 0.0
    while (load := engine.load()).running or load.waiting:
        ms += timed_step(engine)
    return ms
