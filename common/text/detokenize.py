"""Text as it is generated: token ids become text, which goes out as soon as its characters are complete."""

from codecs import utf_8_decode
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from common.text.token_pieces import Pieces

State = tuple[int | None, bytes, tuple[Any, ...]]  # the token before, the gap after it, the streams' states


class Reading(NamedTuple):
    """What one token adds to a text: the characters that it completes, and its bytes."""

    text: str
    data: bytes


class Detokenizer:
    """Decodes one text token by token. All pieces joined are what the tokenizer decodes all ids to.

    Only an incomplete character is held back, and what the tokenizer's decoder may still change. The library gives up
    on a whole run of raw-byte tokens if one of them is broken; here, as in SentencePiece itself, the characters around
    that byte stay: those before it are out.
    """

    def __init__(self, pieces: Pieces, hidden: Collection[int] = frozenset(), before: Sequence[int] = ()) -> None:
        """hidden: tokens that add nothing. before: the text that this one goes on from, or the end of it."""
        self._pieces = pieces
        self._hidden = hidden
        self._state: State = (None, b"", tuple(stream.start for stream in pieces.streams))
        self._held = b""  # of a character
        self.push(before)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        data, state = [self._held], self._state
        for token_id in token_ids:
            state, more = self._step(state, token_id)
            data.append(more)
        self._state = state
        text, self._held = self._text(b"".join(data))
        return text

    def finish(self) -> str:
        """What was held back for more to come."""
        return self.rest().text

    def rest(self) -> Reading:
        """The same with its bytes, but for those that `read` has told."""
        data = b""
        for stream, state in zip(self._pieces.streams, self._state[2], strict=True):
            state, certain = stream.push(state, data)
            data = certain + stream.finish(state)
        return Reading(utf_8_decode(self._held + data, self._pieces.errors, True)[0], data)

    def read(self, token_id: int) -> Reading:
        """What this token would add."""
        _, data = self._step(self._state, token_id)
        return Reading(self._text(self._held + data)[0], data)

    def _step(self, state: State, token_id: int) -> tuple[State, bytes]:
        piece = None if token_id in self._hidden else self._pieces.get(token_id)
        if piece is None:
            return state, b""
        previous, gap, streams = state
        if previous is None:
            data = piece.first
        elif previous == token_id and self._pieces.merges:
            return state, b""
        else:
            data = gap + piece.inside if gap else piece.inside
        if streams:
            states = []
            for stream, before in zip(self._pieces.streams, streams, strict=True):
                after, data = stream.push(before, data)
                states.append(after)
            streams = tuple(states)
        return (token_id, piece.gap, streams), data

    def _text(self, data: bytes) -> tuple[str, bytes]:
        """Complete characters, and the rest."""
        text, used = utf_8_decode(data, self._pieces.errors, False)
        return text, data[used:]
