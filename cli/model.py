"""kvrelay model: gets the demo model, shows what a model is."""

import argparse

from cluster.model_fetch import DEMO_MODEL, MODELS, fetch
from common.cache_directory import cache_directory
from common.engine.config import EngineConfig
from common.settings import add_arguments, from_arguments

HIDDEN = ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "threads")  # they change nothing shown


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("model", description="Fetches and shows models.")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    text = "Downloads and converts a model, once; prints its directory."
    fetching = actions.add_parser("fetch", help="download and convert a model", description=text)
    fetching.add_argument("name", nargs="?", default=DEMO_MODEL, choices=sorted(MODELS), help="default: %(default)s")
    text = "Reads a model's files as a worker would, loads nothing, and prints what would be loaded."
    showing = actions.add_parser("show", help="what would be loaded", description=text)
    showing.add_argument("model", metavar="MODEL", help="model directory, GGUF file or owner/name on the hub")
    add_arguments(showing, EngineConfig, skip=HIDDEN)
    showing.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "fetch":
        print(fetch(arguments.name, cache_directory()))
        return 0
    from cli.show import show  # reads models; fetching does without

    show(from_arguments(EngineConfig, arguments, skip=HIDDEN), in_json=arguments.json)
    return 0
