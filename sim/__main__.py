"""Runs schedules: python -m sim --schedules N [--start SEED] [--jobs J], or --seed S --trace."""

import argparse
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from sim.faults import KINDS
from sim.world import Result, run_seed

CHUNK = 250  # schedules of one call to a process
MANY = 5000  # in so many schedules, each of these has to happen: what never happens proves nothing
HAPPENS = (
    *("crashes", "restarts", "freezes", "partitions", "failed steps", "clients that left", "forged tokens seen"),
    *("hand-overs", "resumes", "preemptions", "expired leases", "releases", "refused releases", "aborted forks"),
    *("waits for blocks", "prefix hits", "copies cut off", "redis outages", "pulls over gRPC"),
    *(f"outcome {name}" for name in ("finished", "left", "broken", "token_mismatch")),
    *(f"schedules with {kind}" for kind in ("none", *KINDS)),
)


def run_range(start: int, stop: int) -> tuple[Counter[str], list[Result]]:
    """The sum of all counts, and the schedules in which something didn't hold."""
    counts: Counter[str] = Counter()
    failed = []
    for seed in range(start, stop):
        result = run_seed(seed)
        counts.update(result.counts)
        if result.violation is not None:
            failed.append(result)
    return counts, failed


def _begin() -> None:
    """In each process: what is imported stays, and no collection looks at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def run_many(start: int, count: int, jobs: int) -> Iterator[tuple[int, Counter[str], list[Result]]]:
    """Spread over processes; yields (schedules, counts, failed) as they come, in order."""
    starts = range(start, start + count, CHUNK)
    stops = [min(begin + CHUNK, start + count) for begin in starts]
    with ProcessPoolExecutor(jobs, initializer=_begin) as pool:
        try:
            for begin, stop, (counts, failed) in zip(starts, stops, pool.map(run_range, starts, stops), strict=True):
                yield stop - begin, counts, failed
        finally:  # who has seen enough does not wait for the rest
            pool.shutdown(wait=False, cancel_futures=True)


def show(result: Result) -> None:
    print(f"seed {result.seed}: {result.violation}", file=sys.stderr)
    print(f"  replay: python -m sim --seed {result.seed} --trace", file=sys.stderr)


def run_one(seed: int, trace: bool) -> int:
    result = run_seed(seed, trace=trace)
    if trace:
        print("\n".join(result.trace))
    if result.violation is not None:
        show(result)
    return result.violation is not None


def main() -> int:
    parser = argparse.ArgumentParser(prog="sim", description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--failures", type=int, default=5, help="stop after so many")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--trace", action="store_true", help="with --seed: show what happens")
    parser.add_argument("--digest", action="store_true", help="show a digest of each schedule's trace, and no more")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return run_one(arguments.seed, arguments.trace)
    if arguments.digest:
        for seed in range(arguments.start, arguments.start + arguments.schedules):
            print(f"{seed} {run_seed(seed, trace=True).digest:08x}")
        return 0
    began, done, failures = time.monotonic(), 0, 0
    counts: Counter[str] = Counter()
    for number, some, failed in run_many(arguments.start, arguments.schedules, arguments.jobs):
        done += number
        counts.update(some)
        for result in failed:
            failures += 1
            show(result)
        if failures >= arguments.failures:
            break
    seconds = time.monotonic() - began
    print(f"{done} schedules in {seconds:.1f} s, {done / seconds:.0f} a second; {failures} with a violation")
    for name, count in sorted(counts.items()):
        print(f"  {count:10} {name}")
    missing = [name for name in HAPPENS if not counts[name]] if done >= MANY else []
    if missing:
        print(f"never happened: {', '.join(missing)}", file=sys.stderr)
    return failures > 0 or bool(missing)


if __name__ == "__main__":
    sys.exit(main())
