"""Text as it is generated: token ids become text, stop strings end it."""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Decodes one answer piece by piece; all pieces joined are the decoding of all ids at once."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete; never a part of a character."""
        ...

    def finish(self) -> str:
        """What was held back for more bytes to come."""
        ...


class ByteLevelDetokenizer:
    """For byte-level BPE: a token is some bytes, and the answer is their UTF-8."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._token_bytes, token_ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For any other tokenizer: decodes a window, which starts before what is new so that its spaces come out right."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        is_visible: Callable[[int], bool],
        is_byte: Callable[[int], bool],
    ) -> None:
        """is_byte: tokens of raw bytes; what a run of them means is only certain once it has ended."""
        self._decode = decode
        self._is_visible = is_visible
        self._is_byte = is_byte
        self._window: list[int] = []
        self._done = 0  # ids of the window whose text is out

    def push(self, token_ids: Sequence[int]) -> str:
        self._window.extend(filter(self._is_visible, token_ids))
        if not self._window or self._is_byte(self._window[-1]):
            return ""
        text = self._new_text()
        if not text:
            return ""
        del self._window[: self._done]
        self._done = len(self._window)
        return text

    def finish(self) -> str:
        text = self._new_text()
        self._done = len(self._window)
        return text

    def _new_text(self) -> str:
        return self._decode(self._window)[len(self._decode(self._window[: self._done])) :]


class StopChecker:
    """Ends a text at the stop string that is complete first, wherever the pieces were cut."""

    def __init__(self, stop: tuple[str, ...], include: bool) -> None:
        """include: the text ends after the stop string, not before it."""
        self._stop = stop
        self._include = include
        self._held = ""  # may be the beginning of a stop string
        self._stopped: str | None = None

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """What can go out, and the stop string that was met, if one was. armed: one that ends in this text counts."""
        if self._stopped is not None or not self._stop:
            return ("", self._stopped) if self._stopped is not None else (text, None)
        known = len(self._held)
        text = self._held + text
        starts = ((text.find(stop, max(0, known + 1 - len(stop))), stop) for stop in self._stop)
        found = [(at + len(stop), at, stop) for at, stop in starts if at >= 0]
        if found and armed:
            end, start, self._stopped = min(found)
            self._held = ""
            return text[: end if self._include else start], self._stopped
        held = max((self._overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def finish(self) -> str:
        """What was held back, when nothing comes after it."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of the text that begins the stop string."""
        longest = min(len(text), len(stop) - 1)
        return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
