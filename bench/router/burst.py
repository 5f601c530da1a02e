"""kvrelay bench burst: many times more requests at once than the cluster has room for.

Undisturbed means the decode pool's batch is full and nobody waits. In the burst `times` as many come in one moment:
each is answered or refused with a time to come back, and those accepted must not get slower by the others' waiting.
Afterwards the undisturbed load is sent once more. Goodput is in tokens of complete answers.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.options import BurstOptions
from bench.own_cluster import own_cluster
from bench.processes import Processes
from bench.report import ResultTable, Row, note
from bench.serve.completions_client import CompletionsClient, Outcome
from bench.serve.workload import TimedRequest, unique_prompts
from bench.soak.tally import leaks
from bench.stats import percentile, summary
from cluster.chat_client import ChatClient
from cluster.local_cluster import run_until_signal
from common.deadlines import Deadlines
from common.errors import Unavailable

SAMPLE_S = 0.1
REST_S = 5.0  # beyond the lease
HUNG = "TimeoutError"
SHOWN = 3  # kinds of errors
COLUMNS = (
    *("capacity", "requests", "answered", "refused", "failed", "hung", "tpot_ms_before", "tpot_ms_burst"),
    *("tpot_ratio", "ttft_ms_burst_p99", "tokens_per_s_before", "tokens_per_s_after", "router_rss_mb_grown", "runs"),
)


class Burst:
    """One cluster, loaded and overloaded in turn."""

    def __init__(self, options: BurstOptions, client: CompletionsClient, processes: Processes) -> None:
        self._options = options
        self._client = client
        self._processes = processes
        self._capacity = options.max_num_seqs * options.decode
        self._prompts = unique_prompts(options.prompt_tokens, 0, options.vocab_size)

    async def run(self) -> dict[str, float | None]:
        """All figures of one run."""
        rest_mb = self._router_mb()
        before = await self._side_by_side(rounds=2)
        peak_mb: list[float] = [rest_mb]
        sampler = asyncio.create_task(self._sample(peak_mb))
        try:
            began = time.perf_counter()
            burst = await self._client.open_loop(self._requests(self._capacity * self._options.times))
            burst_s = time.perf_counter() - began
        finally:
            sampler.cancel()
        left = await self._processes.at_rest(Deadlines().scaled(self._options.deadline_scale).lease_s + REST_S)
        after = await self._side_by_side(rounds=2)
        good = [one for one in burst if one.ok]
        refused = [one for one in burst if one.error.startswith(("429", "503"))]
        hung = [one for one in burst if one.error.startswith(HUNG)]
        for error in sorted({one.error for one in burst if one.error and one not in refused})[:SHOWN]:
            note(f"a request failed: {error}")
        tpot = {name: tpot_ms(some) for name, some in (("before", before), ("burst", good), ("after", after))}
        return {
            "requests": len(burst),
            "answered": len(good),
            "refused": len(refused),
            "hung": len(hung),
            "failed": len(burst) - len(good) - len(refused) - len(hung),
            **{f"tpot_ms_{name}": value for name, value in tpot.items()},
            "tpot_ratio": tpot["burst"] / tpot["before"],
            "ttft_ms_before_p50": percentile([one.ttft_s * 1e3 for one in before], 50),
            "ttft_ms_burst_p50": percentile([one.ttft_s * 1e3 for one in good], 50),
            "ttft_ms_burst_p99": percentile([one.ttft_s * 1e3 for one in good], 99),
            "refused_ms_max": max((one.ended_s - one.sent_s for one in refused), default=0.0) * 1e3,
            "tokens_per_s_before": tokens_per_s(before),
            "tokens_per_s_burst": sum(one.completion_tokens for one in good) / burst_s,
            "tokens_per_s_after": tokens_per_s(after),
            "router_rss_mb_rest": rest_mb,
            "router_rss_mb_grown": max(peak_mb) - rest_mb,
            "router_rss_mb_kept": self._router_mb() - rest_mb,
            "leaked": sum(leaks(left).values()),
        }

    async def _side_by_side(self, rounds: int) -> list[Outcome]:
        """The pool's batch is full, and each place is taken again when an answer ends."""
        streams = [self._requests(rounds) for _ in range(self._capacity)]
        outcomes = await self._client.streams(streams)
        for outcome in outcomes:
            if outcome.error:
                raise Unavailable(f"an undisturbed request failed: {outcome.error}")
        return outcomes

    def _requests(self, count: int) -> list[TimedRequest]:
        return [TimedRequest(0.0, next(self._prompts), self._options.output_tokens) for _ in range(count)]

    def _router_mb(self) -> float:
        return self._processes.usage()["router"].rss_mb

    async def _sample(self, peak_mb: list[float]) -> None:
        while True:
            peak_mb.append(self._router_mb())
            await asyncio.sleep(SAMPLE_S)


def tpot_ms(outcomes: Sequence[Outcome]) -> float:
    """The median."""
    return percentile([one.tpot_s * 1e3 for one in outcomes if one.tpot_s is not None], 50)


def tokens_per_s(outcomes: Sequence[Outcome]) -> float:
    """From the first request to the last answer's end."""
    duration_s = max(one.ended_s for one in outcomes) - min(one.sent_s for one in outcomes)
    return sum(one.completion_tokens for one in outcomes) / duration_s


async def measure(options: BurstOptions) -> int:
    longest = replace(options, max_model_len=max(options.max_model_len, options.prompt_tokens + options.output_tokens))
    runs: list[dict[str, float | None]] = []
    async with own_cluster(longest, options.max_num_seqs, max_queued_requests=options.max_queued_requests) as cluster:
        url = cluster.address("router")
        async with ChatClient(url) as chat:
            model = await chat.model()
        async with CompletionsClient(url, model, options.request_timeout) as client, Processes(cluster) as processes:
            burst = Burst(options, client, processes)
            for number in range(options.runs):
                note(f"run {number + 1} of {options.runs}")
                runs.append(await burst.run())
    row = result(options, runs)
    ResultTable(COLUMNS, as_json=options.json).row(row)
    return 1 if any(run["hung"] or run["failed"] or run["leaked"] for run in runs) else 0


def result(options: BurstOptions, runs: Sequence[dict[str, float | None]]) -> Row:
    head: dict[str, Any] = {
        "prefill": options.prefill,
        "decode": options.decode,
        "capacity": options.max_num_seqs * options.decode,
        "times": options.times,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "runs": len(runs),
    }
    return {**head, **summary({name: [run[name] for run in runs] for name in runs[0]})}


def run(options: BurstOptions) -> int:
    """One row; the exit status is 1 if a request hung or failed, or anything was left."""
    return run_until_signal(measure(options))
