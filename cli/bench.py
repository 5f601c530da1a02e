"""kvrelay bench: measures against the machine's limits and against other servers."""

import argparse
import importlib
from dataclasses import replace
from typing import Any

from bench.options import (
    BatchingOptions,
    BurstOptions,
    HandoverOptions,
    RouterOptions,
    ServeOptions,
    SoakOptions,
    StallsOptions,
    StepOptions,
    StreamsOptions,
)
from common.settings import add_arguments, from_arguments

KINDS: dict[str, tuple[type, str, str]] = {  # the options, the module that takes them, a help text
    "step": (StepOptions, "bench.step.step", "the engine's own steps, against the machine's limits"),
    "handover": (HandoverOptions, "bench.handover.handover", "KV from one process to another, against memcpy"),
    "serve": (ServeOptions, "bench.serve.serve", "a running server under load: TTFT, TPOT, gaps, goodput"),
    "soak": (
        SoakOptions,
        "bench.soak.soak",
        "a whole cluster for long, under requests of all kinds, aborts and faults",
    ),
    "burst": (BurstOptions, "bench.router.burst", "many times more requests at once than there is room for"),
    "streams": (
        StreamsOptions,
        "bench.router.streams",
        "files, threads, memory and lag of the router with many streams",
    ),
    "stalls": (StallsOptions, "bench.router.stalls", "how long hostile requests keep the router from others"),
    "router": (RouterOptions, "bench.router.overhead", "CPU time a token of router and wire, and the latency they add"),
    "batching": (
        BatchingOptions,
        "bench.step.batching",
        "continuous against static batching, and paged against preallocated memory",
    ),
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("bench", description="Measures; every figure is a median and says of how many runs.")
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, (options, _, text) in KINDS.items():
        add_arguments(kinds.add_parser(name, help=text, description=f"Measures {text}."), options)


def run(arguments: argparse.Namespace) -> int:
    kind, module_name, _ = KINDS[arguments.kind]
    options: Any = from_arguments(kind, arguments)
    if kind is not ServeOptions and options.model is None:
        from cluster.model_fetch import ensure_demo_model

        options = replace(options, model=str(ensure_demo_model()))
    status: int = importlib.import_module(module_name).run(options)
    return status
