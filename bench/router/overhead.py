"""kvrelay bench router: what router and wire take, in CPU time a token and in latency.

The same requests go through a cluster of this command's own and, in turn, through an engine in a process of its own,
with as many threads. Added is the difference of both ways' percentiles. Of a worker, `wire` is the CPU time of its
event loop and of gRPC's threads; its engine is counted apart. Idle time between tokens counts, too: heartbeats are
part of the wire. With --profile the router runs under cProfile, which makes it slower by a multiple: its functions'
shares count then, not the times.
"""

import itertools
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.cpu_times import ProcessTime, process_time
from bench.engines import settings
from bench.options import RouterOptions, counts
from bench.pinned import module_command, run_pinned
from bench.report import ResultTable, Row, note
from bench.router.inprocess import InprocessStreams
from bench.router.profiled import BEGIN, profiled, top
from bench.serve.completions_client import CompletionsClient, Outcome
from bench.serve.workload import TimedRequest, unique_prompts
from bench.stats import percentile, summary
from cluster.chat_client import ChatClient
from cluster.children import Console
from cluster.local_cluster import Cluster, run_until_signal
from cluster.plan import ClusterConfig, UpConfig, check, plan
from common.errors import Unavailable
from common.worker.config import WorkerConfig
from router.config import RouterConfig

RUN_S = 3600.0
COLUMNS = (
    *("streams", "requests", "router_us_token", "worker_wire_us_token", "client_us_token", "ttft_added_ms_p50"),
    *("ttft_added_ms_p99", "gap_added_ms_p50", "gap_added_ms_p99", "e2e_added_ms_p50", "e2e_added_ms_p99", "runs"),
)
KINDS = ("ttft", "gap", "e2e")
TOP = 5  # functions of a profile
PROFILE_LINE = "{share:6.1%} {us_token:8.2f} us a token {calls_token:8.2f} calls a token  {function}"


@dataclass
class Latencies:
    """Milliseconds."""

    ttft: list[float] = field(default_factory=list)
    gap: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)

    def take(self, sent_s: float, token_s: Sequence[float]) -> None:
        """One answer."""
        self.ttft.append((token_s[0] - sent_s) * 1e3)
        self.e2e.append((token_s[-1] - sent_s) * 1e3)
        self.gap += [(after - before) * 1e3 for before, after in itertools.pairwise(token_s)]


def added(served: Latencies, alone: Latencies) -> dict[str, float]:
    """Both ways' percentiles, and how much more the one has."""
    row = {}
    for kind in KINDS:
        for percent in (50, 99):
            ours, plain = (percentile(getattr(way, kind), percent) for way in (served, alone))
            row[f"{kind}_ms_p{percent}"] = ours
            row[f"{kind}_inprocess_ms_p{percent}"] = plain
            row[f"{kind}_added_ms_p{percent}"] = ours - plain
    return row


def cpu_a_token(spent: dict[str, ProcessTime], tokens: int) -> dict[str, float]:
    """Microseconds of each process; of all workers together, what is wire and what engine."""
    row = {f"{name}_us_token": time.total_s / tokens * 1e6 for name, time in spent.items()}
    workers = [time for name, time in spent.items() if name.startswith(("prefill", "decode"))]
    row["worker_wire_us_token"] = sum(time.wire_s for time in workers) / tokens * 1e6
    row["worker_engine_us_token"] = sum(time.engine_s for time in workers) / tokens * 1e6
    return row


def prompts_of(options: RouterOptions, streams: int, run: int) -> list[list[tuple[int, ...]]]:
    """For each stream its prompts; no two are alike, in no run."""
    prompts = unique_prompts(options.prompt_tokens, f"{streams}/{run}", options.vocab_size)
    return [[next(prompts) for _ in range(-(-options.requests // streams))] for _ in range(streams)]


def cluster_config(options: RouterOptions, most_streams: int) -> ClusterConfig:
    model, longest = str(options.model), options.prompt_tokens + options.output_tokens + 1
    return ClusterConfig(
        up=UpConfig(prefill=options.prefill, decode=1),
        router=RouterConfig(model=model, port=0, log_level="warning"),
        engine=settings(
            model,
            options.dtype,
            threads=options.threads,
            max_model_len=longest,
            max_num_seqs=most_streams,
            caching=True,
        ),
        worker=WorkerConfig(log_level="warning"),
    )


class RouterBench:
    """Both ways for the same requests."""

    def __init__(self, options: RouterOptions, cluster: Cluster, client: CompletionsClient) -> None:
        self._options = options
        self._cluster = cluster
        self._client = client
        self.tokens = 0  # served so far

    def start_profile(self) -> None:
        """What the router does from now on counts."""
        self.tokens = 0
        self._cluster.children["router"].signal(BEGIN)

    async def run(self, streams: int, number: int) -> dict[str, float]:
        """One run of each way: all figures of it."""
        prompts = prompts_of(self._options, streams, number)
        served, row = await self._served(prompts)
        alone, cpu_s = await self._alone(prompts)
        tokens = sum(map(len, prompts)) * self._options.output_tokens
        return {**row, "inprocess_us_token": cpu_s / tokens * 1e6, **added(served, alone)}

    async def warm_up(self) -> None:
        """A few requests that don't count."""
        prompts = prompts_of(self._options, 2, -1)
        await self._served([stream[:2] for stream in prompts])

    async def _served(self, prompts: Sequence[Sequence[tuple[int, ...]]]) -> tuple[Latencies, dict[str, float]]:
        requests = [[TimedRequest(0.0, prompt, self._options.output_tokens) for prompt in stream] for stream in prompts]
        before = self._cpu_times()
        outcomes = await self._client.streams(requests)
        spent = {name: time - before[name] for name, time in self._cpu_times().items()}
        tokens = sum(outcome.completion_tokens for outcome in outcomes)
        self.tokens += tokens
        return latencies_of(outcomes), cpu_a_token(spent, tokens)

    def _cpu_times(self) -> dict[str, ProcessTime]:
        children = {name: process_time(child.pid) for name, child in self._cluster.children.items()}
        return {**children, "client": process_time(os.getpid())}

    async def _alone(self, prompts: Sequence[Sequence[tuple[int, ...]]]) -> tuple[Latencies, float]:
        options = self._options
        wanted = InprocessStreams(
            str(options.model),
            options.dtype,
            options.threads,
            options.output_tokens,
            tuple(tuple(stream) for stream in prompts),
        )
        command, cores = module_command("bench.router.inprocess"), len(os.sched_getaffinity(0))
        head, *answers = await run_pinned(command, cores, RUN_S, json.dumps(asdict(wanted)))
        latencies = Latencies()
        for answer in answers:
            latencies.take(answer["sent_s"], answer["token_s"])
        return latencies, head["cpu_s"]


def latencies_of(outcomes: Iterable[Outcome]) -> Latencies:
    latencies = Latencies()
    for outcome in outcomes:
        if outcome.error:
            raise Unavailable(f"a request failed: {outcome.error}")
        latencies.take(outcome.sent_s, outcome.text_s)
    return latencies


@contextmanager
def router_profile(wanted: bool) -> Iterator[Path | None]:
    """Where the router's profile will be; None without one."""
    if not wanted:
        yield None
        return
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory, "router.profile")


def bench_cluster(config: ClusterConfig, profile: Path | None) -> Cluster:
    stages = plan(config)
    if profile is not None:
        stages = profiled(stages, "router", profile)
    up = config.up
    return Cluster(stages, Console(out=sys.stderr), startup_s=up.startup_timeout, grace_s=up.shutdown_timeout)


async def measure(options: RouterOptions) -> int:
    report = ResultTable(COLUMNS, as_json=options.json)
    with router_profile(options.profile) as profile:
        runs, tokens = await _runs(options, profile)
        for count, rows in runs.items():
            report.row(result(options, count, rows))
        if profile is not None:
            functions = top(profile, TOP, tokens)
            if options.json:
                report.row({"profile": functions, "tokens": tokens})
            for one in functions:
                report.say(PROFILE_LINE.format(**one))
    return 0


async def _runs(options: RouterOptions, profile: Path | None) -> tuple[dict[int, list[dict[str, float]]], int]:
    """All runs by their number of streams, and the tokens that they served."""
    streams = counts(options.streams, "streams")
    config = cluster_config(options, max(streams))
    check(config)
    runs: dict[int, list[dict[str, float]]] = defaultdict(list)
    async with bench_cluster(config, profile) as cluster:
        url = cluster.address("router")
        async with ChatClient(url) as chat:
            model = await chat.model()
        async with CompletionsClient(url, model, RUN_S) as client:
            bench = RouterBench(options, cluster, client)
            await bench.warm_up()
            if profile is not None:
                bench.start_profile()
            for number in range(options.runs):
                for count in streams:
                    note(f"run {number + 1} of {options.runs}, streams: {count}")
                    runs[count].append(await bench.run(count, number))
    return runs, bench.tokens


def result(options: RouterOptions, streams: int, runs: Sequence[dict[str, float]]) -> Row:
    head: dict[str, Any] = {
        "streams": streams,
        "prefill": options.prefill,
        "threads": options.threads,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "requests": -(-options.requests // streams) * streams,
        "runs": len(runs),
    }
    return {**head, **summary({name: [run[name] for run in runs] for name in runs[0]})}


def run(options: RouterOptions) -> int:
    """Prints a row for each number of streams."""
    return run_until_signal(measure(options))
