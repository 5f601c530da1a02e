"""kvrelay bench soak: thousands of requests of all kinds against a cluster of real processes, each answer compared.

First each kind of request is answered alone and undisturbed, at temperature 0 or with a fixed seed: what a sequence
answers does not depend on its company, so these are the references. Then random ones run side by side, whole and
streamed; some clients leave; with --faults processes are killed, frozen or drained. At the end all must be at rest:
every gauge of work at zero within the lease and five seconds.

The last line is one JSON object; the exit status is 1 if `off` in it names anything.
"""

import asyncio
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from bench.options import SoakOptions
from bench.own_cluster import own_cluster
from bench.processes import Processes, ProcessUsage
from bench.report import ResultTable, note
from bench.soak.random_faults import RandomFaults
from bench.soak.request_mix import PlannedRequest, Template, draw, make_templates, with_stop
from bench.soak.tally import Tally, growth, leaks
from bench.soak.whole_answers import SoakAnswer, SoakClient
from bench.stats import percentile, rounded
from cluster.chat_client import ChatClient
from cluster.local_cluster import Cluster, run_until_signal
from common.deadlines import Deadlines
from common.errors import Unavailable

SAMPLE_S = 0.5
REFUSED_S = 0.2  # until a client whose request was refused sends another
PROGRESS_S = 10.0
SETTLE_S = 120.0  # for processes to be started again, on a busy machine
REST_S = 5.0  # beyond the lease
MORE = {"open_files": 8, "threads": 8}  # than before: a thread pool grows up to its size when it is needed
COLUMNS = (
    *("seconds", "requests", "answered", "refused", "aborted", "failed", "hung", "wrong", "faults_total"),
    *("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99", "router_mb_per_1000"),
)


class Soak:
    """One cluster under load."""

    def __init__(
        self, options: SoakOptions, cluster: Cluster, connect: Callable[[], SoakClient], processes: Processes
    ) -> None:
        """`connect` makes a client, whose connections end with each part of the soak."""
        self._options = options
        self._cluster = cluster
        self._connect = connect
        self._processes = processes
        self._deadlines = Deadlines().scaled(options.deadline_scale)
        self._templates: list[Template] = []
        self._references: dict[str, SoakAnswer] = {}
        self._pids: dict[str, set[int]] = defaultdict(set)  # of each process, in all its lives

    async def run(self) -> dict[str, Any]:
        """All figures; `off` names what is not as it has to be."""
        options = self._options
        await self._take_references()
        await self._load(
            Tally(self._references), random.Random(f"{options.seed}/warm-up"), requests=options.concurrency
        )
        before = await self._rest("warm-up")
        tally, numbers = Tally(self._references), random.Random(f"{options.seed}/requests")
        faults = RandomFaults(
            self._cluster, self._is_well, self._deadlines, random.Random(f"{options.seed}/faults"), options.fault_every
        )
        background = [asyncio.create_task(self._sample(tally, faults))]
        if options.faults:
            background.append(asyncio.create_task(faults.run()))
        try:
            await self._load(tally, numbers, seconds=options.seconds)
        finally:
            for task in background:
                task.cancel()
            ends = await asyncio.gather(*background, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        not_well = await faults.settled(SETTLE_S)
        left = await self._processes.at_rest(self._deadlines.lease_s + REST_S)
        self._count_lives()
        return self._result(tally, faults, before, left, not_well)

    def _result(
        self,
        tally: Tally,
        faults: RandomFaults,
        before: dict[str, ProcessUsage],
        left: dict[str, float],
        not_well: list[str],
    ) -> dict[str, Any]:
        after = self._processes.usage()
        leaked = leaks(left) | {"bytes": self._processes.orphaned_bytes()}
        grown, slopes = growth(before, after), tally.slopes()
        router = slopes.get("router")
        died = sum(len(pids) - 1 for pids in self._pids.values()) - faults.ended
        off = [f"{name}: {value:g}" for name, value in leaked.items() if value]
        off += [f"{name}: {tally.ends[name]}" for name in ("hung", "failed") if tally.ends[name]]
        off += [f"wrong: {tally.wrong}"] if tally.wrong else []
        off += [f"not well again: {', '.join(not_well)}"] if not_well else []
        off += [
            f"{name} has {count - most} {what} too many"
            for what, most in MORE.items()
            for name, count in grown[what].items()
            if count > most
        ]
        off += faults.bad_drains
        off += [f"ended without being asked: {died} processes"] if died > 0 else []
        off += (
            [f"the router grows by {router} MB for 1,000 requests"] if (router or 0) > self._options.rss_slope else []
        )
        return {
            "seed": self._options.seed,
            "seconds": self._options.seconds,
            "prefill": self._options.prefill,
            "decode": self._options.decode,
            "templates": len(self._templates),
            **tally.figures(),
            "faults": dict(faults.counts),
            "faults_total": faults.counts.total(),
            "recovery_s": {
                name: {"p50": rounded(percentile(values, 50)), "max": rounded(max(values))}
                for name, values in faults.recovery_s.items()
            },
            "leaked": leaked,
            "grown": grown,
            "router_mb_per_1000": router,
            "mb_per_1000": slopes,
            "rss_mb": {name: [rounded(before[name].rss_mb), rounded(after[name].rss_mb)] for name in after},
            "off": off,
        }

    async def _take_references(self) -> None:
        options = self._options
        note(f"answering {options.templates} requests alone")
        async with self._connect() as client:
            for number, template in enumerate(make_templates(options.templates, options.seed, options.max_model_len)):
                answer = await self._reference(client, template)
                stopping = with_stop(template, answer.choices[0].text) if number % 3 == 0 else None
                if stopping is not None:
                    await self._reference(client, stopping)

    async def _reference(self, client: SoakClient, template: Template) -> SoakAnswer:
        outcome = await client.send(PlannedRequest(template, stream=False))
        if outcome.end != "answered":
            raise Unavailable(f"{template.name}: no reference, the request {outcome.end}: {outcome.code}")
        self._templates.append(template)
        self._references[template.name] = outcome.answer
        return outcome.answer

    async def _load(
        self, tally: Tally, numbers: random.Random, *, seconds: float = float("inf"), requests: float = float("inf")
    ) -> None:
        """Requests for so long, or so many by each of those who send them side by side."""
        until = time.perf_counter() + seconds

        async def one(client: SoakClient) -> None:
            sent = 0
            while time.perf_counter() < until and sent < requests:
                sent += 1
                outcome = await client.send(draw(self._templates, numbers, self._options.aborts))
                tally.take(outcome)
                if outcome.end == "refused":
                    await asyncio.sleep(REFUSED_S)

        async with self._connect() as client:
            await asyncio.gather(*(one(client) for _ in range(self._options.concurrency)))

    async def _rest(self, what: str) -> dict[str, ProcessUsage]:
        left = await self._processes.at_rest(self._deadlines.lease_s + REST_S)
        if left:
            raise Unavailable(f"{what}: left are {left}")
        return self._processes.usage()

    async def _sample(self, tally: Tally, faults: RandomFaults) -> None:
        """Remembers memory, and tells the progress."""
        began = told = time.perf_counter()
        while True:
            self._count_lives()
            await asyncio.sleep(SAMPLE_S)
            lives = {(name, self._cluster.children[name].pid): used for name, used in self._processes.usage().items()}
            tally.remember(lives)
            if (now := time.perf_counter()) - told >= PROGRESS_S:
                told = now
                ends = ", ".join(f"{count} {end}" for end, count in tally.ends.most_common())
                note(f"{now - began:.0f} s: {ends}; wrong {tally.wrong}, faults {faults.counts.total()}")

    def _count_lives(self) -> None:
        """One that can't even start does not count: Redis may be away, and the next try comes by itself."""
        for name, child in self._cluster.children.items():
            if child.ready.done():
                self._pids[name].add(child.pid)

    async def _is_well(self, name: str) -> bool:
        child = self._cluster.children[name]
        if name == "redis":
            return child.alive and child.ready.done()
        return (await self._processes.page(name, "/ready"))[0] == 200


async def measure(options: SoakOptions) -> int:
    async with own_cluster(options, options.max_num_seqs) as cluster:
        url = cluster.address("router")
        async with ChatClient(url) as chat:
            model = await chat.model()
        async with Processes(cluster) as processes:
            row = await Soak(options, cluster, lambda: SoakClient(url, model, options.request_timeout), processes).run()
    row["off"] += [f"stopping: {obituary}" for obituary in cluster.unclean]
    if not options.json:
        ResultTable(COLUMNS, as_json=False).row(row)
    print(json.dumps(row, allow_nan=False), flush=True)
    return 1 if row["off"] else 0


def run(options: SoakOptions) -> int:
    """Runs until all is at rest again."""
    return run_until_signal(measure(options))
