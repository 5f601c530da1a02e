"""A model in one GGUF file or in several."""

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from common.model.file_digests import file_digests
from common.model.fingerprint import add_to_digest
from common.model.gguf.config import gguf_config, gguf_generation
from common.model.gguf.header import GgufFile
from common.model.gguf.split import read_parts
from common.model.gguf.tensor_names import NamedTensor, named_tensors
from common.model.gguf.tokenizer import control_tokens, gguf_tokenizer, gguf_tokenizer_config, tokenizer_kind
from common.model.json_file import JsonFile
from common.model.safetensors_header import TensorInfo
from common.model.source import TemplateFile


class GgufSource:
    """A ModelSource; the files are read at the first question. path: of the first."""

    format = "gguf"

    def __init__(self, path: Path, name: str = "") -> None:
        self.path = path
        self.name = name or path.stem

    @property
    def weights(self) -> "GgufSource":
        return self

    @cached_property
    def file(self) -> GgufFile:
        return read_parts(self.path)

    @cached_property
    def named(self) -> Mapping[str, NamedTensor]:
        """Tensors by their Hugging Face names."""
        self.config()  # an unknown architecture is said first
        return named_tensors(self.file)

    def config(self) -> JsonFile:
        return JsonFile(self.path, gguf_config(self.file))

    def generation(self) -> JsonFile:
        return JsonFile(self.path, gguf_generation(self.file))

    def tokenizer_json(self) -> JsonFile:
        return JsonFile(self.path, gguf_tokenizer(self.file))

    def tokenizer_config(self) -> Mapping[str, Any]:
        return gguf_tokenizer_config(self.file)

    def special_tokens(self) -> Mapping[str, int]:
        return control_tokens(self.file)

    def chat_template(self) -> TemplateFile | None:
        text = self.file.optional("tokenizer.chat_template", str)
        return None if text is None else TemplateFile(self.path, text)

    def tokenizer_kind(self) -> str:
        return tokenizer_kind(self.file)

    def tensors(self) -> tuple[TensorInfo, ...]:
        places = ((name, named.source) for name, named in self.named.items())
        return tuple(
            TensorInfo(name, place.path, place.type.name, place.shape, place.offset, place.num_bytes)
            for name, place in places
        )

    def revision(self) -> str:
        """Of all bytes of all files; the header holds the tokenizer."""
        digest = hashlib.sha256()
        add_to_digest(digest, *(content.encode() for content in file_digests(self.file.paths)))
        return digest.hexdigest()
