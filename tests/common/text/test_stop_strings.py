"""A stop string ends a text wherever the text is cut, and costs about as much as the text is long."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.text.stop_strings import StopChecker


@pytest.mark.parametrize(
    ("stop", "include", "texts", "emitted", "stopped"),
    [
        (("END",), False, ["abE", "N", "D tail"], "ab", "END"),
        (("END",), True, ["abE", "N", "D tail"], "abEND", "END"),
        (("END",), False, ["abE", "N", "x"], "abENx", None),
        (("abc", "b"), False, ["abc"], "a", "b"),  # b is complete first
        (("abc", "bc"), False, ["xabc"], "x", "abc"),  # both at once: the longer
        ((), False, ["abc"], "abc", None),
        (("\n\n",), False, ["a\n", "\nb"], "a", "\n\n"),
        (("aab",), False, ["aa", "ab"], "a", "aab"),
    ],
)
def test_stops(stop: tuple[str, ...], include: bool, texts: list[str], emitted: str, stopped: str | None) -> None:
    assert run_checker(stop, include, texts) == (emitted, stopped)


@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    texts=st.lists(st.text("abc", max_size=5), max_size=6),
)
@settings(max_examples=500, deadline=None)
def test_is_what_reading_letter_by_letter_gives(stop: list[str], include: bool, texts: list[str]) -> None:
    assert run_checker(tuple(stop), include, texts) == letter_by_letter(stop, include, "".join(texts))


@given(stop=st.text("ab", min_size=1, max_size=4), texts=st.lists(st.text("abc", max_size=3), max_size=6))
@settings(max_examples=300, deadline=None)
def test_holds_back_what_could_begin_a_stop_string_and_no_more(stop: str, texts: list[str]) -> None:
    checker = StopChecker((stop,), include=False)
    seen, emitted = "", ""
    for text in texts:
        seen += text
        out, stopped = checker.push(text)
        emitted += out
        if stopped is not None:
            break
        held = max(length for length in range(len(stop)) if seen.endswith(stop[:length]) or length == 0)
        assert emitted == seen[: len(seen) - held]


@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    early=st.lists(st.text("abc", max_size=3), max_size=4),
    late=st.lists(st.text("abc", max_size=3), max_size=4),
)
@settings(max_examples=500, deadline=None)
def test_only_a_stop_string_that_ends_while_it_is_armed_counts(
    stop: list[str], early: list[str], late: list[str]
) -> None:
    checker = StopChecker(tuple(stop), include=True)
    outs = [checker.push(text, armed=False) for text in early] + [checker.push(text) for text in late]
    emitted, stopped = "".join(out for out, _ in outs), outs[-1][1] if outs else None
    before, whole = len("".join(early)), "".join([*early, *late])
    ends = [end for end in range(before + 1, len(whole) + 1) if whole[:end].endswith(tuple(stop))]
    assert (stopped is not None) == bool(ends)
    assert emitted + checker.finish() == (whole[: ends[0]] if ends else whole)


def test_says_nothing_after_the_stop() -> None:
    checker = StopChecker(("x",), include=False)
    assert checker.push("axb") == ("a", "x")
    assert checker.push("more") == ("", "x")
    assert checker.finish() == ""


def run_checker(stop: tuple[str, ...], include: bool, texts: list[str]) -> tuple[str, str | None]:
    checker = StopChecker(stop, include)
    emitted = ""
    for text in texts:
        out, stopped = checker.push(text)
        emitted += out
        if stopped is not None:
            return emitted, stopped
    return emitted + checker.finish(), None


def letter_by_letter(stop: list[str], include: bool, text: str) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        met = sorted((s for s in stop if text[:end].endswith(s)), key=len)
        if met:
            return text[:end] if include else text[: end - len(met[-1])], met[-1]
    return text, None


LONG = 1024
NEAR = {
    "one repeated letter": (tuple("a" * (LONG - 1) + chr(98 + k) for k in range(14)), ["aaaa"] * 1000),
    "repeated halves": (tuple(("a" * 511 + "b") * 2 + chr(99 + k) for k in range(14)), ["a" * 511 + "b"] * 8),
    "begun again and again": (tuple("ab" * 512 + chr(99 + k) for k in range(14)), ["abab", "aab"] * 500),
}


@pytest.mark.parametrize("kind", NEAR)
def test_near_matches_cost_a_few_lines_a_character(kind: str) -> None:
    """Counted, not timed: lines that run, a character and a stop string."""
    stops, texts = NEAR[kind]
    checker = StopChecker(stops, include=False)
    count = lines_of(lambda: [checker.push(text) for text in texts])
    assert count / (len("".join(texts)) * len(stops)) < 20


def test_no_work_is_done_for_stop_strings_that_do_not_begin() -> None:
    checker = StopChecker(tuple(chr(97 + k) * LONG for k in range(16)), include=False)
    assert lines_of(lambda: checker.push("Z" * 10_000)) < 300


def lines_of(run: Callable[[], Any]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count
