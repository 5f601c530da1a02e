"""Proves that an answer's deltas, joined, are its whole text up to its stop string, for any tokens of any tokenizer."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.sampling import SamplingParams
from common.text.text_model import TextModel
from router.pipeline.answer import Answer
from router.pipeline.generation import Delta, GenerationRequest
from tests.support.fake_turns import a_token
from tests.support.tiny_text import model_directory
from tests.support.tokenizer_kinds import DECODERS, KINDS, REPLACEMENT, decoded, with_pieces, with_special


def with_letters(kind: Callable[[], Tokenizer]) -> Callable[[], Tokenizer]:
    """With added tokens that are no bytes, some of them beside the vocabulary."""
    return lambda: with_pieces(kind(), "\N{GRINNING FACE}", "<think>", REPLACEMENT, "東京", " ", "\u2581")


NO_TOKEN = 10**6  # a prompt without text

ALL = {name: with_letters(kind) for name, kind in DECODERS.items() if "wordpiece" not in name} | {
    name: kind for name, kind in DECODERS.items() if "wordpiece" in name
}


@pytest.fixture(scope="module", params=ALL)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TextModel, Tokenizer]:
    """A model's text side, and its tokenizer as the independent reference."""
    tokenizer = with_special(with_special(ALL[request.param](), "<s>"), "<|im_end|>")
    directory = model_directory(tmp_path_factory.mktemp("model"), tokenizer=tokenizer)
    return TextModel.load(directory), Tokenizer.from_file(str(directory / "tokenizer.json"))


def say(text: TextModel, ids: list[int], reason: str, min_tokens: int = 0, **request: object) -> list[Delta]:
    """The deltas of these tokens, one by one."""
    params = SamplingParams(max_tokens=1000, min_tokens=min_tokens)
    answer = Answer(0, GenerationRequest("request", (NO_TOKEN,), params, **request), text)
    deltas = []
    for index, token_id in enumerate(ids):
        delta = answer.accept(a_token(0, index, token_id, reason if index == len(ids) - 1 else ""))
        if delta is not None:
            deltas.append(delta)
    return deltas


def cut_at_stop(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Letter by letter: the stop string that is complete first, of those the longest."""
    for end in range(len(text) + 1):
        met = max((stop for stop in stops if text[:end].endswith(stop)), key=len, default=None)
        if met is not None:
            return text[: end if include else end - len(met)], met
    return text, None


@settings(max_examples=40, deadline=None)
@given(data=st.data(), skip=st.booleans(), include=st.booleans())
def test_joined_deltas_are_the_whole_text(
    case: tuple[TextModel, Tokenizer], data: st.DataObject, skip: bool, include: bool
) -> None:
    text, tokenizer = case
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), min_size=1, max_size=24))
    whole = decoded(tokenizer, ids, skip)
    places = st.integers(0, max(0, len(whole) - 1))
    stops = data.draw(
        st.lists(st.builds(lambda at, size: whole[at : at + size], places, st.integers(1, 4)), max_size=3)
    )
    stops = tuple(stop for stop in stops if stop)
    deltas = say(text, ids, "length", stop=stops, include_stop_str_in_output=include, skip_special_tokens=skip)
    wanted, met = cut_at_stop(whole, stops, include)
    assert "".join(delta.text for delta in deltas) == wanted
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (("stop", met) if met else ("length", None))
    assert [token.token_id for delta in deltas for token in delta.tokens] == ids[: len(deltas)]


@settings(max_examples=30, deadline=None)
@given(written=st.text("aé東\N{GRINNING FACE}\N{WOMAN}\N{ZERO WIDTH JOINER} \n", min_size=1, max_size=12))
def test_no_delta_ends_inside_a_character(case: tuple[TextModel, Tokenizer], written: str) -> None:
    """Each delta is whole characters of what was written, in order."""
    text, tokenizer = case
    ids = tokenizer.encode(written, add_special_tokens=False).ids
    whole = decoded(tokenizer, ids, skip_special_tokens=False)
    deltas = say(text, ids, "length", skip_special_tokens=False)
    assert "".join(delta.text for delta in deltas) == whole
    if REPLACEMENT not in whole:
        assert all(REPLACEMENT not in delta.text for delta in deltas)


@settings(max_examples=40, deadline=None)
@given(
    written=st.text("ab\N{GRINNING FACE}", min_size=1, max_size=14),
    stops=st.lists(st.text("ab\N{GRINNING FACE}", min_size=1, max_size=4), max_size=3).map(tuple),
    min_tokens=st.integers(0, 10),
    include=st.booleans(),
)
def test_stop_strings_count_from_the_token_after_min_tokens(
    case: tuple[TextModel, Tokenizer], written: str, stops: tuple[str, ...], min_tokens: int, include: bool
) -> None:
    """One that ends in the text of the first min_tokens tokens is none; one that only begins there is."""
    text, tokenizer = case
    ids = tokenizer.encode(written, add_special_tokens=False).ids
    if not ids:
        return
    free = say(text, ids, "length", skip_special_tokens=False)
    whole, before = ("".join(delta.text for delta in part) for part in (free, free[:min_tokens]))
    places = [(whole.find(stop, max(0, len(before) + 1 - len(stop))), stop) for stop in stops]
    end, start, met = min(
        ((at + len(stop), at, stop) for at, stop in places if at >= 0), default=(len(whole), len(whole), None)
    )
    wanted = whole[: end if include else start]
    deltas = say(
        text, ids, "length", min_tokens, stop=stops, include_stop_str_in_output=include, skip_special_tokens=False
    )
    assert "".join(delta.text for delta in deltas) == wanted
    assert deltas[-1].stop_reason == met


@pytest.mark.parametrize("kind", ["sentencepiece", "gemma_like", "unigram", "byte_level"])
def test_a_run_of_replacement_characters_is_text_like_any_other(tmp_path: Path, kind: str) -> None:
    """They come one by one: nothing waits for the end of the run, or is decoded again with each of them."""
    text = TextModel.load(model_directory(tmp_path, tokenizer=with_pieces(KINDS[kind](), REPLACEMENT)))
    (token_id,) = text.encode(REPLACEMENT)[-1:]
    assert [delta.text.strip() for delta in say(text, [token_id] * 100, "length")] == [REPLACEMENT] * 100


def test_text_comes_as_soon_as_it_is_certain(case: tuple[TextModel, Tokenizer]) -> None:
    """A tokenizer of whole words holds nothing back."""
    text, tokenizer = case
    ids = tokenizer.encode("the relay the relay", add_special_tokens=False).ids
    deltas = say(text, ids, "length")
    assert sum(bool(delta.text) for delta in deltas) >= len(ids) - 1
