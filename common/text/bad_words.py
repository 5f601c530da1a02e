"""Bad words as token sequences, the way vLLM reads them."""

from collections.abc import Sequence

from common.errors import InvalidRequest
from common.text.text_model import TextModel


def bad_word_tokens(words: Sequence[str], text: TextModel) -> tuple[tuple[int, ...], ...]:
    """For each word its tokens, and those behind a space where that makes as many, beginning with another.

    So a word is met at a text's start and in its middle; in other letter cases it is another word.
    """
    found: list[tuple[int, ...]] = []
    for number, word in enumerate(words):
        bare = word.lstrip()
        alone, spaced = (tuple(text.encode(form, add_special_tokens=False)) for form in (bare, " " + bare))
        if not bare or not alone:
            raise InvalidRequest(f"bad_words[{number}] has no text", field=f"bad_words[{number}]")
        found.append(alone)
        if spaced[0] != alone[0] and len(spaced) == len(alone):
            found.append(spaced)
    return tuple(found)
