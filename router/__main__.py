"""The router: python -m router."""

import argparse
import sys
from collections.abc import Sequence

from common.config import RedisConfig, RouterConfig, from_arguments
from common.deadlines import Deadlines
from common.role import run_role


async def run(arguments: argparse.Namespace) -> int:
    """Serves until a signal; returns the exit status."""
    settings = from_arguments(RouterConfig, arguments)
    redis_settings = from_arguments(RedisConfig, arguments)
    deadlines = Deadlines().scaled(settings.deadline_scale)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run_role("router", (RouterConfig, RedisConfig), run, argv)


if __name__ == "__main__":
    sys.exit(main())
