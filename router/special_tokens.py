"""Special tokens count where the chat template writes them; inside a message the same strings are ordinary text.

Before rendering, a mark (one private-use character that no message has) is put inside every special-token string
of a message, and inside every piece of one at a message's ends, which could become one across a border. In the
rendered text, what still reads as a special token is therefore the template's own. It gets a private name, known
only to a twin of the tokenizer; the marks go; and the twin encodes the whole text at once, so that ordinary text
is cut just as the tokenizer itself would cut it.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from common.errors import InvalidRequest

PRIVATE_USE = range(0x10FFFD, 0xF0000, -1)  # planes 16 and 15: no script, no whitespace, in no vocabulary
STRUCTURE = ("role", "type")  # checked words that templates compare with; never marked


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: item if key in STRUCTURE else _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    return value


def _any_of(strings: Sequence[str]) -> str:
    """A pattern that matches the longest of them first."""
    return "|".join(re.escape(text) for text in sorted(strings, key=len, reverse=True)) or r"(?!)"


class SpecialTokenGuard:
    """Marks messages and encodes what was rendered from them."""

    def __init__(self, tokenizer_data: Mapping[str, Any]) -> None:
        """tokenizer_data: the content of tokenizer.json."""
        added = [token["content"] for token in tokenizer_data["added_tokens"]]
        special = [token["content"] for token in tokenizer_data["added_tokens"] if token["special"]]
        nonce = secrets.token_hex(8)  # nobody outside can write a private name
        self._private = {text: f"\U000f0000{nonce}{number:05d}\U000f0001" for number, text in enumerate(special)}
        self._twin = Tokenizer.from_str(json.dumps(_renamed(tokenizer_data, self._private)))
        self._twin.no_truncation()
        self._twin.no_padding()
        self._added = re.compile(_any_of(added))
        self._start = re.compile(f"(?={_any_of(special)})")  # of zero width, so that overlapping ones are found too
        self._special = special
        self._longest = max(map(len, special), default=0)
        self._heads = {text[:end] for text in special for end in range(1, len(text))}
        self._tails = {text[start:] for text in special for start in range(1, len(text))}

    def mark(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """Copies of the messages with marks inside, and the mark."""
        used = set().union(*_strings(list(messages)))
        mark = next((chr(code) for code in PRIVATE_USE if chr(code) not in used), None)
        if mark is None:
            raise InvalidRequest("messages use every private-use character of Unicode", field="messages")
        return [_map_strings(message, lambda text: self._marked(text, mark)) for message in messages], mark

    def encode(self, rendered: str, mark: str) -> list[int]:
        """Token ids of a text that was rendered from marked messages."""
        named = self._added.sub(lambda match: self._private.get(match[0], match[0]), rendered)
        encoding = self._twin.encode_batch_fast([named.replace(mark, "")], add_special_tokens=False)[0]
        return encoding.ids

    def _marked(self, text: str, mark: str) -> str:
        places = sorted(self._places(text))
        pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
        return mark.join(pieces)

    def _places(self, text: str) -> set[int]:
        """Where marks go. Templates may strip messages, so a message's ends are also those without whitespace."""
        places = {match.start() + 1 for match in self._start.finditer(text)}
        first, last = len(text) - len(text.lstrip()), len(text.rstrip())
        for end in (last, len(text)):
            places |= {at + 1 for at in range(max(0, end - self._longest), end) if text[at:end] in self._heads}
        for start in (0, first):
            if any(text[start : start + length] in self._tails for length in range(1, self._longest)):
                places.add(start)
        if 0 < last - first < self._longest and any(text[first:last] in special[1:] for special in self._special):
            places.add(first)
        return places


def _renamed(tokenizer_data: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The tokenizer with other names for some tokens and no way to make those from ordinary text; ids stay."""
    model = dict(tokenizer_data["model"])
    if isinstance(model["vocab"], list):  # Unigram: [token, score]
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(text, text): token_id for text, token_id in model["vocab"].items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = ((merge, merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model["merges"])
        model["merges"] = [merge for merge, (a, b) in pairs if names.keys().isdisjoint((a, b, a + b))]
    added = [
        {**token, "content": names.get(token["content"], token["content"])} for token in tokenizer_data["added_tokens"]
    ]
    return {**tokenizer_data, "model": model, "added_tokens": added}
