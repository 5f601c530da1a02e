"""Pieces of a decoded answer joined are the whole, and stop strings end it wherever it is cut."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.text.detokenize import StopChecker
from common.text.text_model import TextModel
from tests.support.tiny_text import model_directory, sentencepiece_directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(tmp_path_factory.mktemp("chatml"))


@pytest.fixture(scope="module")
def model(directory: Path) -> TextModel:
    return TextModel.load(directory)


@pytest.fixture(scope="module")
def llama_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentencepiece_directory(tmp_path_factory.mktemp("sentencepiece"))


@pytest.fixture(scope="module")
def sentencepiece(llama_directory: Path) -> TextModel:
    return TextModel.load(llama_directory)


@given(ids=st.lists(st.integers(0, 450), max_size=40), sizes=st.lists(st.integers(1, 4)), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_pieces_are_the_whole(directory: Path, model: TextModel, ids: list[int], sizes: list[int], skip: bool) -> None:
    wanted = Tokenizer.from_file(str(directory / "tokenizer.json")).decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(model, ids, sizes, skip)) == wanted


@given(ids=st.lists(st.integers(0, 520), max_size=20), sizes=st.lists(st.integers(1, 4)), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_sentencepiece_directory_pieces_are_the_whole(
    sentencepiece: TextModel, llama_directory: Path, ids: list[int], sizes: list[int], skip: bool
) -> None:
    tokenizer = Tokenizer.from_file(str(llama_directory / "tokenizer.json"))
    assert "".join(pieces(sentencepiece, ids, sizes, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_valid_text_never_shows_a_broken_character(model: TextModel, text: str) -> None:
    ids = model.encode(text.replace("\ufffd", ""))
    assert all("\ufffd" not in piece for piece in pieces(model, ids, [1] * len(ids), skip=False))


def test_bytes_of_tokens_are_those_of_the_text(model: TextModel) -> None:
    text = "größer 東京 \N{GRINNING FACE}"
    assert b"".join(map(model.token_bytes, model.encode(text))) == text.encode()
    assert model.token_bytes(10**6) == b""


def pieces(model: TextModel, ids: list[int], sizes: list[int], skip: bool) -> list[str]:
    decoder = model.detokenizer(skip)
    result = []
    rest = list(ids)
    for size in [*sizes, len(ids)]:
        result.append(decoder.push(rest[:size]))
        rest = rest[size:]
    return [*result, decoder.finish()]


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
