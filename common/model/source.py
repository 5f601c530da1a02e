"""Where a model comes from, in one shape for all kinds of it; needs no torch.

Whatever the files are, a source speaks Hugging Face: its config and generation defaults are the content of
config.json and generation_config.json, its tensors have Hugging Face's names.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from common.model.config import JsonFile


class ModelSource(Protocol):
    """A model's files, opened and checked as far as that needs no tensor. Everything raises ModelError."""

    @property
    def path(self) -> Path:
        """The directory or file."""
        ...

    @property
    def name(self) -> str:
        """What it is called where nobody gave it another name."""
        ...

    def config(self) -> JsonFile:
        """As config.json."""
        ...

    def generation(self) -> JsonFile | None:
        """As generation_config.json, if the model has one."""
        ...

    def tokenizer_json(self) -> str:
        """As tokenizer.json, for the tokenizers library."""
        ...

    def tokenizer_config(self) -> Mapping[str, Any]:
        """As tokenizer_config.json: special tokens by their roles, and the chat template unless it is apart."""
        ...

    def chat_template(self) -> str | None:
        """The jinja template that renders a chat."""
        ...

    def revision(self) -> str:
        """SHA-256 (hex) of what identifies the model, as common/model/fingerprint.py makes it."""
        ...
