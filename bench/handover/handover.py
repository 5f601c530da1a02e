"""kvrelay bench handover: KV from a holder's process into this one's pool, while an engine decodes here.

Apart: the copy (first byte to last), the whole hand-over (claim, blocks, copy, the holder's word), and the wait for
the next step, which a running batch makes any newcomer have. Copies alternate with plain ones of as many blocks out of
the same memory: by memcpy, and through a bare TCP connection. Each set of blocks is moved once before it counts, so
that all pages are mapped.
"""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from bench.engines import build, fill_pool, greedy, settings
from bench.handover.decoding import BACKGROUND_TOKENS, WAIT_S, BackgroundDecoding
from bench.handover.holder_process import FINGERPRINT, Holder, running_holder
from bench.options import HandoverOptions
from bench.report import ResultTable, Row
from bench.stats import median, rounded, summary
from cluster.local_cluster import run_until_signal
from common.block_hash import BLOCK_SIZE
from common.deadlines import Deadlines
from common.engine.build import BuiltEngine
from common.engine.sequence import Sequence as EngineSequence
from common.errors import KVRelayError
from kvtransfer.reader import KVReader
from kvtransfer.transport import choose

SETS = 8  # of blocks, taken in turn: together far more than a cache holds
COLUMNS = (
    *("blocks_are", "tokens", "bytes", "transport", "copy_ms", "gb_s", "memcpy_gb_s", "of_memcpy"),
    *("socket_gb_s", "of_socket"),
    *("handover_ms", "step_wait_ms", "step_ms", "batch", "runs"),
)


@dataclass
class Times:
    """Milliseconds, one entry a run."""

    copy: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)
    socket: list[float] = field(default_factory=list)
    handover: list[float] = field(default_factory=list)
    step_wait: list[float] = field(default_factory=list)


class HandoverBench:
    """Hand-overs and plain copies of the same blocks, in turn."""

    def __init__(
        self, options: HandoverOptions, built: BuiltEngine, holder: Holder, decoding: BackgroundDecoding
    ) -> None:
        self._tokens = options.tokens
        self._pool = built.pool
        self._holder = holder
        self._decoding = decoding
        self._reader = KVReader(
            built.pool, built.layout, FINGERPRINT, Deadlines(), time.perf_counter, transports=choose(options.transport)
        )
        self._count = 0
        self.transport = ""

    async def close(self) -> None:
        await self._reader.close()

    def _newcomer(self) -> EngineSequence:
        self._count += 1
        ids = [self._count] * (self._tokens + 1)  # its KV is all but the last one's
        return EngineSequence(f"new-{self._count}", ids, len(ids), greedy(1))  # gone after its first step

    async def hand_over(self, block_ids: Sequence[int], times: Times) -> None:
        """As decode_svc does it."""
        sequence = self._newcomer()
        first_step = self._decoding.expect(sequence.key)
        handle = await self._holder.hold(self._tokens, block_ids)
        began = time.perf_counter()
        async with (
            self._reader.claimed(handle) as claim,
            self._decoding.admission.reserved([sequence]) as reservation,
        ):
            stats = await claim.pull(list(zip(handle.block_ids, reservation.block_ids, strict=True)))
            await claim.confirm()
        admitted = time.perf_counter()
        async with asyncio.timeout(WAIT_S):
            stepped = await first_step
        self.transport = stats.transport
        times.copy.append(stats.seconds * 1e3)
        times.handover.append((admitted - began) * 1e3)
        times.step_wait.append(max(0.0, stepped - admitted) * 1e3)

    async def copy_plainly(self, block_ids: Sequence[int], times: Times) -> None:
        """As many blocks by memcpy and through a socket, in a thread as well, and nothing else."""
        engine = self._decoding.engine
        reservation = engine.reserve([self._newcomer()])
        if reservation is None:
            raise KVRelayError("no room for one more sequence")
        try:
            pairs = list(zip(block_ids, reservation.block_ids, strict=True))
            times.memcpy.append(await asyncio.to_thread(self._memcpy_ms, pairs))
            times.socket.append(await asyncio.to_thread(self._socket_ms, pairs))
        finally:
            engine.cancel(reservation)

    def _memcpy_ms(self, pairs: Sequence[tuple[int, int]]) -> float:
        size, target = self._pool.block_bytes, np.frombuffer(self._pool.memory, np.uint8)
        began = time.perf_counter()
        for first_source, first_target, count in runs_of(pairs):
            source_at, target_at, length = first_source * size, first_target * size, count * size
            np.copyto(target[target_at : target_at + length], self._holder.memory[source_at : source_at + length])
        return (time.perf_counter() - began) * 1e3

    def _socket_ms(self, pairs: Sequence[tuple[int, int]]) -> float:
        size, runs = self._pool.block_bytes, list(runs_of(pairs))
        sources = [(source * size, count * size) for source, _, count in runs]
        targets = [(target * size, count * size) for _, target, count in runs]
        return self._holder.loopback.fetch_ms(sources, self._pool.memory, targets)


def runs_of(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(first source, first target, count) of blocks that lie side by side on both sides."""
    by_offset = groupby(enumerate(pairs), lambda item: (item[1][0] - item[0], item[1][1] - item[0]))
    for _, group in by_offset:
        blocks = [pair for _, pair in group]
        yield *blocks[0], len(blocks)


def block_sets(kind: str, blocks: int) -> list[list[int]]:
    """SETS sets of as many blocks each, of a pool that holds them all."""
    ids = list(range(SETS * blocks))
    if kind == "scattered":
        random.Random(0).shuffle(ids)
    return [ids[start : start + blocks] for start in range(0, len(ids), blocks)]


async def measure(options: HandoverOptions, built: BuiltEngine, report: ResultTable) -> int:
    num_blocks = -(-options.tokens // BLOCK_SIZE)
    async with running_holder(built.layout, SETS * num_blocks, options.transport) as holder:
        decoding = BackgroundDecoding(built, options.batch, options.context)
        bench = HandoverBench(options, built, holder, decoding)
        decoding.start()
        try:
            for kind in ("contiguous", "scattered"):
                sets = block_sets(kind, num_blocks)
                for block_ids in sets:
                    await bench.hand_over(block_ids, Times())
                    await bench.copy_plainly(block_ids, Times())
                times = Times()
                decoding.step_ms.clear()
                for number in range(options.runs):
                    await bench.hand_over(sets[number % SETS], times)
                    await bench.copy_plainly(sets[(number + SETS // 2) % SETS], times)
                size = num_blocks * built.layout.block_bytes
                row = {"blocks_are": kind, "tokens": options.tokens, "bytes": size, "transport": bench.transport}
                report.row({**row, "batch": options.batch, **figures(times, decoding.step_ms, size)})
        finally:
            await decoding.stop()
            await bench.close()
    return 0


def figures(times: Times, step_ms: Sequence[float], size: int) -> Row:
    """Medians over the runs; rates in 10^9 bytes a second."""
    rates = [size / ms / 1e6 for ms in times.copy]
    plain = [size / ms / 1e6 for ms in times.memcpy]
    bare = [size / ms / 1e6 for ms in times.socket]
    return {
        "runs": len(times.copy),
        "of_memcpy": rounded(median(rates) / median(plain)),
        "of_socket": rounded(median(rates) / median(bare)),
        **summary(
            {
                "copy_ms": times.copy,
                "gb_s": rates,
                "memcpy_ms": times.memcpy,
                "memcpy_gb_s": plain,
                "socket_ms": times.socket,
                "socket_gb_s": bare,
                "handover_ms": times.handover,
                "step_wait_ms": times.step_wait,
                "step_ms": step_ms,
            }
        ),
    }


def run(options: HandoverOptions) -> int:
    """Prints a row for blocks that lie side by side, and one for blocks that don't."""
    choose(options.transport)  # what is wrong with it is said before the model is read
    model, longest = str(options.model), max(options.tokens, options.context + BACKGROUND_TOKENS) + 4
    seqs = 2 * options.batch + 2  # newcomers, and a new batch that comes before the old one has gone
    built = build(settings(model, options.dtype, threads=options.threads, max_model_len=longest, max_num_seqs=seqs))
    try:
        fill_pool(built)
        return run_until_signal(measure(options, built, ResultTable(COLUMNS, as_json=options.json)))
    finally:
        built.pool.close()
