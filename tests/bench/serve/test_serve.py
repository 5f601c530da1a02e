"""What a run of requests comes to: percentiles, what TTFT is made of, and who met the limits."""

import json

import pytest

from bench.options import ServeOptions
from bench.serve.completions_client import Outcome
from bench.serve.serve import figures, is_good, measure
from bench.serve.workload import TimedRequest
from common.errors import ConfigError, Unavailable
from tests.support.fake_completions import REPORT, answer, serving

REQUEST = TimedRequest(0.0, (300,) * 10, 3)


def outcome(ttft_s=0.5, tpot_s=0.1, tokens=3, at_s=100.0, **more):
    """Sent at at_s; its tokens come evenly."""
    text_s = [at_s + ttft_s + index * tpot_s for index in range(tokens)]
    ended_s = more.pop("ended_s", text_s[-1])
    return Outcome(REQUEST, due_s=at_s, sent_s=at_s, text_s=text_s, ended_s=ended_s, completion_tokens=tokens, **more)


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "tokens", "good"),
    [
        (0.5, 0.1, 3, True),
        (1.0, 0.125, 3, True),  # the limits themselves
        (1.001, 0.1, 3, False),
        (0.5, 0.126, 3, False),
        (0.5, 9.0, 1, True),  # one token has no time per output token
        (1.001, 0.0, 1, False),
    ],
)
def test_a_good_request_meets_both_limits(ttft_s, tpot_s, tokens, good):
    one = outcome(ttft_s, tpot_s, tokens, at_s=0.0)
    assert is_good(one, slo_ttft_ms=1000.0, slo_tpot_ms=125.0) is good


def test_ttft_is_queue_prefill_and_the_rest():
    row = figures([outcome(0.010, report=REPORT)], 1000, 1000)
    assert (row["ttft_ms_p50"], row["queue_ms_p50"], row["prefill_ms_p50"]) == (10.0, 3.0, 4.0)
    assert row["first_token_ms_p50"] == pytest.approx(3.0)


def test_a_server_without_reports_has_no_parts_of_ttft():
    row = figures([outcome(0.010)], 1000, 1000)
    assert (row["ttft_ms_p50"], row["queue_ms_p50"], row["first_token_ms_p50"]) == (10.0, None, None)


def test_rates_are_over_the_time_from_the_first_request_to_the_last_end():
    row = figures([outcome(0.5, at_s=0.0), outcome(2.0, at_s=1.0, ended_s=5.0)], 1000, 1000)
    assert row["duration_s"] == 5.0
    assert row["requests_per_s"] == 0.4
    assert row["tokens_per_s"] == 1.2
    assert (row["goodput_per_s"], row["goodput_share"]) == (0.2, 0.5)


def test_a_failed_request_is_no_good_one_and_in_no_percentile():
    failed = Outcome(REQUEST, due_s=100.0, sent_s=100.0, ended_s=100.1, error="refused")
    row = figures([outcome(0.5), outcome(0.5), failed, failed], 1000, 1000)
    assert (row["ttft_ms_p99"], row["goodput_share"]) == (500.0, 0.5)


def test_gaps_are_those_of_all_answers_together():
    row = figures([outcome(tpot_s=0.1), outcome(tpot_s=0.3)], 1000, 1000)
    assert (row["gap_ms_p50"], row["tpot_ms_p50"]) == (200.0, 200.0)


def test_late_sending_and_cached_tokens_are_told():
    one = outcome(cached_tokens=5)
    one.due_s -= 0.25
    row = figures([one], 1000, 1000)
    assert (row["sent_late_ms_p99"], row["cached_share"], row["tokens_per_event"]) == (250.0, 0.5, 1.0)


def options(url, **changes):
    given = {"requests": 3, "rate": 200.0, "prompt_tokens": 4, "output_tokens": 2, "warmup": 1, "json": True}
    return ServeOptions(url=url, **{**given, **changes})


async def test_each_seed_is_a_row_and_the_last_has_the_medians(capsys):
    async with serving(lambda body: answer(body["max_tokens"], REPORT)) as server:
        assert await measure(options(server.url, seeds="0,1")) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    counted = [(row["seeds"], row["runs"], row["requests"]) for row in rows]
    assert counted == [([0], 1, 3), ([1], 1, 3), ([0, 1], 2, 6)]
    for row in rows:
        assert (row["arrivals"], row["rate"], row["length_scale"], row["time_scale"]) == ("poisson", 200.0, 1.0, 1.0)
        assert (row["warmup"], row["failed"]) == (1, 0)
        assert row["ttft_ms_p50"] > 0
        assert row["spread"]["ttft_ms_p50"][0] <= row["ttft_ms_p50"] <= row["spread"]["ttft_ms_p50"][1]
    assert len(server.bodies) == 2 * (1 + 3)
    assert len({tuple(body["prompt"]) for body in server.bodies}) == len(server.bodies)


async def test_a_trace_and_its_factors_are_in_the_row(tmp_path, capsys):
    trace = tmp_path / "chat.jsonl"
    rows = ({"timestamp": at, "input_length": 64, "output_length": 16, "hash_ids": [1]} for at in (0, 20, 40))
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with serving(lambda body: answer(body["max_tokens"])) as server:
        assert await measure(options(server.url, rate=None, trace=str(trace), scale=0.125)) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["arrivals"], row["length_scale"], row["time_scale"]) == ("chat.jsonl", 0.125, 0.125)
    assert {(len(body["prompt"]), body["max_tokens"]) for body in server.bodies} == {(8, 2)}


async def test_a_server_that_fails_everything_is_an_error():
    async with serving(lambda body: []) as server:
        with pytest.raises(Unavailable, match="warm up failed"):
            await measure(options(server.url))
        with pytest.raises(Unavailable, match="all requests failed"):
            await measure(options(server.url, warmup=0))


@pytest.mark.parametrize(("context", "fits"), [(None, True), (6, True), (5, False)])
async def test_requests_beyond_the_servers_context_are_an_error_before_any_is_sent(context, fits):
    async with serving(lambda body: answer(body["max_tokens"])) as server:
        server.max_model_len = context
        if fits:
            assert await measure(options(server.url)) == 0
        else:
            with pytest.raises(ConfigError, match=r"3 of 3 requests .* context of 5 tokens; the longest has 6"):
                await measure(options(server.url))
            assert server.bodies == []
