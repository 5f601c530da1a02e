"""What router and wire add is the difference of both ways, and their CPU time is counted by process and token."""

import json

import pytest

from bench.cpu_times import ProcessTime
from bench.options import RouterOptions
from bench.router.overhead import Latencies, added, cpu_a_token, latencies_of, measure, prompts_of
from bench.serve.completions_client import Outcome
from bench.serve.workload import TimedRequest
from common.errors import Unavailable
from tests.support.checkpoints import make_random_checkpoint


def latencies(*answers):
    made = Latencies()
    for token_s in answers:
        made.take(1.0, token_s)
    return made


def test_an_answer_has_a_first_token_gaps_and_an_end():
    one = latencies([1.5, 1.75, 2.25])
    assert (one.ttft, one.gap, one.e2e) == ([500.0], [250.0, 500.0], [1250.0])


def test_added_is_the_difference_of_both_ways():
    row = added(latencies([1.5, 2.0], [1.5, 2.0]), latencies([1.25, 1.5]))
    assert (row["ttft_ms_p50"], row["ttft_inprocess_ms_p50"], row["ttft_added_ms_p50"]) == (500.0, 250.0, 250.0)
    assert (row["gap_added_ms_p99"], row["e2e_added_ms_p50"]) == (250.0, 500.0)


def test_cpu_time_is_told_by_process_and_a_workers_engine_apart():
    spent = {"router": ProcessTime(2.0, 0.5), "decode-0": ProcessTime(9.0, 8.0), "prefill-0": ProcessTime(5.0, 4.0)}
    row = cpu_a_token(spent, tokens=1000)
    assert row == {
        "router_us_token": 2000.0,
        "decode-0_us_token": 9000.0,
        "prefill-0_us_token": 5000.0,
        "worker_wire_us_token": 2000.0,
        "worker_engine_us_token": 12000.0,
    }


def test_a_failed_request_spoils_the_run():
    with pytest.raises(Unavailable, match="worker lost"):
        latencies_of([Outcome(TimedRequest(0.0, (300,), 1), error="worker lost")])


@pytest.mark.parametrize(("streams", "each"), [(1, 5), (2, 3), (5, 1), (8, 1)])
def test_every_stream_has_its_part_of_the_requests_and_no_prompt_comes_twice(streams, each):
    options = RouterOptions(requests=5, prompt_tokens=8)
    prompts = [prompt for run in (0, 1) for stream in prompts_of(options, streams, run) for prompt in stream]
    assert [len(stream) for stream in prompts_of(options, streams, 0)] == [each] * streams
    assert len(set(prompts)) == len(prompts)


async def test_a_whole_run_has_a_row_for_each_number_of_streams_and_a_profile(tmp_path, capsys):
    directory = make_random_checkpoint(tmp_path / "model", vocab_size=288)
    options = RouterOptions(
        model=str(directory), prefill=1, streams="1,2", prompt_tokens=4, output_tokens=8, requests=4, runs=1,
        vocab_size=288, profile=True, json=True,
    )  # fmt: skip
    assert await measure(options) == 0
    *rows, profile = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["streams"], row["requests"], row["runs"]) for row in rows] == [(1, 4, 1), (2, 4, 1)]
    for row in rows:
        assert row["ttft_ms_p50"] > 0
        assert row["ttft_inprocess_ms_p50"] > 0
        assert {f"{name}_us_token" for name in ("router", "redis", "prefill-0", "decode-0", "client")} <= row.keys()
    shares = [one["share"] for one in profile["profile"]]
    assert profile["tokens"] > 0
    assert len(shares) == 5
    assert shares == sorted(shares, reverse=True)
    assert any(".py:" in one["function"] for one in profile["profile"])
