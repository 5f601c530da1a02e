"""Special tokens count where the chat template writes them; inside a message the same strings are ordinary text.

Before rendering, in every special-token string of a message one character gives way to a stand-in (a private-use
character that no message has), and so in every piece of one at a message's ends, which could become one across a
border. In the rendered text, what still reads as a special token is therefore the template's own. It gets a private
name, known only to a twin of the tokenizer; the characters come back; and the twin encodes the whole text at once, so
that ordinary text is cut just as the tokenizer itself would cut it. A message keeps its length: templates may cut it.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from common.errors import InvalidRequest

PRIVATE_USE = range(0x10FFFD, 0xF0000, -1)  # planes 16 and 15: no script, no whitespace, in no vocabulary
ESCAPED = re.compile(r"\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}")  # how JSON writes those in ASCII
CHUNK = 2**15  # characters that are looked through before others may run
ROLE = "role"  # a checked word that templates compare with; never changed
NAMES = frozenset(("id", "type", "function", "name", "arguments"))  # of fields inside a message's fields


def strings(value: Any) -> Iterator[str]:
    """All texts in a value of JSON, names too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key if key in NAMES else change(key): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    return value


def _any_of(strings: Sequence[str]) -> str:
    """A pattern that matches the longest of them first. It branches by letters: models have thousands of tokens."""
    tree: dict[str, Any] = {}
    for text in filter(None, strings):
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}  # one ends here
    return _branches(tree) or r"(?!)"


def _branches(node: Mapping[str, Any]) -> str:
    branches = [re.escape(char) + _branches(child) for char, child in node.items() if char]
    if not branches:
        return ""
    if "" in node:
        return f"(?:{'|'.join(branches)})?"
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _matches(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[re.Match[str]]:
    """As finditer, for a pattern that looks no further than a match is long."""
    at = 0
    while at < len(text):
        end = at + CHUNK
        match = pattern.search(text, at, end + longest)
        if match is None or match.start() >= end:
            at = end
        else:
            yield match
            at = match.end()


def _replaced(pattern: re.Pattern[str], text: str, longest: int, write: Callable[[str], str]) -> str:
    pieces, at = [], 0
    for match in _matches(pattern, text, longest):
        pieces += [text[at : match.start()], write(match[0])]
        at = match.end()
    return "".join((*pieces, text[at:])) if pieces else text


def _chunks(text: str) -> Iterator[str]:
    return (text[at : at + CHUNK] for at in range(0, len(text), CHUNK))


@dataclass(frozen=True, slots=True)
class StandIns:
    """The characters that stand for others in one request's messages."""

    of: Mapping[str, str]  # by the character that gives way

    def restore(self, text: str) -> str:
        """A rendered text with the messages' own characters."""
        own = {stand_in: char for char, stand_in in self.of.items()}
        found = {ord(stand_in): char for stand_in, char in own.items() if stand_in in text}
        if found:
            text = "".join(chunk.translate(found) for chunk in _chunks(text))
        if "\\ud" in text:  # a template may write JSON in ASCII
            for stand_in, char in own.items():
                text = text.replace(json.dumps(stand_in)[1:-1], json.dumps(char)[1:-1])
        return text


class SpecialTokenGuard:
    """Protects messages and encodes what was rendered from them."""

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
        self._special = re.compile(_any_of(special))
        self._chars = sorted(set().union(*special))
        self._longest = max(map(len, special), default=0)
        self._longest_added = max(map(len, added), default=0)
        self._heads = {text[:end] for text in special for end in range(1, len(text))}
        self._tails = {text[start:] for text in special for start in range(1, len(text))}
        self._middles = {text[:end] for text in self._tails for end in range(1, len(text))}

    def protect(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], StandIns]:
        """Copies of the messages with stand-ins."""
        used: set[str] = set()
        for text in strings(list(messages)):
            if not text.isascii():
                for chunk in _chunks(text):
                    used.update(chunk)
            if "\\ud" in text:
                used.update(*(json.loads(f'["{pair[0]}"]') for pair in ESCAPED.finditer(text)))
        unused = (chr(code) for code in PRIVATE_USE if chr(code) not in used)
        of = dict(zip(self._chars, unused, strict=False))
        if len(of) < len(self._chars):
            raise InvalidRequest("messages use every private-use character of Unicode", field="messages")
        return [self._protected_message(message, of) for message in messages], StandIns(of)

    def encode(self, rendered: str, stand_ins: StandIns) -> list[int]:
        """Token ids of a text that was rendered from protected messages."""
        named = _replaced(self._added, rendered, self._longest_added, lambda token: self._private.get(token, token))
        return self._twin.encode_batch_fast([stand_ins.restore(named)], add_special_tokens=False)[0].ids

    def _protected_message(self, message: Mapping[str, Any], of: Mapping[str, str]) -> dict[str, Any]:
        """The names of its fields are ours, those inside of tool calls' arguments a client's."""

        def change(text: str) -> str:
            return self._protected(text, of)

        return {key: value if key == ROLE else _mapped(value, change) for key, value in message.items()}

    def _protected(self, text: str, of: Mapping[str, str]) -> str:
        while any(_matches(self._special, text, self._longest)):  # again, since tokens may overlap
            text = _replaced(self._special, text, self._longest, lambda token: _broken(token, of))
        while (piece := self._piece_at_an_end(text)) is not None:
            start, end = piece
            text = text[:start] + _broken(text[start:end], of) + text[end:]
        return text

    def _piece_at_an_end(self, text: str) -> tuple[int, int] | None:
        """Of a special token. Templates may strip messages, so a message's ends are also those without whitespace."""
        first, last = len(text) - len(text.lstrip()), len(text.rstrip())
        for end in {last, len(text)}:
            for start in range(max(0, end - self._longest), end):
                if text[start:end] in self._heads:
                    return start, end
        for start in {0, first}:
            for end in range(start + 1, min(start + self._longest, len(text) + 1)):
                if text[start:end] in self._tails:
                    return start, end
        whole = text[first:last]
        return (first, last) if whole in self._middles else None


def _broken(text: str, of: Mapping[str, str]) -> str:
    at = _weak_place(text)
    return text[:at] + of[text[at]] + text[at + 1 :]


@lru_cache(maxsize=4096)
def _weak_place(text: str) -> int:
    """Where a special token, or a piece of one, is changed: at what templates hardly strip or change."""
    return min(range(len(text)), key=lambda at: (text[at].isalnum(), text[at].isspace(), at in (0, len(text) - 1), at))


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
