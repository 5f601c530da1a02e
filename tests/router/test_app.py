"""The HTTP API over real sockets: a client that leaves leaves nothing running, time is limited, pages are there."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

import pytest

from common.deadlines import Deadlines
from common.text.text_model import TextModel
from common.version import VERSION
from router.pipeline.generation import Delta, Generation, GenerationRequest
from tests.support.fakes import FakePipeline
from tests.support.http_tools import BOTH, CHAT, COMPLETION, HELLO, MODEL, data_of, delta, eventually, serve
from tests.support.paths import ROOT
from tests.support.tiny_text import model_directory


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(model_directory(tmp_path_factory.mktemp("model")))


class TestClientsThatLeave:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("steps", [0, 1])
    @pytest.mark.parametrize("prompts", [1, 3])
    async def test_leave_nothing_running(self, text: TextModel, stream: bool, steps: int, prompts: int) -> None:
        forever = asyncio.Event()
        pipeline = FakePipeline(*[delta("a")] * steps, forever)
        async with serve(text, pipeline=pipeline) as served:
            body = {**COMPLETION, "prompt": [[5]] * prompts, "stream": stream}
            post = asyncio.create_task(served.session.post(served.url + "/v1/completions", json=body))
            await eventually(lambda: len(pipeline.running) == prompts and pipeline.yielded == steps * prompts)
            if stream and steps:
                (await post).close()
            else:
                post.cancel()
            await eventually(lambda: not pipeline.running)
            counted = served.metrics.registry.get_sample_value
            labels = {"model_name": MODEL, "role": "router", "endpoint": "/v1/completions", "status": "499"}
            await eventually(lambda: counted("kvrelay:http_requests_total", labels) == 1)

    async def test_in_the_middle_of_a_body_are_no_error(
        self, text: TextModel, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with serve(text) as served:
            _, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            counted = served.metrics.registry.get_sample_value
            labels = {"model_name": MODEL, "role": "router", "endpoint": "/v1/completions", "status": "499"}
            await eventually(lambda: counted("kvrelay:http_requests_total", labels) == 1)
        assert not caplog.records


class TestRequestsTime:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_is_limited_even_if_the_pipeline_hangs(self, text: TextModel, stream: bool) -> None:
        deadlines = Deadlines(request_s=0.05, rpc_s=0.05)
        async with serve(text, asyncio.Event(), deadlines=deadlines) as served:
            response, body = await served.post("/v1/completions", {**COMPLETION, "stream": stream})
        assert (response.status, body["error"]["code"]) == (504, "request_timeout")

    async def test_ends_a_stream_with_an_event(self, text: TextModel) -> None:
        deadlines = Deadlines(request_s=0.1, rpc_s=0.1)
        async with serve(text, delta("a"), asyncio.Event(), deadlines=deadlines) as served:
            _, events = await served.stream("/v1/completions", COMPLETION)
        assert data_of(events)[-1]["error"]["code"] == "request_timeout"


class TestHeaders:
    @pytest.mark.parametrize("given", ["abc", "A-b_c.9:x", "x" * 128])
    @pytest.mark.parametrize("stream", [False, True])
    async def test_request_id_is_echoed(self, text: TextModel, given: str, stream: bool) -> None:
        async with serve(text, *HELLO) as served:
            body = {**COMPLETION, "stream": stream}
            async with served.session.post(
                served.url + "/v1/completions", json=body, headers={"X-Request-Id": given}
            ) as response:
                assert response.headers["X-Request-Id"] == given
            assert served.pipeline.requests[0].request_id != given

    async def test_two_live_requests_may_have_the_same_id(self, text: TextModel) -> None:
        def script(request: GenerationRequest) -> list[Any]:
            return [go, delta(str(request.prompt_ids[0]), finish_reason="stop")]

        go, headers = asyncio.Event(), {"X-Request-Id": "same"}
        pipeline = FakePipeline(script=script)
        async with serve(text, pipeline=pipeline) as served:
            posts = [
                asyncio.create_task(served.post("/v1/completions", {**COMPLETION, "prompt": [one]}, headers=headers))
                for one in (7, 8)
            ]
            await eventually(lambda: len(pipeline.running) == 2)
            go.set()
            answers = [await post for post in posts]
        assert [body["choices"][0]["text"] for _, body in answers] == ["7", "8"]
        assert [response.headers["X-Request-Id"] for response, _ in answers] == ["same", "same"]
        assert answers[0][1]["id"] != answers[1][1]["id"]

    @pytest.mark.parametrize("stream", [False, True])
    async def test_server_timing_tells_what_is_known(self, text: TextModel, stream: bool) -> None:
        class Handing(FakePipeline):
            async def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
                async for one in super().generate(generation):
                    yield one
                    await handed_over.wait()
                    report = generation.report
                    report.transport, report.handover_s, report.decode_queue_s = "shm", 0.0015, 2.0

        handed_over = asyncio.Event()
        if not stream:
            handed_over.set()
        async with serve(text, pipeline=Handing(*HELLO)) as served:
            body = {**COMPLETION, "stream": stream}
            async with served.session.post(served.url + "/v1/completions", json=body) as response:
                timing = response.headers["Server-Timing"]
                handed_over.set()
                await response.read()
        later = "" if stream else ", handover;dur=1.5, decode-queue;dur=2000.0"
        assert timing == "queue;dur=750.0, prefill;dur=1500.0" + later

    @pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "ü", 'a"b'])
    @pytest.mark.parametrize("path", ["/health", "/nowhere"])
    async def test_request_id_is_made_where_none_is_usable(self, text: TextModel, given: str | None, path: str) -> None:
        async with serve(text) as served:
            headers = {} if given is None else {"X-Request-Id": given}
            ids = [(await served.get(path, headers=headers))[0].headers["X-Request-Id"] for _ in range(2)]
        assert given not in ids
        assert len(set(ids)) == 2

    @pytest.mark.parametrize(("path", "body"), BOTH)
    async def test_report_comes_where_asked_for(self, text: TextModel, path: str, body: Any) -> None:
        async with serve(text, *HELLO) as served:
            headers = {"X-KVRelay-Report": "1"}
            _, whole = await served.post(path, body, headers=headers)
            _, events = await served.stream(path, body, headers=headers)
            reports = [asdict(generation.report) for generation in served.pipeline.generations]
        last = data_of(events)[-1]
        assert [whole["kvrelay"], last["kvrelay"]] == reports
        assert last["choices"] == []

    async def test_report_of_several_prompts_is_a_list(self, text: TextModel) -> None:
        async with serve(text, *HELLO) as served:
            body = {**COMPLETION, "prompt": ["a", "b"]}
            _, whole = await served.post("/v1/completions", body, headers={"X-KVRelay-Report": "1"})
        assert len(whole["kvrelay"]) == 2


class TestOtherPages:
    async def test_models(self, text: TextModel) -> None:
        async with serve(text) as served:
            _, models = await served.get("/v1/models")
            response, model = await served.get(f"/v1/models/{MODEL}")
        assert models == {"object": "list", "data": [model]}
        assert response.status == 200
        assert model == {
            "id": MODEL,
            "object": "model",
            "created": 1700000000,
            "owned_by": "kvrelay",
            "max_model_len": 128,
        }

    @pytest.mark.parametrize(("ready", "status"), [((True, ""), 200), ((False, "no decode worker"), 503)])
    async def test_ready_and_health(self, text: TextModel, ready: tuple[bool, str], status: int) -> None:
        async with serve(text, ready=lambda: ready) as served:
            response, body = await served.get("/ready")
            health, _ = await served.get("/health")
        assert (response.status, health.status) == (status, 200)
        assert body == {"ready": ready[0], "reason": ready[1]}

    async def test_version(self, text: TextModel) -> None:
        async with serve(text) as served:
            response, body = await served.get("/version")
        assert (response.status, body) == (200, {"version": VERSION})

    async def test_metrics_count_by_route(self, text: TextModel) -> None:
        async with serve(text, *HELLO) as served:
            await served.post("/v1/chat/completions", CHAT)
            await served.get("/made/up/path")
            response, page = await served.get("/metrics")
        assert response.headers["Content-Type"].startswith("text/plain")
        chat = f'endpoint="/v1/chat/completions",model_name="{MODEL}",role="router",status="200"'
        other = f'endpoint="other",model_name="{MODEL}",role="router",status="404"'
        assert f"kvrelay:http_requests_total{{{chat}}} 1.0" in page
        assert f"kvrelay:http_requests_total{{{other}}} 1.0" in page
        assert "made" not in page


def test_importing_the_app_loads_no_heavy_package() -> None:
    code = "import router.app, sys; print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


NAMES = (MODEL, "alias")


@pytest.mark.parametrize(("path", "body"), [*BOTH, ("/tokenize", COMPLETION), ("/detokenize", {"tokens": [5]})])
async def test_a_model_answers_to_each_of_its_names_and_to_none(text: TextModel, path: str, body: Any) -> None:
    async with serve(text, *HELLO, model_names=NAMES) as served:
        for asked, told in (("alias", "alias"), (MODEL, MODEL), (None, MODEL)):
            response, reply = await served.post(path, {**body, "model": asked})
            assert (response.status, reply.get("model", told)) == (200, told)
        response, reply = await served.post(path, {**body, "model": "other"})
        assert (response.status, reply["error"]["code"]) == (404, "model_not_found")
        assert "org/tiny, alias" in reply["error"]["message"]


async def test_every_name_has_a_card(text: TextModel) -> None:
    async with serve(text, model_names=NAMES) as served:
        _, models = await served.get("/v1/models")
        assert [card["id"] for card in models["data"]] == list(NAMES)
        for name in NAMES:
            _, card = await served.get(f"/v1/models/{name}")
            assert card["id"] == name
