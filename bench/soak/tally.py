"""What a soak has seen so far, in bounded memory but for a few numbers a request."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.processes import ProcessUsage, slope
from bench.report import note
from bench.soak.whole_answers import SoakAnswer, SoakOutcome
from bench.stats import percentile, rounded

ENDS = ("answered", "refused", "aborted", "failed", "hung")
WARM_UP = 0.25  # share of the requests before memory is expected to be steady
LEAST_POINTS = 20  # for a line through them
SHOWN = 300  # characters of an answer in a message
LEAKS = {
    "blocks": ("kv_used_blocks", "kv_held_blocks"),
    "leases": ("kv_leases",),
    "claims": ("kv_claims",),
    "attempts": ("num_attempts",),
    "sequences": ("num_requests_running", "num_requests_waiting"),
}


@dataclass(slots=True)
class Tally:
    """Counts and times of requests, and memory by how many there were."""

    references: Mapping[str, SoakAnswer]
    ends: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    tokens: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    stall_ms: list[float] = field(default_factory=list)  # the longest gap of each streamed answer
    memory: dict[tuple[str, int], list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def requests(self) -> int:
        return self.ends.total()

    def take(self, outcome: SoakOutcome) -> None:
        """One request; what is wrong is told at once."""
        self.ends[outcome.end] += 1
        if outcome.code:
            self.codes[outcome.code] += 1
        reference = self.references[outcome.plan.template.name]
        if outcome.wrong(reference):
            self.wrong += 1
            note(f"wrong: {outcome.plan}\n  got {outcome.answer!r:.{SHOWN}}\n  not {reference!r:.{SHOWN}}")
        elif outcome.end in ("failed", "hung"):
            note(
                f"{outcome.end}: {outcome.code} after {outcome.ended_s - outcome.sent_s:.1f} s, {outcome.plan}"[:SHOWN]
            )
        if outcome.end == "answered":
            self.tokens += outcome.answer.completion_tokens
            if outcome.plan.stream:
                self._time(outcome)

    def _time(self, outcome: SoakOutcome) -> None:
        times = outcome.event_s
        self.ttft_ms.append((times[0] - outcome.sent_s) * 1e3)
        self.stall_ms.append(max((after - before for before, after in pairwise(times)), default=0.0) * 1e3)
        later = outcome.answer.completion_tokens - 1
        if later > 0 and len(outcome.answer.choices) == 1:
            self.tpot_ms.append((times[-1] - times[0]) / later * 1e3)

    def remember(self, usage: Mapping[tuple[str, int], ProcessUsage]) -> None:
        """Memory of each life (name, pid) of each process, now."""
        for life, used in usage.items():
            self.memory[life].append((self.requests / 1e3, used.anonymous_mb))

    def slopes(self) -> dict[str, float | None]:
        """MB for 1,000 requests, after the warm-up: of each process its longest life that is long enough."""
        found: dict[str, float | None] = {}
        longest: dict[str, int] = {}
        for (name, _), points in self.memory.items():
            first = self.requests / 1e3 * WARM_UP
            steady = [point for point in points if point[0] >= max(first, points[0][0] + first)]
            if len(steady) >= max(LEAST_POINTS, longest.get(name, 0)):
                longest[name], found[name] = len(steady), rounded(slope(steady))
        return found

    def figures(self) -> dict[str, Any]:
        """For the last line."""
        row: dict[str, Any] = {"requests": self.requests, **{end: self.ends[end] for end in ENDS}, "wrong": self.wrong}
        row |= {"tokens": self.tokens, "errors": dict(self.codes.most_common())}
        for name, values in (("ttft_ms", self.ttft_ms), ("tpot_ms", self.tpot_ms), ("stall_ms", self.stall_ms)):
            row |= {f"{name}_p{percent}": rounded(percentile(values, percent)) for percent in (50, 90, 99)}
            row[f"{name}_max"] = rounded(max(values, default=float("nan")))
        return row


def leaks(left: Mapping[str, float]) -> dict[str, float]:
    """Gauges that are not zero, by kind; one that no kind names goes by its own name."""
    kinds = {gauge: kind for kind, gauges in LEAKS.items() for gauge in gauges}
    found = dict.fromkeys(LEAKS, 0.0)
    for name, value in left.items():
        gauge = name.rpartition(" ")[2]
        if gauge == "kv_cache_usage_perc":  # kv_used_blocks tells it in blocks
            continue
        kind = kinds.get(gauge, gauge)
        found[kind] = found.get(kind, 0.0) + value
    return found


def growth(before: Mapping[str, ProcessUsage], after: Mapping[str, ProcessUsage]) -> dict[str, dict[str, int]]:
    """How many more open files and threads each process has than before; a new life is compared with an old one."""
    names = [name for name in after if name in before]
    return {
        "open_files": {name: after[name].open_files - before[name].open_files for name in names},
        "threads": {name: after[name].threads - before[name].threads for name in names},
    }
