"""The client asks for exactly what is to be measured, and an answer that is not whole counts as a failure."""

import json

import pytest

from bench.serve.completions_client import CompletionsClient, Outcome, read_events
from bench.serve.workload import TimedRequest
from tests.support.fake_completions import DONE, REPORT, answer, event, serving, token, usage

REQUEST = TimedRequest(0.0, (300, 301), 3)


def lines(*events: bytes) -> list[tuple[float, bytes]]:
    """Events as the client takes them in, one a second from 1 s on."""
    return [(float(at), data.removeprefix(b"data:").strip()) for at, data in enumerate(events, 1)]


def read(*events: bytes) -> Outcome:
    return read_events(Outcome(REQUEST, sent_s=0.5), lines(*events))


def test_times_are_those_of_events_with_text():
    outcome = read(token("a"), token(""), token("b"), token("c"), usage(3, cached=1, report=REPORT), DONE)
    assert outcome.ok
    assert outcome.text_s == [1.0, 3.0, 4.0]
    assert (outcome.ttft_s, outcome.tpot_s, outcome.gaps_s) == (0.5, 1.5, [2.0, 1.0])
    assert (outcome.completion_tokens, outcome.cached_tokens, outcome.report) == (3, 1, REPORT)


def test_an_answer_of_one_token_has_no_time_per_output_token():
    outcome = read(token(), usage(1), DONE)
    assert (outcome.tpot_s, outcome.gaps_s) == (None, [])


def test_an_answer_of_special_tokens_alone_counts_from_its_end():
    outcome = read(token(""), event(choices=[{"index": 0, "text": "", "finish_reason": "length"}]), usage(2), DONE)
    assert outcome.ok
    assert (outcome.text_s, outcome.ttft_s, outcome.completion_tokens) == ([2.0], 1.5, 2)


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([token(), usage(1)], "broken off"),
        ([usage(1), DONE], "no tokens"),
        ([event(choices=[{"index": 0, "text": "", "finish_reason": "stop"}]), usage(0), DONE], "no tokens"),
        ([token(), event(error={"message": "worker lost"})], "worker lost"),
        ([b"data: not JSON\n\n", DONE], "no event"),
        ([b"data: []\n\n", DONE], "no event"),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failure(events, error):
    outcome = read(*events)
    assert error in outcome.error
    assert not outcome.ok


async def test_a_request_asks_for_its_tokens_greedily_to_their_full_number():
    async with serving(lambda body: answer(3)) as server, CompletionsClient(server.url, "tiny", 10.0) as client:
        outcome = await client.send(REQUEST)
    assert outcome.ok
    assert outcome.sent_s <= outcome.text_s[0] <= outcome.text_s[-1] <= outcome.ended_s
    (body,) = server.bodies
    assert body == {
        "model": "tiny",
        "prompt": [300, 301],
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_a_refusal_is_an_outcome_with_its_status():
    async with serving(lambda body: answer(1)) as server, CompletionsClient(server.url, "tiny", 10.0) as client:
        server.status = 429
        outcome = await client.send(REQUEST)
    assert outcome.error.startswith("429: ")
    assert json.loads(outcome.error.removeprefix("429: "))["error"]["message"] == "no room"


async def test_nobody_listening_is_an_outcome():
    async with serving(lambda body: answer(1)) as server:
        url = server.url
    async with CompletionsClient(url, "tiny", 10.0) as client:
        outcome = await client.send(REQUEST)
    assert "ClientConnector" in outcome.error


async def test_an_open_loop_waits_for_no_answer():
    requests = [TimedRequest(at / 1000, (300,), 2) for at in range(6)]
    async with serving(lambda body: answer(2)) as server, CompletionsClient(server.url, "tiny", 10.0) as client:
        server.pause_s = 0.1
        outcomes = await client.open_loop(requests)
    assert [outcome.request for outcome in outcomes] == requests
    assert server.most_running == len(requests)
    assert all(outcome.sent_s >= outcome.due_s for outcome in outcomes)


async def test_a_stream_sends_one_request_after_another():
    streams = [[TimedRequest(0.0, (300 + stream, number), 2) for number in range(3)] for stream in range(2)]
    async with serving(lambda body: answer(2)) as server, CompletionsClient(server.url, "tiny", 10.0) as client:
        server.pause_s = 0.02
        outcomes = await client.streams(streams)
    assert [outcome.request for outcome in outcomes] == [request for stream in streams for request in stream]
    assert server.most_running == len(streams)
