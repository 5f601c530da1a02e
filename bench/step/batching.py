"""kvrelay bench batching: how continuous batching and paged memory pay, for requests of real lengths.

All requests are there from the start. Continuous: whoever comes next takes the place of whoever ends. Static: a batch
begins when the one before has ended completely; in the plain form, ended answers leave and make the steps shorter,
in the padded form they are computed along until the longest has ended, as a batch of one shape has to. Only tokens
that were asked for count.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.engines import build, greedy, settings
from bench.options import BatchingOptions
from bench.report import ResultTable, Row, note
from bench.serve.workload import unique_prompts
from bench.stats import rounded, summary
from bench.step.lengths import Length, drawn, memory_use, of_trace, paged, preallocated
from common.block_hash import BLOCK_SIZE
from common.engine.build import BuiltEngine
from common.engine.sequence import Sequence as EngineSequence
from common.errors import ConfigError
from common.layout import KVLayout

CONTINUOUS, STATIC, PADDED = "continuous", "static", "static, padded"
COLUMNS = (
    "batching",
    "max_num_seqs",
    "requests",
    "tokens_per_s",
    "tokens_per_cpu_s",
    "running",
    "speedup",
    "cpu_speedup",
    "runs",
)
MEMORY_COLUMNS = ("memory", "max_model_len", "unused_share", "sequences_in_gib", "requests")
GIB = 2**30


@dataclass(frozen=True, slots=True)
class BatchingRun:
    """One run of one kind."""

    tokens_per_s: float
    tokens_per_cpu_s: float  # of this process: what others do meanwhile doesn't count
    running: float  # wanted answers in a step, on average


def batches(sequences: Sequence[EngineSequence], size: int) -> Iterator[Sequence[EngineSequence]]:
    for start in range(0, len(sequences), size):
        yield sequences[start : start + size]


def sequences_for(lengths: Sequence[Length], kind: str, size: int, seed: int, vocab_size: int) -> list[EngineSequence]:
    """One a request, with as many tokens to write as this kind of batching makes it write."""
    made = []
    for index, length in enumerate(lengths):
        ids = next(unique_prompts(length.prompt, f"{seed}/{index}", vocab_size))
        group = lengths[index - index % size :][:size]
        writes = max(one.output for one in group) if kind == PADDED else length.output
        made.append(EngineSequence(str(index), list(ids), length.prompt, greedy(writes)))
    return made


def run_kind(
    built: BuiltEngine, lengths: Sequence[Length], kind: str, options: BatchingOptions, seed: int
) -> BatchingRun:
    size, engine = options.max_num_seqs, built.engine
    sequences = sequences_for(lengths, kind, size, seed, options.vocab_size)
    steps = 0
    began, began_cpu = time.perf_counter(), time.process_time()
    for group in [sequences] if kind == CONTINUOUS else batches(sequences, size):
        for sequence in group:
            engine.add(sequence)
        while (load := engine.load()).running or load.waiting:
            output = engine.step()
            if output is not None and output.failed:
                raise output.failed[0][1]
            steps += 1
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    wanted = sum(length.output for length in lengths)
    return BatchingRun(wanted / seconds, wanted / cpu_s, wanted / steps)


def lengths_for(options: BatchingOptions, run: int) -> list[Length]:
    """Other requests in each run."""
    if options.trace is not None:
        return of_trace(Path(options.trace), options.requests, options.scale, skip=run * options.requests)
    return drawn(options.requests, options.seed + run)


def memory_rows(options: BatchingOptions, lengths: Sequence[Length], layout: KVLayout) -> list[Row]:
    """Paged against preallocated: what is unused, and how many of these sequences fit into a GiB on average."""
    most = options.max_model_len or max(length.total for length in lengths)
    ways = {"paged": paged(BLOCK_SIZE), "preallocated": preallocated(most)}
    rows: list[Row] = []
    for name, set_aside in ways.items():
        use = memory_use(lengths, set_aside)
        row = {"memory": name, "block_size": BLOCK_SIZE, "max_model_len": most, "requests": len(lengths)}
        fitting = GIB / (use.held * layout.block_bytes / BLOCK_SIZE)
        rows.append({**row, "unused_share": rounded(use.unused_share), "sequences_in_gib": rounded(fitting)})
    return rows


def run(options: BatchingOptions) -> int:
    """Prints a row for each kind of batching, then one for each way to set memory aside."""
    every_run = [lengths_for(options, run) for run in range(options.runs)]
    longest = max(length.total for lengths in every_run for length in lengths)
    if options.max_model_len is not None and options.max_model_len < longest:
        raise ConfigError(f"--max-model-len: a request has {longest} tokens", field="max_model_len")
    config = settings(
        str(options.model),
        options.dtype,
        threads=options.threads,
        max_model_len=longest + 1 + max(length.output for lengths in every_run for length in lengths),
        max_num_seqs=options.max_num_seqs,
    )
    built = build(config)
    kinds = (CONTINUOUS, STATIC, PADDED)
    results: dict[str, list[BatchingRun]] = defaultdict(list)
    try:
        run_kind(built, [Length(32, 4)] * options.max_num_seqs, CONTINUOUS, options, -1)  # to warm up
        for number, lengths in enumerate(every_run):
            for kind in kinds:
                note(f"run {number + 1} of {options.runs}: {kind}")
                results[kind].append(run_kind(built, lengths, kind, options, options.seed + number))
    finally:
        built.pool.close()
    report = ResultTable(COLUMNS, as_json=options.json)
    for kind in kinds:
        report.row(result(options, kind, results))
    report = ResultTable(MEMORY_COLUMNS, as_json=options.json)
    for row in memory_rows(options, [length for lengths in every_run for length in lengths], built.layout):
        report.row(row)
    return 0


def result(options: BatchingOptions, kind: str, results: dict[str, list[BatchingRun]]) -> Row:
    """One kind's figures; speed-ups are over the padded form, run by run."""
    pairs = list(zip(results[kind], results[PADDED], strict=True))
    head: dict[str, Any] = {
        "batching": kind,
        "max_num_seqs": options.max_num_seqs,
        "requests": options.requests,
        "lengths": Path(options.trace).name if options.trace else "log-normal",
        "length_scale": options.scale if options.trace else None,
        "threads": options.threads,
        "seeds": [options.seed + number for number in range(options.runs)],
        "runs": len(pairs),
    }
    figures = {
        "tokens_per_s": [ours.tokens_per_s for ours, _ in pairs],
        "tokens_per_cpu_s": [ours.tokens_per_cpu_s for ours, _ in pairs],
        "running": [ours.running for ours, _ in pairs],
        "speedup": [ours.tokens_per_s / padded.tokens_per_s for ours, padded in pairs],
        "cpu_speedup": [ours.tokens_per_cpu_s / padded.tokens_per_cpu_s for ours, padded in pairs],
    }
    return {**head, **summary(figures)}
