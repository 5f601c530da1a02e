"""Asks one page again and again, over one connection, in a process of its own, and tells how long that took.

python -m bench.router.lag_probe '{"host": ..., "port": ..., "every_ms": ...}'; ends with its standard input, and then
prints the times in milliseconds as JSON. A page without work takes the time until the server's event loop is free, its
handler, and this machine's scheduling of both processes.
"""

import asyncio
import http.client
import json
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench.pinned import module_command, run_child
from common.errors import Unavailable

EVERY_MS = 20.0
ANSWER_S = 60.0
BEGUN = {"begun": True}


@asynccontextmanager
async def probing(
    host: str, port: int, path: str = "/health", every_ms: float = EVERY_MS
) -> AsyncIterator[list[float]]:
    """Probes from the first answer on, while the body runs; then the list has the times. Raises Unavailable."""
    options = {"host": host, "port": port, "path": path, "every_ms": every_ms}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*module_command(__name__, options), stdin=pipe, stdout=pipe)
    times_ms: list[float] = []
    try:
        assert process.stdout is not None
        async with asyncio.timeout(ANSWER_S):
            begun = await process.stdout.readline()
        if json.loads(begun or "{}") != BEGUN:
            raise Unavailable(f"the probe got no answer: {begun.decode(errors='replace') or 'it died'}")
        yield times_ms
        async with asyncio.timeout(2 * ANSWER_S):
            output, _ = await process.communicate(b"")  # which closes its input
        answer = json.loads(output or "{}")
        if "ms" not in answer:
            raise Unavailable(f"the probe got no answer: {answer.get('error', 'it died')}")
        times_ms += answer["ms"]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def main() -> None:
    options = json.loads(sys.argv[1])
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    connection = http.client.HTTPConnection(options["host"], options["port"], timeout=ANSWER_S)
    times_ms: list[float] = []
    try:
        while not (times_ms and ended.wait(options["every_ms"] / 1e3)):
            began = time.perf_counter()
            connection.request("GET", options["path"])
            connection.getresponse().read()
            times_ms.append((time.perf_counter() - began) * 1e3)
            if len(times_ms) == 1:
                print(json.dumps(BEGUN), flush=True)
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(repr(error)) from error
    print(json.dumps({"ms": times_ms}), flush=True)


if __name__ == "__main__":
    run_child(main)
