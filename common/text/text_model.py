"""All text of the system: chat templates, tokens to and from text. Both pools speak token ids only."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from common.errors import ContextLengthExceeded, InvalidRequest, ModelError
from common.model.config import GenerationDefaults, ModelConfig, parse_config
from common.model.directory import DirectorySource
from common.model.end_tokens import read_generation
from common.model.source import ModelSource, TemplateFile, token_text
from common.text.detokenize import ByteLevelDetokenizer, Detokenizer, StopChecker, WindowDetokenizer
from common.text.special_tokens import SpecialTokenGuard
from common.text.template.chat_template import ChatTemplate

__all__ = ["Detokenizer", "StopChecker", "TextModel"]

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoding makes of bytes that are no UTF-8
SHRINK = 4  # a normalizer may make a text this many times shorter


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 stands for itself, the other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + number): byte for number, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


class TextModel:
    """A model's tokenizer, chat template and generation defaults."""

    def __init__(
        self,
        config: ModelConfig,
        generation: GenerationDefaults,
        tokenizer_data: Mapping[str, Any],
        special_tokens: Mapping[str, str],
        template: ChatTemplate | None,
    ) -> None:
        """tokenizer_data: the content of tokenizer.json. special_tokens: bos_token, eos_token and so on."""
        self.config = config
        self.generation = generation
        self.special_tokens = dict(special_tokens)
        self._template = template
        self._tokenizer = Tokenizer.from_str(json.dumps(tokenizer_data))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._guard = SpecialTokenGuard(tokenizer_data)
        decoder = tokenizer_data["decoder"] or {}
        self._byte_level = decoder.get("type") == "ByteLevel"
        self._bytes_inside = any(step["type"] == "ByteLevel" for step in decoder.get("decoders", ()))
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {token_id for token_id, token in added.items() if token.special}
        bos_id = self._tokenizer.token_to_id(self.special_tokens.get("bos_token", ""))
        self._added_bos = bos_id if self._tokenizer.encode("").ids[:1] == [bos_id] else None
        self._longest_token = max(map(len, self._tokenizer.get_vocab()))
        self._bytes: dict[int, bytes] = {}  # token id → bytes, as they come up; no more than the vocabulary

    @classmethod
    def load(cls, model: Path | ModelSource, now: Callable[[], datetime] = datetime.now) -> "TextModel":
        """Reads a model; a path is a directory's. Raises ModelError that names the file at fault."""
        source = DirectorySource(model) if isinstance(model, Path) else model
        tokenizer, tokenizer_config = source.tokenizer_json(), source.tokenizer_config()
        special_tokens = _named_tokens(tokenizer_config)
        template = _read_template(source.chat_template(), special_tokens, now)
        config, generation = source.config(), read_generation(source)
        try:
            data = _complete(tokenizer.content, tokenizer_config)
            return cls(parse_config(config), generation, data, special_tokens, template)
        except ModelError:
            raise
        except Exception as error:  # tokenizers raises no narrower one
            reason = " ".join(str(error).split())[:300]
            raise ModelError(f"{tokenizer.path}: the tokenizer can't be used: {reason}", field="model") from error

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation. Raises InvalidRequest."""
        if self._template is None:
            raise InvalidRequest("the model has no chat template; use /v1/completions", field="messages")
        return self._template.render(messages, add_generation_prompt)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], limit: int | None = None, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation up to the assistant's turn; special tokens inside messages are ordinary text.

        limit: a text that is certainly longer, in tokens, is refused before it is encoded.
        """
        protected, stand_ins = self._guard.protect(messages)
        text = self.render_chat(protected, add_generation_prompt)
        self._check_length(text, limit, "messages")
        return self._guard.encode(text, stand_ins)

    def encode(self, text: str, limit: int | None = None, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt that the client has put together; special tokens in it count, a BOS once."""
        self._check_length(text, limit, "prompt")
        ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids[1:] if self._added_bos is not None and ids[:2] == [self._added_bos] * 2 else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these ids, special tokens included."""
        detokenizer = self.detokenizer(skip_special_tokens=False)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it; None for an id that the tokenizer doesn't have."""
        return self._tokenizer.id_to_token(token_id)

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        """For one answer."""
        if self._byte_level:
            return ByteLevelDetokenizer(self._visible_bytes if skip_special_tokens else self.token_bytes)
        return WindowDetokenizer(
            decode=lambda ids: self._tokenizer.decode(ids, skip_special_tokens=False),
            is_visible=lambda token_id: self._is_visible(token_id, skip_special_tokens),
            is_byte=self._is_part if self._bytes_inside else self._is_byte_token,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, alone; none for an id that the tokenizer doesn't have."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id) or ""
            known = self._bytes[token_id] = (_letters_bytes if self._byte_level else _piece_bytes)(token)
        return known

    def _visible_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self.token_bytes(token_id)

    def _is_visible(self, token_id: int, skip_special_tokens: bool) -> bool:
        known = self._tokenizer.id_to_token(token_id) is not None
        return known and not (skip_special_tokens and token_id in self._special_ids)

    def _is_byte_token(self, token_id: int) -> bool:
        return _is_byte(self._tokenizer.id_to_token(token_id))

    def _is_part(self, token_id: int) -> bool:
        """Whether the token has bytes that are no characters by themselves."""
        return REPLACEMENT in self._tokenizer.decode([token_id], skip_special_tokens=False)

    def _check_length(self, text: str, limit: int | None, field: str) -> None:
        if limit is not None and len(text) > SHRINK * self._longest_token * limit:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {limit} tokens; {field} has {len(text)} characters, too many",
                field=field,
            )


def _read_template(
    file: TemplateFile | None, special_tokens: Mapping[str, str], now: Callable[[], datetime]
) -> ChatTemplate | None:
    if file is None:
        return None
    try:
        return ChatTemplate(file.text, special_tokens, now, file.path.name)
    except ModelError as error:
        raise ModelError(f"{file.path}: {error}", field="model") from error


def _letters_bytes(token: str) -> bytes:
    """Of a byte-level token; one with other letters (an added token) stands for itself."""
    try:
        return bytes(BYTE_OF[letter] for letter in token)
    except KeyError:
        return token.encode()


def _is_byte(token: str | None) -> bool:
    """A SentencePiece-like token of one raw byte."""
    return token is not None and BYTE_TOKEN.fullmatch(token) is not None


def _piece_bytes(token: str) -> bytes:
    """Of a SentencePiece-like token."""
    return bytes([int(token[3:5], 16)]) if _is_byte(token) else token.replace("\u2581", " ").encode()


def _named_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: token_text(tokenizer_config.get(name)) for name in NAMED_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def _complete(tokenizer_data: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer.json's content with the tokens that only tokenizer_config.json has."""
    added = list(tokenizer_data["added_tokens"])
    listed = sorted((tokenizer_config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    named = [{"content": text, "special": True} for text in _named_tokens(tokenizer_config).values()]
    known = {token["content"] for token in added}
    for token in [token for _, token in listed] + named:
        if token["content"] not in known:
            known.add(token["content"])
            flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": not token["special"]}
            added.append({"id": 0, **flags, **token})  # the tokenizer gives it the next free id
    return {**tokenizer_data, "added_tokens": added}
