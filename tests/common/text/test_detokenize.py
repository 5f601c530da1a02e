"""However ids are cut, the pieces of a text joined are what its tokenizer decodes, and only bytes are held back."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.text.byte_streams import Replaced, Stripped
from common.text.text_model import TextModel
from tests.support.tiny_text import model_directory
from tests.support.tokenizer_kinds import DECODERS, REPLACEMENT, decoded, with_special

Case = tuple[TextModel, Tokenizer]
IDS = st.lists(st.integers(0, 620), max_size=14)  # also some that no tokenizer here has


@pytest.fixture(scope="module", params=DECODERS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A model's text side, and its tokenizer."""
    tokenizer = with_special(with_special(DECODERS[request.param](), "<s>"), "<|im_end|>")
    directory = model_directory(tmp_path_factory.mktemp("model"), tokenizer=tokenizer)
    return TextModel.load(directory), Tokenizer.from_file(str(directory / "tokenizer.json"))


@given(prompt=IDS, ids=IDS, sizes=st.lists(st.integers(1, 4)), skip=st.booleans())
@settings(max_examples=50, deadline=None)
def test_an_answer_is_what_its_prompt_and_it_decode_to_less_the_prompt(
    case: Case, prompt: list[int], ids: list[int], sizes: list[int], skip: bool
) -> None:
    text, tokenizer = case
    size = tokenizer.get_vocab_size() + 2
    prompt, ids = [one % size for one in prompt], [one % size for one in ids]
    before = decoded(tokenizer, prompt, skip)
    certain = before.rstrip(REPLACEMENT + "a-")  # a character may be begun, or what one kind here replaces
    whole = decoded(tokenizer, prompt + ids, skip)
    answer = "".join(pieces(text, ids, sizes, skip, prompt))
    assert whole.endswith(answer)
    assert len(certain) <= len(whole) - len(answer) <= len(before)
    if certain == before:
        assert answer == whole[len(before) :]


@given(ids=IDS, skip=st.booleans())
@settings(max_examples=40, deadline=None)
def test_only_an_incomplete_character_is_held_back(case: Case, ids: list[int], skip: bool) -> None:
    text, tokenizer = case
    ids = [one % tokenizer.get_vocab_size() for one in ids]
    stream, out = text.detokenizer(skip), ""
    for place, one in enumerate(ids, 1):
        out += stream.push([one])
        sure = decoded(tokenizer, ids[:place], skip).rstrip(REPLACEMENT)
        assert len(out) >= len(sure.rstrip("a-"))  # which one kind here may replace, together with what follows


@given(ids=IDS, skip=st.booleans())
@settings(max_examples=40, deadline=None)
def test_readings_are_what_is_pushed_and_their_bytes_are_the_text(case: Case, ids: list[int], skip: bool) -> None:
    text, tokenizer = case
    ids = [one % tokenizer.get_vocab_size() for one in ids]
    stream, data = text.detokenizer(skip), b""
    for one in ids:
        reading = stream.read(one)
        assert stream.read(one) == reading
        assert stream.push([one]) == reading.text
        data += reading.data
    whole = decoded(tokenizer, ids, skip)
    if REPLACEMENT not in whole:
        assert (data + stream.rest().data).decode() == whole


@given(text=st.text(max_size=30))
@settings(max_examples=100, deadline=None)
def test_valid_text_never_shows_a_broken_character(byte_level: TextModel, text: str) -> None:
    ids = byte_level.encode(text.replace(REPLACEMENT, ""))
    assert all(REPLACEMENT not in piece for piece in pieces(byte_level, ids, [1] * len(ids), skip=False))


def test_bytes_of_tokens_are_those_of_the_text(byte_level: TextModel) -> None:
    text = "größer 東京 \N{GRINNING FACE}"
    assert b"".join(map(byte_level.token_bytes, byte_level.encode(text))) == text.encode()
    assert byte_level.token_bytes(10**6) == b""


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(model_directory(tmp_path_factory.mktemp("chatml")))


PEOPLE = "\N{WOMAN}\u200d\N{ROCKET}\N{REGIONAL INDICATOR SYMBOL LETTER D}\N{REGIONAL INDICATOR SYMBOL LETTER E}"
TONE = "\N{THUMBS UP SIGN}\N{EMOJI MODIFIER FITZPATRICK TYPE-4}"
AMHARIC = "\u12a0\u121b\u122d\u129b"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "gemma_like", "metaspace_first", "replaced_at_last"])
@pytest.mark.parametrize("written", [PEOPLE, TONE, AMHARIC], ids=["joined emoji", "skin tone", "amharic"])
def test_letters_that_are_spelled_in_bytes_come_one_by_one(tmp_path: Path, kind: str, written: str) -> None:
    text = TextModel.load(model_directory(tmp_path, tokenizer=DECODERS[kind]()))
    ids = text.encode(written, add_special_tokens=False)
    told = [piece for piece in pieces(text, ids, [1] * len(ids), skip=True) if piece.strip()]
    assert told == list(written)


def pieces(text: TextModel, ids: list[int], sizes: list[int], skip: bool, prompt: list[int] | None = None) -> list[str]:
    stream = text.detokenizer(skip, prompt or [])
    result = []
    rest = list(ids)
    for size in [*sizes, len(ids)]:
        result.append(stream.push(rest[:size]))
        rest = rest[size:]
    return [*result, stream.finish()]


@given(texts=st.lists(st.text("ab-", max_size=4)), pattern=st.text("ab-", min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_a_replaced_stream_is_a_replaced_text(texts: list[str], pattern: str) -> None:
    stream, state, out = Replaced(pattern, "東"), b"", b""
    for text in texts:
        state, more = stream.push(state, text.encode())
        out += more
    assert (out + stream.finish(state)).decode() == "".join(texts).replace(pattern, "東")


@given(texts=st.lists(st.text("ab ", max_size=4)), start=st.integers(0, 2), stop=st.integers(0, 2))
@settings(max_examples=150, deadline=None)
def test_a_stripped_stream_is_a_stripped_text(texts: list[str], start: int, stop: int) -> None:
    stream = Stripped(" ", start, stop)
    state, out = stream.start, b""
    for text in texts:
        state, more = stream.push(state, text.encode())
        out += more
    wanted = "".join(texts)
    for _ in range(start):
        wanted = wanted.removeprefix(" ")
    for _ in range(stop):
        wanted = wanted.removesuffix(" ")
    assert (out + stream.finish(state)).decode() == wanted
