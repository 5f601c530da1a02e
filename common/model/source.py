"""Where a model comes from, in one shape for all kinds of it.

Whatever the files are, a source speaks Hugging Face: its config and generation defaults are the content of
config.json and generation_config.json, its tensors have Hugging Face's names.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from common.model.json_file import JsonFile
from common.model.safetensors_header import TensorInfo


@dataclass(frozen=True, slots=True)
class TemplateFile:
    """A chat template and the file that has it."""

    path: Path
    text: str  # Jinja


def token_text(token: object) -> str | None:
    """A token in tokenizer_config.json is a string or an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


class ModelSource(Protocol):
    """A model's files; each is read and checked when it is asked for. Everything raises ModelError."""

    @property
    def path(self) -> Path:
        """The directory or file."""
        ...

    @property
    def name(self) -> str:
        """What it is called where nobody gave it another name."""
        ...

    @property
    def weights(self) -> "ModelSource":
        """The source that has the tensors: this one, unless it is made of several."""
        ...

    @property
    def format(self) -> str:
        """Of the files that have the tensors: safetensors or gguf."""
        ...

    def config(self) -> JsonFile:
        """As config.json."""
        ...

    def generation(self) -> JsonFile | None:
        """As generation_config.json, if the model has one."""
        ...

    def tokenizer_json(self) -> JsonFile:
        """As tokenizer.json, which the tokenizers library reads."""
        ...

    def tokenizer_kind(self) -> str:
        """What people call the tokenizer, such as BPE or gpt2/llama-bpe."""
        ...

    def tokenizer_config(self) -> Mapping[str, Any]:
        """As tokenizer_config.json: special tokens by their roles, and the chat template unless it is apart."""
        ...

    def special_tokens(self) -> Mapping[str, int]:
        """Tokens with a meaning of their own, by their text."""
        ...

    def chat_template(self) -> TemplateFile | None:
        """What renders a chat."""
        ...

    def tensors(self) -> Sequence[TensorInfo]:
        """As the files have them: a tensor's dtype may be one of GGUF's types."""
        ...

    def revision(self) -> str:
        """SHA-256 (hex) of what identifies the model, as common/model/fingerprint.py makes it."""
        ...


def tokenizer_id(source: ModelSource) -> str:
    """SHA-256 (hex) of the tokenizer's content: token ids mean the same to whoever has the same. Raises ModelError."""
    return hashlib.sha256(json.dumps(source.tokenizer_json().content, sort_keys=True).encode()).hexdigest()
