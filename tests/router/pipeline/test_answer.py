"""Proves that an answer is its tokens, each once and in order, and that its text is theirs up to what ended it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import KVRelayError, TokenMismatch
from common.sampling import SamplingParams
from common.text.text_model import TextModel
from router.pipeline.answer import Answer
from router.pipeline.generation import Delta, GenerationRequest
from tests.support.fake_cluster import letters
from tests.support.fake_turns import EOS, a_token


def an_answer(text: TextModel, **request: Any) -> Answer:
    return Answer(0, GenerationRequest("request", (1,), SamplingParams(), **request), text)


def say(answer: Answer, ids: list[int], reason: str = "", **more: Any) -> list[Delta]:
    """The deltas of these tokens; the last one has the finish reason."""
    known = len(answer.output_ids)
    deltas = []
    for index, token_id in enumerate(ids, known):
        last = index == known + len(ids) - 1
        token = a_token(0, index, token_id, reason if last else "", **(more if last else {}))
        deltas.append(answer.accept(token))
    return [delta for delta in deltas if delta is not None]


def joined(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def end(deltas: list[Delta]) -> tuple[str | None, str | int | None]:
    return deltas[-1].finish_reason, deltas[-1].stop_reason


def test_the_text_is_that_of_all_tokens(text: TextModel) -> None:
    ids = text.encode("Über die Brücke: 東京 \N{GRINNING FACE}")
    answer = an_answer(text)
    deltas = say(answer, ids, "length")
    assert joined(deltas) == "Über die Brücke: 東京 \N{GRINNING FACE}"
    assert [token.token_id for delta in deltas for token in delta.tokens] == ids == answer.output_ids
    assert end(deltas) == ("length", None)
    assert answer.finished
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(ids) - 1)


def test_half_a_character_comes_out_at_the_end(text: TextModel) -> None:
    first, *_ = text.encode("\N{GRINNING FACE}")
    deltas = say(an_answer(text), [*letters(text, "a"), first], "length")
    assert [delta.text for delta in deltas] == ["a", "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("said", "stop", "before", "met"),
    [
        ("one, two", (",",), "one", ","),
        ("one, two", (", t",), "one", ", t"),
        ("one, two", (", t", ","), "one", ","),  # whichever is complete first
        ("aab", ("ab",), "a", "ab"),
        ("stop", ("s",), "", "s"),  # in token 0
        ("aaab", ("aab",), "a", "aab"),
    ],
)
def test_a_stop_string_ends_the_text(
    text: TextModel, said: str, stop: tuple[str, ...], before: str, met: str, include: bool
) -> None:
    answer = an_answer(text, stop=stop, include_stop_str_in_output=include)
    deltas = say(answer, letters(text, said))
    assert joined(deltas) == before + (met if include else "")
    assert end(deltas) == ("stop", met)
    assert answer.finished
    assert len(deltas) == len(before) + len(met)  # nothing for the tokens that came later


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_what_might_have_been_a_stop_string_comes_out_at_the_end(text: TextModel, reason: str) -> None:
    ids = [*letters(text, "ab")] + ([EOS] if reason == "stop" else [])
    deltas = say(an_answer(text, stop=("bc",)), ids, reason)
    assert joined(deltas) == "ab"
    assert end(deltas) == (reason, None)


def test_a_stop_string_in_the_last_token_counts_more_than_the_length(text: TextModel) -> None:
    deltas = say(an_answer(text, stop=("b",)), letters(text, "ab"), "length")
    assert joined(deltas) == "a"
    assert end(deltas) == ("stop", "b")


@pytest.mark.parametrize(
    ("include", "skip_special", "shown"),
    [(False, True, ""), (False, False, ""), (True, True, ""), (True, False, "<|im_end|>")],
)
def test_the_end_token_is_hidden(text: TextModel, include: bool, skip_special: bool, shown: str) -> None:
    answer = an_answer(text, include_stop_str_in_output=include, skip_special_tokens=skip_special)
    deltas = say(answer, [*letters(text, "ab"), EOS], "stop")
    assert joined(deltas) == "ab" + shown
    assert end(deltas) == ("stop", None)
    assert deltas[-1].tokens[0].token_id == EOS


@pytest.mark.parametrize(("include", "shown"), [(False, "a"), (True, "ab")])
def test_a_stop_token_is_named_and_its_text_hidden(text: TextModel, include: bool, shown: str) -> None:
    ids = letters(text, "ab")
    deltas = say(an_answer(text, include_stop_str_in_output=include), ids, "stop", stop_token_id=ids[-1])
    assert joined(deltas) == shown
    assert end(deltas) == ("stop", ids[-1])


def test_a_stop_token_with_the_id_0_is_named(text: TextModel) -> None:
    assert end(say(an_answer(text), [0], "stop", stop_token_id=0)) == ("stop", 0)


def test_an_ignored_end_token_is_a_token_like_others(text: TextModel) -> None:
    deltas = say(an_answer(text), [*letters(text, "a"), EOS, *letters(text, "b")])
    assert joined(deltas) == "ab"
    assert end(deltas) == (None, None)


def test_the_same_token_again_is_ignored(text: TextModel) -> None:
    answer = an_answer(text)
    ids = letters(text, "ab")
    say(answer, ids)
    assert [answer.accept(a_token(0, index, ids[index])) for index in (0, 1, 0)] == [None, None, None]
    assert answer.output_ids == ids
    assert joined(say(answer, letters(text, "c"))) == "c"


@pytest.mark.parametrize(("index", "problem"), [(0, "twice"), (1, "twice"), (3, "due"), (2**32 - 1, "due")])
def test_another_token_or_a_gap_is_an_error(text: TextModel, index: int, problem: str) -> None:
    answer = an_answer(text)
    say(answer, letters(text, "ab"))
    with pytest.raises(TokenMismatch, match=f"token {index} .*{problem}"):
        answer.accept(a_token(0, index, 99))
    assert answer.output_ids == letters(text, "ab")


def test_tokens_after_the_end_are_ignored_but_not_another_token_for_a_known_one(text: TextModel) -> None:
    answer = an_answer(text, stop=("b",))
    say(answer, letters(text, "ab"))
    assert answer.accept(a_token(0, 2, 99)) is None
    assert answer.accept(a_token(0, 7, 99)) is None
    assert answer.output_ids == letters(text, "ab")
    with pytest.raises(TokenMismatch):
        answer.accept(a_token(0, 1, 99))


def test_an_unknown_finish_reason_is_an_error(text: TextModel) -> None:
    with pytest.raises(KVRelayError, match="finish reason"):
        say(an_answer(text), [5], "tired")


@settings(deadline=None, max_examples=60)
@given(
    said=st.text("ab\N{EURO SIGN}", max_size=12),
    stop=st.lists(st.text("ab\N{EURO SIGN}", min_size=1, max_size=3), max_size=3).map(tuple),
    include=st.booleans(),
)
def test_text_and_end_equal_a_search_in_the_whole_text(
    text: TextModel, said: str, stop: tuple[str, ...], include: bool
) -> None:
    """The stop string that is complete first, of those the one that starts first."""
    ids = [*letters(text, said), EOS]
    deltas = say(an_answer(text, stop=stop, include_stop_str_in_output=include), ids, "stop")
    found = [(at + len(one), at, one) for one in stop for at in range(len(said)) if said.startswith(one, at)]
    if found:
        last, start, met = min(found)
        assert joined(deltas) == said[: last if include else start]
        assert end(deltas) == ("stop", met)
    else:
        assert joined(deltas) == said
        assert end(deltas) == ("stop", None)


@pytest.mark.parametrize(
    ("stop", "min_tokens", "said"),
    [
        (".", 0, "ab"),
        (".", 2, "ab"),
        (".", 3, "ab.cd"),
        (".", 5, "ab.cd"),
        ("b.", 2, "a"),  # begins within the first tokens, and ends after them
        ("b.", 3, "ab.cd.e"),
        ("ab.c", 3, ""),
        (".cd.", 5, "ab"),
    ],
)
def test_a_stop_string_counts_if_it_ends_after_the_first_min_tokens(
    text: TextModel, stop: str, min_tokens: int, said: str
) -> None:
    params = SamplingParams(max_tokens=7, min_tokens=min_tokens)
    answer = Answer(0, GenerationRequest("request", (1,), params, stop=(stop,)), text)
    deltas = say(answer, letters(text, "ab.cd.e"), "length")
    assert joined(deltas) == said
    assert end(deltas) == (("stop", stop) if len(said) < 7 else ("length", None))
