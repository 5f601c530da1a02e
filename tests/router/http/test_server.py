"""Clients that send slowly, too much or no HTTP are cut off with few words; others on the same server are not."""

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from common.deadlines import Deadlines
from common.settings import Bytes
from common.text.text_model import TextModel
from router.config import RequestLimits
from tests.support.http_tools import COMPLETION, HELLO, PATIENCE_S, Served, serve
from tests.support.tiny_text import model_directory

pytestmark = pytest.mark.slow

BODY = json.dumps(COMPLETION).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(BODY)
SHORT = Deadlines(http_header_s=0.3, http_body_s=0.3, http_idle_s=60)
IDLE = Deadlines(http_header_s=60, http_body_s=60, http_idle_s=0.3)
LONG = Deadlines(http_header_s=60, http_body_s=60, http_idle_s=60)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(model_directory(tmp_path_factory.mktemp("model")))


class Raw:
    """A connection of bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def drip(self, data: bytes, pause_s: float = 0.02) -> None:
        """A byte at a time, until all are sent or nobody takes them."""
        for place in range(len(data)):
            if self.writer.is_closing() or self.reader.at_eof():
                return
            self.writer.write(data[place : place + 1])
            await asyncio.sleep(pause_s)

    async def answer(self) -> bytes:
        """All that comes until the server closes."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""


@asynccontextmanager
async def connection(served: Served) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def body_of(answer: bytes) -> dict[str, object]:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


@pytest.mark.parametrize("sent", [b"P", HEAD, HEAD[:-2], HEAD + b"X-More: " + b"x" * 100], ids=len)
async def test_slow_headers_get_a_408(text: TextModel, sent: bytes) -> None:
    async with serve(text, deadlines=SHORT) as served, connection(served) as raw:
        raw.writer.write(sent)
        answer = await raw.answer()
    assert status_of(answer) == 408
    assert body_of(answer)["code"] == "request_too_slow"
    assert len(answer) < 600


async def test_a_byte_now_and_then_is_no_excuse(text: TextModel) -> None:
    async with serve(text, deadlines=SHORT) as served, connection(served) as raw:
        dripping = asyncio.create_task(raw.drip(HEAD + b"X: " + b"x" * 5000))
        assert status_of(await raw.answer()) == 408
        await dripping


async def test_a_body_that_is_announced_as_too_large_is_refused_before_it_comes(text: TextModel) -> None:
    async with serve(text) as served, connection(served) as raw:
        raw.writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n{")
        answer = await asyncio.wait_for(raw.reader.readuntil(b"\r\n"), 10)
    assert status_of(answer) == 413


@pytest.mark.parametrize(
    ("limits", "size", "count", "status"),
    [
        (RequestLimits(), 8190, 1, 200),
        (RequestLimits(), 8200, 1, 400),
        (RequestLimits(max_header_size=Bytes(2**16)), 60_000, 1, 200),
        (RequestLimits(max_header_size=Bytes(2**16)), 66_000, 1, 400),
        (RequestLimits(), 1, 130, 400),
        (RequestLimits(max_header_count=200), 1, 130, 200),
    ],
)
async def test_headers_are_taken_up_to_the_limits(
    text: TextModel, limits: RequestLimits, size: int, count: int, status: int
) -> None:
    lines = b"".join(b"X-%d: %s\r\n" % (number, b"x" * (size - len("X-0"))) for number in range(count))
    async with serve(text, *HELLO, limits=limits) as served, connection(served) as raw:
        raw.writer.write(HEAD + lines + b"\r\n" + BODY)
        assert status_of(await asyncio.wait_for(raw.reader.readuntil(b"\r\n"), PATIENCE_S)) == status


@pytest.mark.parametrize("sent", [b"", BODY[:-1]], ids=["nothing", "all but a byte"])
async def test_a_slow_body_gets_a_408(text: TextModel, sent: bytes) -> None:
    async with serve(text, deadlines=SHORT) as served, connection(served) as raw:
        raw.writer.write(HEAD + b"\r\n" + sent)
        answer = await raw.answer()
        assert not served.pipeline.generations
    assert status_of(answer) == 408
    assert body_of(answer)["code"] == "request_too_slow"
    assert b"connection: close" in answer.lower()


async def test_a_dripping_body_gets_a_408(text: TextModel) -> None:
    async with serve(text, deadlines=SHORT) as served, connection(served) as raw:
        raw.writer.write(HEAD.replace(b"%d" % len(BODY), b"9999") + b"\r\n")
        dripping = asyncio.create_task(raw.drip(b" " * 9999))
        answer = await raw.answer()
        dripping.cancel()
    assert not answer or status_of(answer) == 408  # a reset, by what is still being sent, may overtake it


@pytest.mark.parametrize("requests", [0, 1, 2])
async def test_an_idle_connection_is_closed_without_a_word(text: TextModel, requests: int) -> None:
    async with serve(text, *HELLO, deadlines=IDLE) as served, connection(served) as raw:
        for _ in range(requests):
            raw.writer.write(HEAD + b"\r\n" + BODY)
            head = await raw.reader.readuntil(b"\r\n\r\n")
            assert status_of(head) == 200
            size = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await raw.reader.readexactly(int(size.split(b":")[1]))
        assert await raw.answer() == b""


async def test_the_next_request_on_a_connection_has_its_own_time(text: TextModel) -> None:
    deadlines = Deadlines(http_header_s=0.3, http_body_s=60, http_idle_s=60)
    async with serve(text, deadlines=deadlines) as served, connection(served) as raw:
        raw.writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await raw.reader.readuntil(b"}")
        await asyncio.sleep(0.5)
        raw.writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await raw.reader.readuntil(b"}")
        raw.writer.write(b"GET /hea")
        assert status_of(await raw.answer()) == 408


async def test_a_long_answer_is_not_taken_for_a_slow_request(text: TextModel) -> None:
    async with serve(text, 0.8, *HELLO, deadlines=SHORT) as served:
        response, body = await served.post("/v1/completions", COMPLETION)
    assert (response.status, body["choices"][0]["text"]) == (200, "Hello")


async def test_headers_that_came_while_the_server_was_busy_are_in_time(text: TextModel) -> None:
    async with serve(text, *HELLO, deadlines=SHORT) as served, connection(served) as raw:
        while not served.guards:
            await asyncio.sleep(0.005)
        raw.writer.write(HEAD + b"Connection: close\r\n\r\n" + BODY)
        time.sleep(2 * SHORT.http_header_s)  # noqa: ASYNC251 (the loop stands still)
        assert status_of(await raw.answer()) == 200


async def test_pipelined_requests_are_answered_in_order(text: TextModel) -> None:
    async with serve(text, *HELLO, deadlines=LONG) as served, connection(served) as raw:
        raw.writer.write((HEAD + b"\r\n" + BODY) * 3 + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await raw.answer()
    assert answer.count(b"200 OK") == 4
    assert answer.endswith(b'{"status":"ok"}')


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + b"s3cret" * 5000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-A: b\r\n" * 1000 + b"\r\n",
        b"s3cret s3cret s3cret\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00" + b"\xff" * 300,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
    ids=lambda sent: str(sent[:24]),
)
async def test_what_is_no_proper_http_is_refused_in_few_words(
    text: TextModel, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with serve(text, deadlines=LONG) as served, connection(served) as raw:
            raw.writer.write(sent)
            answer = await raw.answer()
            response, _ = await served.get("/health")
    assert response.status == 200
    assert not answer or (400 <= status_of(answer) < 500)
    assert len(answer) < 1000
    assert not answer or body_of(answer)["type"] == "invalid_request_error"
    assert b"s3cret" not in answer
    assert "s3cret" not in caplog.text


async def test_an_unknown_expectation_is_refused_like_all_else(text: TextModel) -> None:
    head = HEAD + b"Connection: close\r\nX-Request-Id: mine\r\nExpect: " + b"s3cret" * 1000 + b"\r\n\r\n"
    async with serve(text, deadlines=LONG) as served, connection(served) as raw:
        raw.writer.write(head + BODY)
        answer = await raw.answer()
    assert status_of(answer) == 417
    assert b"X-Request-Id: mine\r\n" in answer
    assert body_of(answer) == {
        "message": "Expectation Failed", "type": "invalid_request_error", "param": None, "code": "expectation_failed"
    }  # fmt: skip


@pytest.mark.parametrize("sent", [b"no gzip", b"\x1f\x8b\x08" + b"\xff" * 300])
async def test_a_broken_body_is_no_fault_of_the_server(
    text: TextModel, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
    async with serve(text, deadlines=LONG) as served, connection(served) as raw:
        raw.writer.write(head % len(sent) + sent)
        answer = await raw.answer()
    assert status_of(answer) == 400
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("closing", ["close", "reset", "half"])
async def test_a_client_that_leaves_in_its_headers_leaves_nothing(text: TextModel, closing: str) -> None:
    async with serve(text, deadlines=LONG) as served:
        async with connection(served) as raw:
            raw.writer.write(HEAD)
            await raw.writer.drain()
            if closing == "reset":
                raw.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            elif closing == "half":
                raw.writer.write_eof()
                await raw.answer()
        response, _ = await served.get("/health")
        assert response.status == 200
