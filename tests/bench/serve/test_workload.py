"""A seed gives the same requests, Poisson arrivals have the rate asked for, and a trace is fitted to it."""

import json
import statistics
from itertools import pairwise

import pytest

from bench.options import TrafficOptions
from bench.serve.workload import make, unique_prompts
from common.errors import ConfigError


def options(**changes):
    return TrafficOptions(**{"requests": 8, "prompt_tokens": 4, "output_tokens": 3, **changes})


def trace_file(tmp_path, *at_ms):
    path = tmp_path / "trace.jsonl"
    rows = ({"timestamp": at, "input_length": 1024, "output_length": 64, "hash_ids": [1, 2]} for at in at_ms)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_seed_gives_the_same_requests_and_another_gives_others():
    assert make(options(), 1) == make(options(), 1)
    assert make(options(), 1).requests[0].prompt_ids != make(options(), 2).requests[0].prompt_ids
    assert make(options(), 1).requests[1].at_s != make(options(), 2).requests[1].at_s


def test_requests_have_the_lengths_asked_for_and_share_no_prefix():
    requests = make(options(requests=50), 0).requests
    assert {(len(one.prompt_ids), one.output_tokens) for one in requests} == {(4, 3)}
    assert len({one.prompt_ids for one in requests}) == 50


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process():
    times = [one.at_s for one in make(options(requests=4000, rate=5.0), 0).requests]
    pauses = [after - before for before, after in pairwise(times)]
    assert times[0] == 0.0
    assert statistics.mean(pauses) == pytest.approx(0.2, rel=0.1)
    assert statistics.stdev(pauses) == pytest.approx(0.2, rel=0.1)


def test_constant_arrivals_come_at_even_times():
    assert [one.at_s for one in make(options(requests=4, rate=2.0, arrivals="constant"), 0).requests] == [
        0,
        0.5,
        1,
        1.5,
    ]


@pytest.mark.parametrize("vocab_size", [257, 300, 8192])
def test_prompts_stay_within_the_vocabulary_and_clear_of_special_tokens(vocab_size):
    ids = next(unique_prompts(200, 0, vocab_size))
    assert all(256 <= token_id < vocab_size for token_id in ids)


def test_a_trace_is_scaled_in_length_and_time_by_one_factor(tmp_path):
    workload = make(options(trace=trace_file(tmp_path, 0, 4000), scale=0.25), 0)
    assert [(one.at_s, len(one.prompt_ids), one.output_tokens) for one in workload.requests] == [
        (0.0, 256, 16),
        (1.0, 256, 16),
    ]
    assert (workload.length_scale, workload.time_scale, workload.rate) == (0.25, 0.25, 1.0)


def test_a_rate_stretches_a_traces_time_and_the_factor_says_so(tmp_path):
    workload = make(options(trace=trace_file(tmp_path, 0, 1000, 2000), scale=0.25, rate=0.1), 0)
    assert [one.at_s for one in workload.requests] == [0.0, 10.0, 20.0]
    assert (workload.time_scale, workload.rate) == (10.0, pytest.approx(0.1))


def test_a_rate_can_not_stretch_what_comes_at_once(tmp_path):
    with pytest.raises(ConfigError, match="come at once") as caught:
        make(options(trace=trace_file(tmp_path, 5, 5), rate=1.0), 0)
    assert caught.value.field == "rate"
