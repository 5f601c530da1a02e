"""The demo shows what a request took, and fails when what it is to show did not happen."""

from argparse import Namespace
from contextlib import asynccontextmanager
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from cli import demo
from cluster.chat_client import ChatAnswer
from cluster.plan import ClusterConfig, UpConfig
from common.engine.config import EngineConfig
from common.worker.config import WorkerConfig
from router.config import RouterConfig
from router.pipeline.generation import Report
from tests.support.fake_router import DONE, event, running_router

REPORT = Report(
    prompt_tokens=70,
    completion_tokens=11,
    attempts=1,
    prefill_worker="prefill-0",
    decode_worker="decode-0",
    router_queue_s=0.001,
    prefill_queue_s=0.002,
    prefill_s=0.25,
    handover_s=0.002,
    handover_bytes=2_000_000,
    transport="shm",
    decode_queue_s=0.003,
    decode_cached_tokens=48,
    first_token_s=0.3,
    last_token_s=1.3,
)


def report(**changes) -> dict:
    return {**asdict(REPORT), **changes}


def turn(text: str = "Blue light scatters.", **changes) -> list[bytes]:
    return [event(text, "stop"), event(kvrelay=report(**changes)), DONE]


async def run_demo(monkeypatch, *turns: list[bytes], alive: bool = True, unclean: tuple[str, ...] = ()) -> int:
    """The demo's own run, against a router that answers so."""
    async with running_router() as router:
        router.turns = list(turns)

        @asynccontextmanager
        async def make_cluster(config, console):
            children = {"prefill-0": SimpleNamespace(alive=alive)}
            yield SimpleNamespace(address=lambda name: router.url, children=children, unclean=unclean)

        monkeypatch.setattr(demo, "make_cluster", make_cluster)
        config = ClusterConfig(UpConfig(), RouterConfig(model="m"), EngineConfig(model="m"), WorkerConfig())
        status = await demo._run(config, max_tokens=20)
        if len(router.requests) == 2:
            first, second = (request["messages"] for request in router.requests)
            assert second[: len(first)] == first  # the second turn goes on from the first
            assert second[-2]["role"] == "assistant"
        return status


async def test_two_turns_are_streamed_and_summed_up(monkeypatch, capsys):
    assert await run_demo(monkeypatch, turn("It scatters."), turn("A longer way.", cached_tokens=64)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for text in (
        "tiny: It scatters.\n",
        "tiny: A longer way.\n",
        "TTFT         300 ms",
        "TPOT         100 ms",
        "0 of the 70 prompt tokens were cached",
        "64 of the 70 prompt tokens were cached",
        "2.00 MB of KV in 2.0 ms by shm (1.00 GB/s); KV of 48 tokens was there already",
        "by prefill-0: queued for 2.0 ms, computed in 250 ms",
        "by decode-0: queued for 3.0 ms, 10 tokens in 1.00 s",
    ):
        assert text in out


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        (turn(" \n"), turn(cached_tokens=64), "turn 1: the answer is empty"),
        (turn(handover_bytes=0), turn(cached_tokens=64), "turn 1: no KV was handed over"),
        (turn(), turn(cached_tokens=64, transport=""), "turn 2: no KV was handed over"),
        (turn(), turn(cached_tokens=64, decode_worker=""), "turn 2: no KV was handed over"),
        (turn(), turn(cached_tokens=0), "turn 2: the history of the chat was no prefix hit"),
    ],
)
async def test_what_did_not_happen_is_an_error(monkeypatch, capsys, first, second, problem):
    assert await run_demo(monkeypatch, first, second) == 1
    assert capsys.readouterr().err == f"error: {problem}\n"


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"alive": False}, "prefill-0 died"),
        ({"unclean": ("router died: exit status 1",)}, "router died: exit status 1"),
    ],
)
async def test_a_process_that_ends_badly_is_an_error(monkeypatch, capsys, state, problem):
    assert await run_demo(monkeypatch, turn(), turn(cached_tokens=64), **state) == 1
    assert capsys.readouterr().err == f"error: {problem}\n"


def test_a_transport_that_there_is_not_is_refused_before_a_model_is_fetched(monkeypatch):
    monkeypatch.setattr("cluster.model_fetch.ensure_demo_model", lambda: pytest.fail("fetched"))
    with pytest.raises(demo.KVRelayError) as caught:
        demo.run(Namespace(model=None, max_tokens=1, transport="pigeon"))
    assert caught.value.field == "transport"


async def test_a_router_without_reports_is_an_error(monkeypatch):
    with pytest.raises(demo.KVRelayError, match="no report"):
        await run_demo(monkeypatch, [event("text", "stop"), DONE])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"completion_tokens": 1, "last_token_s": 0.3}, "TPOT"),
        ({"handover_s": 0.0, "handover_bytes": 0, "transport": ""}, "by nothing"),
        ({"completion_tokens": 0, "first_token_s": 0.0, "last_token_s": 0.0}, "0 of answer"),
    ],
)
def test_a_summary_survives_what_is_missing(changes, text):
    assert text in "\n".join(demo.summary(ChatAnswer("x", "stop", {}, report(**changes))))


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0.0 ms"), (0.0012, "1.2 ms"), (0.0456, "46 ms"), (0.999, "999 ms"), (1.5, "1.50 s")]
)
def test_seconds_are_shown_in_a_readable_unit(value, text):
    assert demo.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (1_474_560, "1.47 MB"), (5.85e9, "5.85 GB")]
)
def test_sizes_are_shown_in_a_readable_unit(value, text):
    assert demo.size(value) == text
