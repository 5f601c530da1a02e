"""Event streams live through long waits, and a slow client holds up nobody but itself."""

import asyncio
import json

import pytest

from common.deadlines import Deadlines
from common.errors import NoWorker
from common.text.text_model import TextModel
from tests.support.fakes import FakePipeline
from tests.support.http_tools import CHAT, COMPLETION, HELLO, MODEL, PATIENCE_S, data_of, delta, eventually, serve
from tests.support.tiny_text import model_directory


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(model_directory(tmp_path_factory.mktemp("model")))


class TestKeepAlive:
    async def test_comments_come_while_nothing_else_does(self, text: TextModel) -> None:
        go_on = asyncio.Event()
        deadlines = Deadlines(keepalive_s=0.01)
        async with (
            serve(text, go_on, *HELLO, deadlines=deadlines) as served,
            served.session.post(served.url + "/v1/chat/completions", json={**CHAT, "stream": True}) as response,
        ):
            assert response.status == 200
            assert "Server-Timing" not in response.headers
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            go_on.set()
            rest = (await response.read()).decode()
        events = [event for event in rest.split("\n\n") if event and event != ": keep-alive"]
        assert len(data_of(events)) == 4
        assert events[-1] == "data: [DONE]"

    async def test_a_failure_after_one_is_an_event(self, text: TextModel) -> None:
        deadlines = Deadlines(keepalive_s=0.01)
        async with serve(text, 0.05, NoWorker("nobody there"), deadlines=deadlines) as served:
            response, events = await served.stream("/v1/chat/completions", CHAT)
        assert (response.status, events[0]) == (200, ": keep-alive")
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "no_worker"

    async def test_comments_lose_nothing_and_come_only_into_silence(self, text: TextModel) -> None:
        pauses = [step for letter in "abcdefgh" for step in (0.02, delta(letter))]
        async with serve(
            text, *pauses, delta("", finish_reason="stop"), deadlines=Deadlines(keepalive_s=0.005)
        ) as busy:
            _, events = await busy.stream("/v1/completions", COMPLETION)
        async with serve(text, *pauses, delta("", finish_reason="stop")) as quiet:
            _, plain = await quiet.stream("/v1/completions", COMPLETION)
        assert events.count(": keep-alive") > 1
        assert ": keep-alive" not in plain
        told = [event for event in events if event != ": keep-alive"]
        assert [one["choices"] for one in data_of(told)] == [one["choices"] for one in data_of(plain)]

    async def test_pipelines_own_timeout_is_no_keep_alive(self, text: TextModel) -> None:
        async with serve(text, delta("a"), TimeoutError()) as served:
            _, events = await served.stream("/v1/completions", COMPLETION)
        assert "error" in data_of(events)[-1]


class TestSlowClients:
    BODY = json.dumps({**COMPLETION, "stream": True}).encode()
    HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY)

    async def test_wait_alone_and_hold_little(self, text: TextModel) -> None:
        endless = FakePipeline(*[delta("x" * 10_000)] * 10_000, delta("", finish_reason="stop"))
        async with serve(text, pipeline=endless) as served:
            _, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]), limit=2**10)
            writer.write(self.HEAD + self.BODY)
            await eventually(lambda: endless.yielded > 10)
            before = -1
            while endless.yielded != before:  # until its buffers are full
                before = endless.yielded
                await asyncio.sleep(0.1)
            assert before < 5_000
            response, _ = await served.get("/health")
            assert response.status == 200
            writer.close()
            await eventually(lambda: not endless.running)

    async def test_are_cut_off_at_the_requests_deadline(self, text: TextModel) -> None:
        endless = FakePipeline(*[delta("x" * 10_000)] * 10_000)
        deadlines = Deadlines(request_s=0.3, rpc_s=0.1)
        async with serve(text, pipeline=endless, deadlines=deadlines) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]), limit=2**10)
            writer.write(self.HEAD + self.BODY)
            labels = {"model_name": MODEL, "role": "router", "endpoint": "/v1/completions", "status": "200"}
            counted = served.metrics.registry.get_sample_value
            await eventually(lambda: counted("kvrelay:http_requests_total", labels) == 1)
            assert not endless.running
            async with asyncio.timeout(PATIENCE_S):
                received = await reader.read()
            assert received.count(b"data: ") > 1
            assert not received.endswith(b"0\r\n\r\n")  # the end of a chunked body
            writer.close()
