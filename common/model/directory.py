"""A model in a Hugging Face directory with safetensors files; needs no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ModelError
from common.model.config import model_name
from common.model.fingerprint import model_fingerprint
from common.model.json_file import JsonFile
from common.model.safetensors_header import TensorInfo, read_checkpoint
from common.model.source import TemplateFile


class DirectorySource:
    """A ModelSource."""

    format = "safetensors"

    def __init__(self, path: Path, name: str = "") -> None:
        self.path = path
        self.name = name or model_name(path)

    @property
    def weights(self) -> "DirectorySource":
        return self

    def config(self) -> JsonFile:
        return JsonFile.read(self.path / "config.json")

    def generation(self) -> JsonFile | None:
        return self._optional("generation_config.json")

    def tokenizer_json(self) -> JsonFile:
        return JsonFile.read(self.path / "tokenizer.json")

    def tokenizer_kind(self) -> str:
        model = self.tokenizer_json().child("model")
        return model.get("type", str, "unknown") if model else "unknown"

    def tokenizer_config(self) -> Mapping[str, Any]:
        file = self._optional("tokenizer_config.json")
        return file.content if file else {}

    def chat_template(self) -> TemplateFile | None:
        """From chat_template.jinja, else the default one in tokenizer_config.json."""
        path = self.path / "chat_template.jinja"
        try:
            if path.exists():
                return TemplateFile(path, path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: {error}", field="model") from error
        path, found = self.path / "tokenizer_config.json", self.tokenizer_config().get("chat_template")
        if isinstance(found, list):
            named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            found = named.get("default")
        if found is not None and not isinstance(found, str):
            raise ModelError(f"{path}: chat_template must be a string or a list of named ones", field="model")
        return None if found is None else TemplateFile(path, found)

    def tensors(self) -> Sequence[TensorInfo]:
        return [tensor for file in read_checkpoint(self.path) for tensor in file.tensors]

    def revision(self) -> str:
        return model_fingerprint(self.path)

    def _optional(self, name: str) -> JsonFile | None:
        path = self.path / name
        return JsonFile.read(path) if path.exists() else None
