"""Bodies of requests: received within bounds of time and memory, and looked over before anything is made of them.

Whoever parses JSON holds the interpreter until all of it is parsed. What a large body holds is therefore counted
first, in steps too short for others to notice, and a body with more in it than any request needs goes no further.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from aiohttp import web

from common.errors import InvalidRequest, Overloaded, SlowClient
from router.http.sse import ClientGone
from router.openai.strict_json import cut

INLINE = 32 * 2**10  # bytes; larger bodies are parsed and tokenized in a thread
THREADS = 2  # that do so; each takes its turns from the event loop
AT_ONCE = 8  # of the largest bodies may be in memory
STEP = 2**16  # bytes that are counted before others may run
MAX_CONTAINERS = 2**14  # arrays and objects
MAX_STRINGS = 2**17  # names of fields included
SPARE_VALUES = 2**18  # beside two for each token of a context
SPARE_BYTES = 4 * 2**20
BYTES_A_TOKEN = 64
QUOTE, BACKSLASH = b'"', ord("\\")
Made = TypeVar("Made")


def largest_body(max_model_len: int) -> int:
    """Bytes of a body that can be of use: a whole context of long tokens, or of ids, and some megabytes."""
    return SPARE_BYTES + BYTES_A_TOKEN * max_model_len


class Bodies:
    """Reads bodies for one event loop."""

    def __init__(self, max_size: int, max_model_len: int, patience_s: float) -> None:
        self.most_held = AT_ONCE * max_size
        self.num_held = 0  # bytes of large bodies
        self._max_values = SPARE_VALUES + 2 * max_model_len
        self._patience_s = patience_s
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="body")

    async def close(self, _: web.Application) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def received(self, http: web.Request) -> AsyncIterator[bytes]:
        """All of it, which counts as held until the block ends.

        Raises InvalidRequest, SlowClient, Overloaded or ClientGone, and aiohttp's error for one that is too large.
        """
        held = HeldBody(self)
        try:
            yield await self.read(http, held)
        finally:
            held.grow(0)

    async def make(self, make: Callable[[bytes], Made], body: bytes) -> Made:
        """What is made of a large body, while others are served."""

        def checked() -> Made:
            check_counts(body, self._max_values)
            return make(body)

        return await asyncio.get_running_loop().run_in_executor(self._threads, checked)

    async def read(self, http: web.Request, held: "HeldBody") -> bytes:
        told, most = http.content_length or 0, http.client_max_size
        if told > most:  # before it is sent
            raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=told)
        body = bytearray()
        try:
            async with asyncio.timeout(self._patience_s):
                while chunk := await http.content.readany():
                    body += chunk
                    if len(body) > most:
                        raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=len(body))
                    held.grow(len(body))
        except TimeoutError:
            raise SlowClient(f"the body did not arrive within {self._patience_s:g} s") from None
        except web.RequestPayloadError as error:  # its chunks or its compression are broken
            raise InvalidRequest(f"the body can't be read: {cut(str(error))}") from error
        except ConnectionError as error:
            raise ClientGone from error
        return bytes(body)


class HeldBody:
    """What one body has of the memory for all."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._size = 0

    def grow(self, size: int) -> None:
        """To so many bytes; small ones are free. Raises Overloaded."""
        size = size if size > INLINE else 0
        more = size - self._size
        if more > 0 and self._bodies.num_held + more > self._bodies.most_held:
            raise Overloaded("too many large bodies are on their way")
        self._bodies.num_held += more
        self._size = size


def check_counts(body: bytes, max_values: int) -> None:
    """Raises InvalidRequest for JSON with more in it than any request needs; for what is no JSON it may."""
    unescaped = 0  # quotes, at least: the backslash may be a character itself
    for start in range(0, len(body), STEP):
        unescaped += body.count(QUOTE, start, start + STEP) - body.count(b'\\"', start, start + STEP + 1)
        _check("strings", (unescaped - 1) // 2, MAX_STRINGS)
    at = containers = values = strings = 0
    while at < len(body):
        quote = body.find(QUOTE, at)
        end = len(body) if quote < 0 else quote
        for start in range(at, end, STEP):
            stop = min(end, start + STEP)
            containers += body.count(b"[", start, stop) + body.count(b"{", start, stop)
            values += body.count(b",", start, stop)
            _check("arrays and objects", containers, MAX_CONTAINERS)
            _check("values", values, max_values)
        if quote < 0:
            return
        at, strings = _end_of_string(body, quote + 1), strings + 1
        _check("strings", strings, MAX_STRINGS)


def _check(what: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"the body has more than {most} {what}")


def _end_of_string(body: bytes, start: int) -> int:
    """The place behind the quote that ends it."""
    at = body.find(QUOTE, start)
    while at >= 0:
        before = at - 1
        while before >= start and body[before] == BACKSLASH:
            before -= 1
        if (at - before) % 2:  # an even number of backslashes
            return at + 1
        at = body.find(QUOTE, at + 1)
    return len(body)
