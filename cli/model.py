"""kvrelay model: gets the demo model."""

import argparse
from pathlib import Path

from cli.fetch import MODELS, cache_directory, fetch

DEMO_MODEL = "smollm2-135m"


def ensure_demo_model() -> Path:
    """The demo model's directory, fetched if it is not there. Raises ModelError."""
    return fetch(DEMO_MODEL, cache_directory())


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("model", description="Fetches models.")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    text = "Downloads and converts a model, once; prints its directory."
    fetching = actions.add_parser("fetch", help="download and convert a model", description=text)
    fetching.add_argument("name", nargs="?", default=DEMO_MODEL, choices=sorted(MODELS), help="default: %(default)s")


def run(arguments: argparse.Namespace) -> int:
    print(fetch(arguments.name, cache_directory()))
    return 0
