"""What this machine can do at best: streaming bandwidth and matmul peak, measured on the spot.

    python -m bench.probe [--dtype bfloat16]      (taskset names the cores)

bench/probe.cpp is built once into the cache directory. Without a compiler torch stands in, and the result says so:
a floor from torch's own rates is too high, so ratios to it look better than they are.
"""

import argparse
import json
import logging
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from common.compute.native_build import NativeUnavailable, build
from common.log import get_logger, log_event

log = get_logger("probe")

SOURCE = Path(__file__).with_name("probe.cpp")
RUN_S = 120.0
# probe.cpp's figures that are a peak for products of this dtype
PEAKS = {
    "float32": ("fp32_gflop_s",),
    "float16": ("fp32_gflop_s",),
    "bfloat16": ("fp32_gflop_s", "avx512_bf16_gflop_s", "amx_bf16_gflop_s"),
}
SHAPES = ((512, 576, 3072), (512, 1024, 4096), (1024, 2048, 2048))  # of torch's linear: rows, inner, columns


@dataclass(frozen=True, slots=True)
class Probe:
    """The limits of the cores that this process may use, and what measured them."""

    cores: int
    stream_gb_s: float
    matmul_gflop_s: float
    stream_by: str
    matmul_by: str


def measure(dtype: str) -> Probe:
    """Takes the cores that this process may use; torch's threads should be as many."""
    cores = len(os.sched_getaffinity(0))
    native = native_figures(cores)
    torch_peak = torch_matmul_gflop_s(getattr(torch, dtype))
    if native is None:
        return Probe(cores, torch_stream_gb_s(), torch_peak, "torch sum", "torch linear")
    peaks = {f"probe {name}": native[name] for name in PEAKS[dtype] if native.get(name)}
    peaks["torch linear"] = torch_peak
    best = max(peaks, key=lambda name: peaks[name])
    return Probe(cores, native["stream_gb_s"], peaks[best], "probe", best.removesuffix("_gflop_s"))


def native_figures(threads: int) -> dict[str, float] | None:
    """What probe.cpp prints; None where it can't be built or run."""
    try:
        program = build(SOURCE, library=False)
        done = subprocess.run([str(program), str(threads)], capture_output=True, timeout=RUN_S, check=True)
        return {name: float(value) for name, value in json.loads(done.stdout).items()}
    except (NativeUnavailable, OSError, subprocess.SubprocessError, ValueError) as error:
        log_event(log, logging.WARNING, "no probe; torch stands in", reason=str(error))
        return None


def best_s(run: Callable[[], object], times: int) -> float:
    """The shortest of several runs, after one that does not count."""
    run()
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def torch_stream_gb_s() -> float:
    """Of a sum over 256 MiB."""
    data = torch.ones(2**26, dtype=torch.float32)
    return data.nbytes / best_s(data.sum, 10) / 1e9


def torch_matmul_gflop_s(dtype: torch.dtype) -> float:
    """Of the best of some linear layers."""
    best = 0.0
    for rows, inner, columns in SHAPES:
        x, weight = torch.ones(rows, inner, dtype=dtype), torch.ones(columns, inner, dtype=dtype)
        seconds = best_s(lambda x=x, weight=weight: torch.nn.functional.linear(x, weight), 7)  # type: ignore[misc]
        best = max(best, 2 * rows * inner * columns / seconds / 1e9)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the cores that this process may use.")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(PEAKS), help="default: %(default)s")
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    result: dict[str, Any] = asdict(measure(arguments.dtype))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
