"""Added tokens as transformers finds them: tokenizer.json's, changed and joined by those of tokenizer_config.json.

The rest of tokenizer_config.json (add_bos_token, add_prefix_space, legacy, ...) says how to make a tokenizer.json, and
means nothing beside one.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from common.model.source import token_text

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def named_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Text by role, such as bos_token."""
    texts = {name: token_text(tokenizer_config.get(name)) for name in NAMED_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def with_added_tokens(tokenizer_data: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer.json's content with the tokens that only tokenizer_config.json has, and with its flags."""
    added = {token["content"]: token for token in tokenizer_data["added_tokens"]}
    listed = sorted((tokenizer_config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    for _, token in listed:
        entry = _entry(token)
        if (known := added.get(entry["content"])) is not None:
            entry["id"] = known["id"]
        added[entry["content"]] = entry
    for token in _special(tokenizer_config):
        if token_text(token) not in added:
            entry = _entry(token, special=True)
            added[entry["content"]] = entry
    return {**tokenizer_data, "added_tokens": list(added.values())}


def _special(tokenizer_config: Mapping[str, Any]) -> Iterator[Any]:
    """Those with a role, and further ones, which are a list or named, too."""
    more: list[Any] = [tokenizer_config.get(name) for name in NAMED_TOKENS]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        found = tokenizer_config.get(name) or []
        more += found.values() if isinstance(found, dict) else found
    yield from (token for token in more if token_text(token) is not None)


def _entry(token: Any, *, special: bool = False) -> dict[str, Any]:
    """As tokenizer.json has it; the tokenizer gives what it doesn't know the next free id."""
    told = token if isinstance(token, dict) else {}
    flags = {flag: bool(told.get(flag, False)) for flag in _FLAGS}
    flags["special"] |= special
    flags["normalized"] = bool(told.get("normalized", not flags["special"]))
    return {"id": 0, "content": token_text(token), **flags}
