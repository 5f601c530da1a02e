"""One round of `kvrelay bench step` on the cores that it is bound to: python -m bench.step.step_worker JSON."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench import probe
from bench.cpu_times import Disturbance
from bench.engines import Stopwatch, admit, build, fill_pool, greedy, random_ids, run_to_end, settings, timed_step
from bench.pinned import run_child
from bench.stats import median
from bench.step.floor import decode_work, prefill_work
from common.engine.build import BuiltEngine
from common.engine.sequence import Sequence

WARM_UP = 2  # steps of a batch that don't count
PROFILED = 7  # steps with a stopwatch in every operation, apart from those that are timed


@dataclass(frozen=True, slots=True)
class Round:
    """What to measure."""

    model: str
    dtype: str
    attention_backend: str
    cores: int
    prefill: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prefill_steps: int
    decode_steps: int
    max_num_batched_tokens: int


def built_for(wanted: Round) -> BuiltEngine:
    longest = max(max(wanted.contexts) + wanted.decode_steps + WARM_UP + PROFILED + 2, max(wanted.prefill) + 2)
    config = settings(
        wanted.model,
        wanted.dtype,
        threads=wanted.cores,
        max_model_len=longest,
        max_num_seqs=max(wanted.batches),
        attention_backend=wanted.attention_backend,
    )
    return build(config, wanted.max_num_batched_tokens)


def prefill_times(built: BuiltEngine, tokens: int, count: int) -> list[float]:
    """Milliseconds from an idle engine to the first token, of prompts that have nothing in common."""
    generator, times = torch.Generator().manual_seed(tokens), []
    for number in range(count):
        ids = random_ids(tokens, built.model.vocab_size, generator)
        times.append(run_to_end(built.engine, [Sequence(f"prompt-{number}", ids, tokens, greedy(1))]))
    return times


def decode_times(built: BuiltEngine, batch: int, context: int, count: int) -> tuple[list[float], dict[str, Any]]:
    """Milliseconds of steps whose contexts lie around `context`, and where the time of some more went."""
    start = max(1, context - WARM_UP - count // 2)
    sequences = admit(built.engine, batch, start, WARM_UP + count + PROFILED + 1, built.model.vocab_size)
    for _ in range(WARM_UP):
        timed_step(built.engine)
    times = [timed_step(built.engine) for _ in range(count)]
    with Stopwatch(built) as stopwatch:
        parts = stopwatch.steps(PROFILED)
    for sequence in sequences:
        built.engine.abort(sequence.key)
    names = ("kernels", "prepare", "sampler", "outside_kernels")
    operations = {name: median(part.operations[name] for part in parts) for name in parts[0].operations}
    return times, {"operations": operations, **{name: median(getattr(part, name) for part in parts) for name in names}}


def rows(built: BuiltEngine, wanted: Round) -> Iterator[dict[str, Any]]:
    model, dtype = built.model, built.layout.dtype
    for tokens in wanted.prefill:
        work = prefill_work(model, dtype, tokens)
        times = prefill_times(built, tokens, wanted.prefill_steps)
        yield {"phase": "prefill", "batch": 1, "context": tokens, **asdict(work), "ms": times}
    for context in wanted.contexts:
        for batch in wanted.batches:
            work = decode_work(model, dtype, batch, context)
            times, parts = decode_times(built, batch, context, wanted.decode_steps)
            yield {"phase": "decode", "batch": batch, "context": context, **asdict(work), "ms": times, "parts": parts}


def main() -> None:
    wanted = Round(**json.loads(sys.argv[1]))
    torch.set_num_threads(wanted.cores)
    built = built_for(wanted)
    fill_pool(built)
    limits = probe.measure(built.layout.dtype)
    engine: Any = built.engine
    head = {"weights": built.layout.dtype, "ops": engine._runner._decoder.ops.name, "probe": asdict(limits)}
    print(json.dumps(head), flush=True)
    disturbance = Disturbance(time.monotonic())
    for row in rows(built, wanted):
        print(json.dumps({**row, "others": disturbance.cores(time.monotonic())}), flush=True)
        disturbance = Disturbance(time.monotonic())


if __name__ == "__main__":
    run_child(main)
