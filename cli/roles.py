"""kvrelay router|prefill|decode: one role in this process, as a pod runs it."""

import importlib
from collections.abc import Sequence

from cli.environment import check_environment

MODULES = {"router": "router", "prefill": "prefill_svc", "decode": "decode_svc"}


def run(role: str, argv: Sequence[str]) -> int:
    """The role's own main function, as `python -m` runs it."""
    check_environment(role)
    status: int = importlib.import_module(f"{MODULES[role]}.__main__").main(argv)
    return status
