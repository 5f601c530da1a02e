"""What each token adds to a text: a tokenizer's decoder, taken apart so that text can grow token by token.

A decoder is a sequence of steps. Up to the one that joins the tokens (Fuse, ByteLevel, or the end) each token is
decoded alone, but for its being the first, the last, or the same again: the library itself does that, once a token.
What follows works on the whole text and is done here, as a stream of bytes.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tokenizers import Tokenizer

from common.text.byte_streams import EACH_BYTE, ByteStream, Step, decoder_of, stream_of

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
ANCHOR = "\ue000"  # a private-use character: a token that no decoder changes, to put others beside


class Piece(NamedTuple):
    """A token's bytes at the beginning of a text and after others, and what comes between it and the next."""

    first: bytes
    inside: bytes
    gap: bytes = b""


class Pieces(Protocol):
    """Of one tokenizer."""

    errors: str  # codecs' name for how broken UTF-8 is written
    merges: bool  # a token that comes again at once adds nothing

    @property
    def streams(self) -> Sequence[ByteStream]:
        """What the bytes of all pieces pass through."""
        ...

    def get(self, token_id: int) -> Piece | None:
        """None: the tokenizer doesn't have it."""
        ...


class TokenPieces:
    """Pieces as tokenizer.json describes them; may be asked from any thread."""

    def __init__(self, tokenizer: Tokenizer, decoder: Step | None) -> None:
        """decoder: what tokenizer.json has under this name."""
        steps = _flat(decoder)
        joint = next((at for at, step in enumerate(steps) if step["type"] in ("Fuse", "ByteLevel")), len(steps))
        kinds = [step["type"] for step in steps[: joint + 1]]
        alone = [step for step in steps[:joint] if step["type"] != "ByteFallback"]
        self._tokenizer = tokenizer
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._alone = decoder_of(alone) if alone else None
        self._no_decoder = decoder is None  # the library then puts a space between tokens
        self._known: dict[int, Piece | None] = {}  # as they come up; no more than the vocabulary
        self.merges = "CTC" in kinds
        self.errors = EACH_BYTE if self._byte_fallback else "replace"
        self.streams = tuple(stream_of(step, self.errors) for step in steps[joint + 1 :] if step["type"] != "Fuse")

    def get(self, token_id: int) -> Piece | None:
        """None: the tokenizer doesn't have it."""
        if token_id not in self._known:
            token = self._tokenizer.id_to_token(token_id)
            if token is None:
                return None
            self._known[token_id] = self._piece(token)
        return self._known[token_id]

    def _piece(self, token: str) -> Piece:
        byte = BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        if byte is not None:
            raw = bytes.fromhex(byte[1])
            return Piece(raw, raw)
        encode = _letters_bytes if self._byte_level else str.encode
        return Piece(*map(encode, self._forms(token)))

    def _forms(self, token: str) -> tuple[str, str, str]:
        if self._alone is None:
            return token, token, " " if self._no_decoder else ""
        decode, other = self._alone.decode, ANCHOR * 2  # another, since some decoders merge equal tokens
        before, end = len(decode([ANCHOR])), len(decode([ANCHOR, other])) - len(decode([ANCHOR]))
        inside = decode([ANCHOR, token])[before:]
        followed = decode([ANCHOR, token, other])
        return decode([token]), inside, followed[before + len(inside) : len(followed) - end]


def _flat(decoder: Step | None) -> list[Step]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flat(inner)]
    return [decoder]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 stands for itself, the other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + number): byte for number, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


def _letters_bytes(token: str) -> bytes:
    """Of a byte-level token; one with other letters (an added token) stands for itself."""
    try:
        return bytes(BYTE_OF[letter] for letter in token)
    except KeyError:
        return token.encode()
