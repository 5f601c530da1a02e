"""kvrelay bench step: the engine's own steps against this machine's limits and, by option, against a peer.

Rounds alternate: the engine on one core, the peer on one core, the engine on two, and so on, each in a process of its
own. A row's ms is the median of its steps in all rounds; peer_ratio the median over rounds of the ratio within one.
"""

import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.options import StepOptions, counts
from bench.pinned import cpus, module_command, run_pinned
from bench.report import ResultTable, Row, note
from bench.stats import median, rounded, summary
from bench.step.floor import Work
from cluster.local_cluster import run_until_signal
from common.errors import ConfigError

ROUND_S = 1800.0  # of one process
COLUMNS = (
    *("cores", "weights", "phase", "batch", "context", "tokens_per_s", "ms", "floor_ms", "ratio", "outside_kernels"),
    *("peer_ms", "peer_ratio", "others_cores", "runs"),
)
Key = tuple[str, int, int]  # phase, batch, context


@dataclass
class Samples:
    """All rounds on one number of cores."""

    head: dict[str, Any] = field(default_factory=dict)
    limits: list[dict[str, Any]] = field(default_factory=list)  # [round], bench.probe.Probe
    rounds: dict[Key, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))  # [round]
    peer_ms: dict[Key, list[float]] = field(default_factory=lambda: defaultdict(list))  # [round]

    def take(self, lines: Iterable[dict[str, Any]]) -> None:
        """One round of bench.step.step_worker."""
        for line in lines:
            if "probe" in line:
                self.head = line
                self.limits.append(line["probe"])
            else:
                self.rounds[line["phase"], line["batch"], line["context"]].append(line)

    def take_peer(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """One round of the peer; rows of other shapes are left out."""
        for line in lines:
            key = peer_key(line)
            if key is not None:
                self.peer_ms[key].append(float(line["ms"]))

    def limit(self, name: str) -> tuple[float, str]:
        """The best of all rounds, as noise only lowers it, and what measured it."""
        best = max(self.limits, key=lambda probe: float(probe[name]))
        return best[name], best[f"{name.partition('_')[0]}_by"]


def peer_key(line: Mapping[str, Any]) -> Key | None:
    """Which of our rows a peer's belongs to."""
    try:
        if line["phase"] == "prefill":
            key = ("prefill", 1, int(line["tokens"]))
        else:
            key = ("decode", int(line["batch"]), int(line["context"]))
        return key if float(line["ms"]) > 0 else None
    except (KeyError, TypeError, ValueError):
        return None


def result(samples: Samples, key: Key, cores: int) -> Row:
    """One row of what was measured."""
    phase, batch, context = key
    rounds, peers = samples.rounds[key], samples.peer_ms[key]
    stream_gb_s, stream_by = samples.limit("stream_gb_s")
    matmul_gflop_s, matmul_by = samples.limit("matmul_gflop_s")
    floor_ms, floor_by = Work(rounds[0]["bytes"], rounds[0]["flops"]).floor_ms(stream_gb_s, matmul_gflop_s)
    every_ms = [ms for one in rounds for ms in one["ms"]]
    parts = [one["parts"] for one in rounds if "parts" in one]
    ms, tokens = median(every_ms), context if phase == "prefill" else batch
    measured = summary(
        {
            "ms": every_ms,
            "outside_kernels": [part["outside_kernels"] for part in parts],
            "kernels_ms": [part["kernels"] for part in parts],
            "prepare_ms": [part["prepare"] for part in parts],
            "sampler_ms": [part["sampler"] for part in parts],
            "peer_ms": peers,
            "peer_ratio": [median(one["ms"]) / theirs for one, theirs in zip(rounds, peers, strict=False)],
            "others_cores": [one["others"] for one in rounds],
        }
    )
    return {
        "cores": cores,
        "weights": samples.head["weights"],
        "phase": phase,
        "batch": batch,
        "context": context,
        "tokens_per_s": rounded(tokens / ms * 1e3),
        "ms": measured.pop("ms"),
        "floor_ms": rounded(floor_ms),
        "ratio": rounded(ms / floor_ms),
        "floor_by": floor_by,
        "stream_gb_s": rounded(stream_gb_s),
        "stream_by": stream_by,
        "matmul_gflop_s": rounded(matmul_gflop_s),
        "matmul_by": matmul_by,
        "ops": samples.head["ops"],
        "operations_ms": medians_of([part["operations"] for part in parts]),
        "runs": len(every_ms),
        "rounds": len(rounds),
        **measured,
    }


def medians_of(rounds: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    """Of each operation, over the rounds."""
    return {name: rounded(median(one[name] for one in rounds)) for name in rounds[0]} if rounds else {}


def peer_command(text: str, model: str, cores: int) -> list[str]:
    """Raises ConfigError for a command that can't be one."""
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--peer: {text!r} is no command: {error}", field="peer") from error
    if not parts:
        raise ConfigError("--peer: the command is empty", field="peer")
    return [part.replace("{model}", model).replace("{cores}", str(cores)) for part in parts]


async def measure(options: StepOptions) -> int:
    model = str(options.model)
    core_counts = counts(options.cores, "cores")
    for cores in core_counts:
        cpus(cores)
    wanted: dict[str, Any] = {
        "model": model,
        "dtype": options.dtype,
        "attention_backend": options.attention_backend,
        "prefill": counts(options.prefill, "prefill"),
        "batches": counts(options.batches, "batches"),
        "contexts": counts(options.contexts, "contexts"),
        "prefill_steps": options.prefill_steps,
        "decode_steps": options.decode_steps,
        "max_num_batched_tokens": options.max_num_batched_tokens,
    }
    peers = {} if options.peer is None else {cores: peer_command(options.peer, model, cores) for cores in core_counts}
    measured = {cores: Samples() for cores in core_counts}
    for number in range(options.rounds):
        for cores, samples in measured.items():
            note(f"round {number + 1} of {options.rounds}, cores: {cores}")
            command = module_command("bench.step.step_worker", {**wanted, "cores": cores})
            samples.take(await run_pinned(command, cores, ROUND_S))
            if peers:
                note(f"round {number + 1} of {options.rounds}, cores: {cores}, the peer")
                samples.take_peer(await run_pinned(peers[cores], cores, ROUND_S))
    report = ResultTable(COLUMNS, as_json=options.json)
    for cores, samples in measured.items():
        (stream, stream_by), (matmul, matmul_by) = samples.limit("stream_gb_s"), samples.limit("matmul_gflop_s")
        report.say(
            f"cores: {cores}; reading in order {stream:.1f} GB/s ({stream_by}), "
            f"matrix products {matmul:.0f} GFLOP/s ({matmul_by})"
        )
        for key in samples.rounds:
            report.row(result(samples, key, cores))
    return 0


def run(options: StepOptions) -> int:
    """Measures, then prints all rows."""
    return run_until_signal(measure(options))
