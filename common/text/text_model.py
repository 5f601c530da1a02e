"""All text of the system: chat templates, tokens to and from text. Both pools speak token ids only."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from common.errors import ContextLengthExceeded, InvalidRequest, ModelError
from common.model.config import GenerationDefaults, ModelConfig, parse_config
from common.model.directory import DirectorySource
from common.model.end_tokens import read_generation
from common.model.source import ModelSource, TemplateFile
from common.text.added_tokens import named_tokens, with_added_tokens
from common.text.detokenize import Detokenizer
from common.text.special_tokens import SpecialTokenGuard, strings
from common.text.template.chat_template import ChatTemplate, up_to_end_of
from common.text.token_pieces import TokenPieces

SHRINK = 4  # a normalizer may make a text this many times shorter
BEFORE = 16  # tokens that an answer's first characters may depend on, and more
CHUNK = 2**14  # tokens that are decoded before others may run
LOOK_BACK = 1024  # ids among which to find so many


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
        self._pieces = TokenPieces(self._tokenizer, tokenizer_data["decoder"])
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        bos_id = self._tokenizer.token_to_id(self.special_tokens.get("bos_token", ""))
        self._added = self._tokenizer.encode("").ids  # put before every text
        self._added_bos = bos_id if self._added[:1] == [bos_id] else None
        self._longest_token = max(map(len, self._tokenizer.get_vocab()))

    @classmethod
    def load(cls, model: Path | ModelSource, now: Callable[[], datetime] = datetime.now) -> "TextModel":
        """Reads a model; a path is a directory's. Raises ModelError that names the file at fault."""
        source = DirectorySource(model) if isinstance(model, Path) else model
        tokenizer, tokenizer_config = source.tokenizer_json(), source.tokenizer_config()
        special_tokens = named_tokens(tokenizer_config)
        template = _read_template(source.chat_template(), special_tokens, now)
        config, generation = source.config(), read_generation(source)
        try:
            data = with_added_tokens(tokenizer.content, tokenizer_config)
            return cls(parse_config(config), generation, data, special_tokens, template)
        except ModelError:
            raise
        except Exception as error:  # tokenizers raises no narrower one
            reason = " ".join(str(error).split())[:300]
            raise ModelError(f"{tokenizer.path}: the tokenizer can't be used: {reason}", field="model") from error

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation. Raises InvalidRequest."""
        if self._template is None:
            raise InvalidRequest("the model has no chat template; use /v1/completions", field="messages")
        text = self._template.render(messages, add_generation_prompt, variables)
        return up_to_end_of(messages, text) if continue_final_message else text

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        limit: int | None = None,
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation up to the assistant's turn; special tokens inside messages are ordinary text.

        limit: a text that is certainly longer, in tokens, is refused before it is encoded. continue_final_message:
        the text ends with the last message's. variables: what the template gets besides, of the client's choice.
        """
        if limit is not None and len(messages) > limit:
            reason = f"this model's maximum context length is {limit} tokens; messages has {len(messages)} entries"
            raise ContextLengthExceeded(reason, field="messages")
        variables = variables or {}
        self._check_chars(sum(map(len, strings([*messages, variables]))), limit, "messages")
        protected, stand_ins = self._guard.protect([*messages, *({"": value} for value in variables.values())])
        given = {name: one[""] for name, one in zip(variables, protected[len(messages) :], strict=True)}
        text = self.render_chat(
            protected[: len(messages)],
            add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=given,
        )
        if self._template is not None:
            self._template.check_written(messages)
        self._check_chars(len(text), limit, "messages")
        return self._guard.encode(text, stand_ins)

    def encode(self, text: str, limit: int | None = None, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt that the client has put together; special tokens in it count, a BOS once."""
        self._check_chars(len(text), limit, "prompt")
        ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids[1:] if self._added_bos is not None and ids[:2] == [self._added_bos] * 2 else ids

    def decode(self, token_ids: Sequence[int], whole: bool = True) -> str:
        """The text of these ids, special tokens included. Not whole: without a character that it ends within."""
        detokenizer = self.detokenizer(skip_special_tokens=False)
        texts = [detokenizer.push(token_ids[at : at + CHUNK]) for at in range(0, len(token_ids), CHUNK)]
        return "".join((*texts, detokenizer.finish() if whole else ""))

    def num_added(self, token_ids: Sequence[int], text: str) -> int:
        """How many of a text's tokens the tokenizer has put before it."""
        added = list(token_ids[: len(self._added)]) == self._added and not text.startswith(self.decode(self._added))
        return len(self._added) if added else 0

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it; None for an id that the tokenizer doesn't have."""
        return self._tokenizer.id_to_token(token_id)

    def detokenizer(self, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """For one answer to this prompt: its text is the decoding of both, less what is certain of the prompt's."""
        hidden = self._special_ids if skip_special_tokens else frozenset[int]()
        visible = (one for one in islice(reversed(prompt_ids), LOOK_BACK) if one not in hidden)
        return Detokenizer(self._pieces, hidden, list(islice(visible, BEFORE))[::-1])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for within a text; none for an id that the tokenizer doesn't have."""
        piece = self._pieces.get(token_id)
        return piece.inside if piece else b""

    def _check_chars(self, count: int, limit: int | None, field: str) -> None:
        if limit is not None and count > SHRINK * self._longest_token * limit:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {limit} tokens; {field} has {count} characters, too many",
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
