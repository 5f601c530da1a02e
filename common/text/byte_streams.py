"""Steps of a decoder that work on the whole text, as streams: what goes out is never taken back."""

import codecs
import json
from collections.abc import Sequence
from typing import Any, Protocol, cast

from tokenizers import Tokenizer
from tokenizers.decoders import Decoder

Step = dict[str, Any]  # of a decoder, as tokenizer.json has it
EACH_BYTE = "kvrelay.each_byte"


def _mark_each(error: UnicodeError) -> tuple[str, int]:
    """SentencePiece writes one U+FFFD for each broken byte, where UTF-8 decoders write one for those of a character."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\N{REPLACEMENT CHARACTER}" * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _mark_each)


class ByteStream(Protocol):
    """Its state is a value, so that one may ask what would come out."""

    start: Any

    def push(self, state: Any, data: bytes) -> tuple[Any, bytes]:
        """The state after these bytes, and what is certain."""
        ...

    def finish(self, state: Any) -> bytes:
        """The rest."""
        ...


class Stripped:
    """Without some characters at the text's ends; as many at its end are held back until something follows."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content.encode()
        self._stop = stop
        self.start = (start, b"")

    def push(self, state: tuple[int, bytes], data: bytes) -> tuple[tuple[int, bytes], bytes]:
        left, held = state
        if not left and not self._stop:
            return state, data
        while left and data.startswith(self._content):
            left, data = left - 1, data[1:]
        if left and data:
            left = 0
        data = held + data
        ending = min(len(data) - len(data.rstrip(self._content)), self._stop)
        return (left, data[len(data) - ending :]), data[: len(data) - ending]

    def finish(self, state: tuple[int, bytes]) -> bytes:
        return b""


class Replaced:
    """With another text for each place where the pattern stands; what may begin one is held back."""

    start = b""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern.encode()
        self._content = content.encode()

    def push(self, state: bytes, data: bytes) -> tuple[bytes, bytes]:
        *before, last = (state + data).split(self._pattern)
        most = min(len(last), len(self._pattern) - 1)
        held = next((size for size in range(most, 0, -1) if self._pattern.startswith(last[len(last) - size :])), 0)
        return last[len(last) - held :], self._content.join((*before, last[: len(last) - held]))

    def finish(self, state: bytes) -> bytes:
        return state


class AtTheEnd:
    """Any other step: what it makes of a text is only certain when all of it is there."""

    start = b""

    def __init__(self, decoder: Decoder, errors: str) -> None:
        self._decoder = decoder
        self._errors = errors

    def push(self, state: bytes, data: bytes) -> tuple[bytes, bytes]:
        return state + data, b""

    def finish(self, state: bytes) -> bytes:
        return str(self._decoder.decode([state.decode("utf-8", self._errors)])).encode()


def stream_of(step: Step, errors: str) -> ByteStream:
    """A step that follows the one that joins all tokens."""
    if step["type"] == "Strip" and step["content"].isascii():
        return Stripped(step["content"], step["start"], step["stop"])
    if step["type"] == "Replace" and step["pattern"].get("String"):
        return Replaced(step["pattern"]["String"], step["content"])
    return AtTheEnd(decoder_of([step]), errors)


def decoder_of(steps: Sequence[Step]) -> Decoder:
    """The library's own, of these steps."""
    data: dict[str, Any] = {
        **dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor")),
        "version": "1.0",
        "added_tokens": [],
        "decoder": {"type": "Sequence", "decoders": list(steps)},
        "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""},
    }
    return cast(Decoder, Tokenizer.from_str(json.dumps(data)).decoder)
