"""A soak's counts, its leaks by kind, and its memory's slope."""

import pytest

from bench.processes import ProcessUsage
from bench.soak.request_mix import PlannedRequest, Template
from bench.soak.tally import Tally, growth, leaks
from bench.soak.whole_answers import SoakAnswer, SoakChoice, SoakOutcome

TEMPLATE = Template("t0", False, {"prompt": "x"})
WHOLE = SoakAnswer([SoakChoice("abc", [], "stop")], 4, 3)


def outcome(end="answered", answer=WHOLE, code="", events=(1.0, 1.5, 2.5)):
    return SoakOutcome(PlannedRequest(TEMPLATE, True), answer, end, code, sent_s=0.5, event_s=list(events), ended_s=3.0)


def tally(*outcomes):
    made = Tally({"t0": WHOLE})
    for one in outcomes:
        made.take(one)
    return made


def usage(mb=100.0, threads=10, files=20):
    return ProcessUsage(mb, mb, threads, files)


def test_every_end_is_counted_and_what_is_wrong_is_told(capsys):
    part = SoakAnswer([SoakChoice("ab")])
    other = SoakAnswer([SoakChoice("xyz", [], "stop")], 4, 3)
    made = tally(outcome(), outcome(answer=other), outcome("aborted", part), outcome("failed", part, "timeout"))
    figures = made.figures()
    assert [figures[end] for end in ("requests", "answered", "aborted", "failed", "hung", "refused", "wrong")] == [
        *(4, 2, 1, 1, 0, 0, 1)
    ]
    assert figures["errors"] == {"timeout": 1}
    told = capsys.readouterr().err
    assert "wrong: " in told
    assert "xyz" in told
    assert "failed: timeout" in told


def test_times_are_of_streamed_complete_answers():
    made = tally(outcome(), outcome("aborted", SoakAnswer([SoakChoice("a")]), events=(9.0,)))
    assert (made.ttft_ms, made.tpot_ms, made.stall_ms) == ([500.0], [750.0], [1000.0])
    assert made.figures()["ttft_ms_p50"] == 500.0


def test_figures_of_nothing_are_none():
    assert Tally({}).figures()["ttft_ms_p50"] is None
    assert Tally({}).slopes() == {}


def test_the_slope_is_of_what_comes_after_the_warm_up():
    made = Tally({"t0": WHOLE})
    for number in range(4000):
        made.take(outcome())
        if number % 40 == 0:
            grown_mb = min(number, 1000) * 0.05 + number / 1e3 * 3  # steep at first, then 3 MB for 1,000
            made.remember({("router", 1): usage(100 + grown_mb), ("decode-0", number): usage()})
    assert made.slopes() == {"router": pytest.approx(3.0, rel=1e-3)}  # no life of the other lasts


def test_leaks_are_told_by_kind_and_unknown_gauges_by_their_names():
    left = {
        "decode-0 kv_used_blocks": 3.0,
        "prefill-0 kv_held_blocks": 2.0,
        "decode-0 kv_cache_usage_perc": 0.1,
        "router num_requests_waiting": 1.0,
        "prefill-0 kv_leases": 4.0,
        "router something_new": 5.0,
    }
    assert leaks(left) == {
        "blocks": 5.0,
        "leases": 4.0,
        "claims": 0.0,
        "attempts": 0.0,
        "sequences": 1.0,
        "something_new": 5.0,
    }
    assert not any(leaks({}).values())


def test_growth_compares_processes_that_were_there_before():
    before, after = {"router": usage(), "redis": usage()}, {"router": usage(threads=12, files=15), "new": usage()}
    assert growth(before, after) == {"open_files": {"router": -5}, "threads": {"router": 2}}
