"""kvrelay bench streams: what the router takes for many streams at a time, and whether it gives it back.

One router serves all levels in turn, several rounds of them; after each it is looked at again when nothing runs. Its
`/health` is asked every 20 ms by a process of its own: what that takes longer than at rest is the lag of the event
loop, and the machine's scheduling. Memory is resident memory; peaks are of samples every 100 ms.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from bench.options import StreamsOptions, counts
from bench.own_cluster import own_cluster
from bench.processes import Processes, ProcessUsage
from bench.report import ResultTable, Row, note
from bench.router.lag_probe import probing
from bench.serve.completions_client import CompletionsClient, Outcome
from bench.serve.workload import TimedRequest, unique_prompts
from bench.soak.tally import leaks
from bench.stats import percentile, rounded
from cluster.chat_client import ChatClient
from cluster.local_cluster import run_until_signal
from common.deadlines import Deadlines

SAMPLE_S = 0.1
SHOWN = 3  # kinds of errors
IDLE_S = 3.0  # for which the router at rest is looked at
COLUMNS = (
    *("round", "streams", "failed", "running_max", "rss_mb", "rss_mb_after", "open_files", "open_files_after"),
    *("threads", "health_ms_p50", "health_ms_p99", "health_ms_max", "tokens_per_s"),
)


@dataclass(slots=True)
class Seen:
    """The router during one level."""

    usage: list[ProcessUsage] = field(default_factory=list)
    running: list[float] = field(default_factory=list)


class Streams:
    """One router, at one level after the other."""

    def __init__(self, options: StreamsOptions, processes: Processes, url: str, model: str) -> None:
        self._options = options
        self._processes = processes
        self._url, self._model = url, model
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), parts.port or 80
        self._prompts = unique_prompts(options.prompt_tokens, 0, options.vocab_size)
        self._rest_s = Deadlines().scaled(options.deadline_scale).lease_s

    async def level(self, streams: int) -> dict[str, Any]:
        """All figures of one number of streams; 0 is the router at rest."""
        seen = Seen()
        sampler = asyncio.create_task(self._sample(seen))
        began = time.perf_counter()
        try:
            async with probing(self._host, self._port) as health_ms:
                outcomes = await self._answered(streams)
        finally:
            sampler.cancel()
        duration_s = time.perf_counter() - began
        errors = [outcome.error for outcome in outcomes if outcome.error]
        for error in sorted(set(errors))[:SHOWN]:
            note(f"a request failed: {error}")
        left = await self._processes.at_rest(self._rest_s)
        after = self._processes.usage()["router"]
        return {
            "streams": streams,
            "failed": len(errors),
            "running_max": max(seen.running, default=0.0),
            "rss_mb": rounded(max(usage.rss_mb for usage in seen.usage)),
            "rss_mb_after": rounded(after.rss_mb),
            "open_files": max(usage.open_files for usage in seen.usage),
            "open_files_after": after.open_files,
            "threads": max(usage.threads for usage in seen.usage),
            "threads_after": after.threads,
            **{f"health_ms_p{percent}": rounded(percentile(health_ms, percent)) for percent in (50, 99)},
            "health_ms_max": rounded(max(health_ms)),
            "tokens_per_s": rounded(sum(outcome.completion_tokens for outcome in outcomes) / duration_s),
            "leaked": sum(leaks(left).values()),
        }

    async def _answered(self, streams: int) -> list[Outcome]:
        """All of them at once, over connections that end with them."""
        if not streams:
            await asyncio.sleep(IDLE_S)
        tokens = self._options.output_tokens
        async with CompletionsClient(self._url, self._model, self._options.request_timeout) as client:
            return await client.open_loop([TimedRequest(0.0, next(self._prompts), tokens) for _ in range(streams)])

    async def _sample(self, seen: Seen) -> None:
        while True:
            seen.usage.append(self._processes.usage()["router"])
            gauges = await self._processes.gauges("router")
            seen.running.append(gauges["num_requests_running"])
            await asyncio.sleep(SAMPLE_S)


async def measure(options: StreamsOptions) -> int:
    levels = [0, *counts(options.streams, "streams")]
    report, rows = ResultTable(COLUMNS, as_json=options.json), []
    async with own_cluster(options, max(levels)) as cluster:
        url = cluster.address("router")
        async with ChatClient(url) as chat:
            model = await chat.model()
        async with Processes(cluster) as processes:
            bench = Streams(options, processes, url, model)
            for number in range(options.rounds):
                for streams in levels:
                    note(f"round {number + 1} of {options.rounds}, streams: {streams}")
                    row: Row = {"round": number + 1, **await bench.level(streams)}
                    report.row(row)
                    rows.append(row)
    return int(any(row["failed"] or row["leaked"] for row in rows))


def run(options: StreamsOptions) -> int:
    """A row for each round and level; the exit status is 1 if a request failed or anything was left."""
    return run_until_signal(measure(options))
