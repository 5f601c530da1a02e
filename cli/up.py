"""kvrelay up: a cluster of local processes, until Ctrl-C."""

import argparse
import asyncio

from cli.environment import check_environment
from cluster.children import Console
from cluster.local_cluster import run_until_signal
from cluster.plan import PER_WORKER, ClusterConfig, UpConfig, make_cluster
from common.engine.config import EngineConfig
from common.model.open import open_model
from common.rpc.config import SecurityConfig
from common.settings import add_arguments
from common.worker.config import WorkerConfig
from router.config import RequestLimits, RouterConfig


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Runs a cluster on this machine until Ctrl-C: Redis, workers and the router."
    parser = subparsers.add_parser("up", description=text)
    add_arguments(parser, UpConfig, RouterConfig, RequestLimits, EngineConfig, SecurityConfig)
    add_arguments(parser, WorkerConfig, skip=PER_WORKER)


def run(arguments: argparse.Namespace) -> int:
    check_environment("up")
    config = ClusterConfig.from_arguments(arguments)
    open_model(config.engine, weights=True)  # from the hub: once, not by each process
    return run_until_signal(_run(config))


async def _run(config: ClusterConfig) -> int:
    began, console = asyncio.get_running_loop().time(), Console()
    async with make_cluster(config, console) as cluster:
        workers = f"{config.up.prefill} prefill, {config.up.decode} decode"
        console.say(
            f"ready {cluster.address('router')} ({workers}) in {asyncio.get_running_loop().time() - began:.1f} s"
        )
        try:
            await cluster.run()
        except asyncio.CancelledError:
            console.say("stopping")  # asked to: no failure
    for line in cluster.unclean:
        console.say(line)
    return 1 if cluster.unclean else 0
