"""From what a user names (a directory, a GGUF file, a name on the hub) to a ModelSource."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from common.errors import ModelError
from common.model.directory import DirectorySource
from common.model.fingerprint import add_to_digest
from common.model.gguf.gguf_model import GgufSource
from common.model.gguf.header import is_gguf
from common.model.gguf.split import first_parts
from common.model.hub import fetch_from_hub, is_hub_name
from common.model.json_file import JsonFile
from common.model.safetensors_header import INDEX_FILE, SINGLE_FILE, TensorInfo
from common.model.source import ModelSource, TemplateFile
from common.settings import listed, setting


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model, of those who compute with it and of those who handle its text."""

    model: str = setting(MISSING, "model directory, GGUF file or owner/name on the Hugging Face hub")
    load_format: str = setting("auto", "of the weights (auto: what is there)", choices=("auto", "safetensors", "gguf"))
    revision: str | None = setting(None, "branch, tag or commit on the hub (default: its main branch)")
    tokenizer: str | None = setting(None, "another model, for its tokenizer and chat template (default: the model's)")
    served_model_name: str = setting(
        "",
        "names in the API, comma-separated or repeated; the first is the one in metrics (default: the model's own)",
        repeats=True,
    )

    def names(self, source: ModelSource) -> tuple[str, ...]:
        """What the API calls the model; the first one is its own name elsewhere, too."""
        return listed(self.served_model_name) or (source.name,)


def open_source(
    model: str | Path,
    *,
    load_format: str = "auto",
    revision: str | None = None,
    tokenizer: str | None = None,
    weights: bool = True,
) -> ModelSource:
    """A model by its directory, GGUF file or hub name; fetched unless it is here. Raises ModelError.

    revision: branch, tag or commit on the hub. tokenizer: another model, whose tokenizer and chat template to take.
    weights: whether they are needed; a fetch leaves them out otherwise.
    """
    source = _open(str(model), load_format, revision, weights)
    return WithTokenizer(source, open_source(tokenizer, weights=False)) if tokenizer else source


def open_model(settings: ModelSettings, *, weights: bool) -> ModelSource:
    """The model that the settings name. Raises ModelError."""
    return open_source(
        settings.model,
        load_format=settings.load_format,
        revision=settings.revision,
        tokenizer=settings.tokenizer,
        weights=weights,
    )


def _open(model: str, load_format: str, revision: str | None, weights: bool) -> ModelSource:
    path = Path(os.path.expanduser(model))
    if model and os.path.exists(path):  # False for whatever is no path
        if revision:
            raise ModelError(f"revision is for models of the hub; {path} is here", field="revision")
        return _local(path, load_format, "")
    if not is_hub_name(model):
        raise ModelError(f"there is no {model!r}, and it is no name on the Hugging Face hub, either", field="model")
    return _local(fetch_from_hub(model, revision, weights=weights), load_format, model)


def _local(path: Path, load_format: str, name: str) -> ModelSource:
    """name: of the hub; empty for the path's own."""
    if path.is_dir():
        files = first_parts(sorted(path.glob("*.gguf")))
        has_tensors = (path / SINGLE_FILE).exists() or (path / INDEX_FILE).exists()
        if load_format == "safetensors" or (load_format == "auto" and (has_tensors or not files)):
            return DirectorySource(path, name)
        if len(files) != 1:
            found = ", ".join(file.name for file in files[:5]) or "no GGUF file"
            raise ModelError(f"{path} has {found}: name the one file to load", field="model")
        return GgufSource(files[0], name)
    if load_format == "safetensors" or not (path.is_file() and (path.suffix == ".gguf" or is_gguf(path))):
        wanted = (
            "a directory for load_format safetensors" if load_format == "safetensors" else "a directory or a GGUF file"
        )
        raise ModelError(f"{path} must be {wanted}", field="model")
    return GgufSource(path, name)


class WithTokenizer:
    """A ModelSource with the tokenizer and the chat template of another."""

    def __init__(self, model: ModelSource, tokenizer: ModelSource) -> None:
        self._tokenizer = tokenizer
        self.weights = model.weights
        self.format = model.format
        self.path = model.path
        self.name = model.name

    def config(self) -> JsonFile:
        return self.weights.config()

    def generation(self) -> JsonFile | None:
        return self.weights.generation()

    def tokenizer_json(self) -> JsonFile:
        return self._tokenizer.tokenizer_json()

    def tokenizer_kind(self) -> str:
        return self._tokenizer.tokenizer_kind()

    def tokenizer_config(self) -> Mapping[str, Any]:
        return self._tokenizer.tokenizer_config()

    def special_tokens(self) -> Mapping[str, int]:
        return self._tokenizer.special_tokens()

    def chat_template(self) -> TemplateFile | None:
        return self._tokenizer.chat_template()

    def tensors(self) -> Sequence[TensorInfo]:
        return self.weights.tensors()

    def revision(self) -> str:
        digest = hashlib.sha256()
        words = json.dumps(self.tokenizer_json().content, sort_keys=True)
        add_to_digest(digest, self.weights.revision().encode(), words.encode())
        return digest.hexdigest()
