"""Methods of texts whose own cost can be the product of two lengths, at a cost that is their sum.

Python searches forward in linear time, but backward letter by letter at each place; and it strips by looking through
all letters that are to go, for each letter of the text.
"""

from collections.abc import Callable
from typing import Any

from common.text.template.budget import TooMuchWork

SHORT = 8  # characters that are sought backward as they are
MAX_STRIPPED = 64  # different letters that may be stripped


def _rfind(text: str, sought: str, start: int | None = None, stop: int | None = None) -> int:
    first, last, _ = slice(start, stop).indices(len(text))
    at = text[first:last][::-1].find(sought[::-1])
    return last - at - len(sought) if at >= 0 else -1


def _rindex(text: str, sought: str, start: int | None = None, stop: int | None = None) -> int:
    at = _rfind(text, sought, start, stop)
    if at < 0:
        raise ValueError("substring not found")
    return at


def _rpartition(text: str, sought: str) -> tuple[str, str, str]:
    at = _rfind(text, sought)
    return (text[:at], sought, text[at + len(sought) :]) if at >= 0 else ("", "", text)


def _rsplit(text: str, sep: str, maxsplit: int = -1) -> list[str]:
    return [part[::-1] for part in text[::-1].split(sep[::-1], maxsplit)][::-1]


BACKWARD: dict[str, Callable[..., Any]] = {
    "rfind": _rfind,
    "rindex": _rindex,
    "rpartition": _rpartition,
    "rsplit": _rsplit,
}


def linear(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same method of a text, or one that gives the same in linear time. Raises TooMuchWork where there is none."""
    name, text = method.__name__, method.__self__  # type: ignore[attr-defined]

    def with_strip(letters: Any = None) -> Any:
        if isinstance(letters, str) and len(letters) > MAX_STRIPPED:
            letters = "".join(set(letters))
            if len(letters) > MAX_STRIPPED:
                raise TooMuchWork(f"it strips more than {MAX_STRIPPED} different letters")
        return method(letters)

    def backward(*args: Any, **kwargs: Any) -> Any:
        sought = args[0] if args else kwargs.get("sep")
        if not isinstance(sought, str) or len(sought) <= SHORT:
            return method(*args, **kwargs)
        return BACKWARD[name](text, *args, **kwargs)

    if name in ("strip", "lstrip", "rstrip"):
        return with_strip
    return backward if name in BACKWARD else method
