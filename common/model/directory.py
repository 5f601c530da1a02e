"""A model in a Hugging Face directory with safetensors files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ModelError
from common.model.config import model_name
from common.model.fingerprint import model_fingerprint
from common.model.json_file import JsonFile
from common.model.safetensors_header import DTYPES, INDEX_FILE, SINGLE_FILE, TensorInfo, read_checkpoint
from common.model.source import TemplateFile, token_text


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
        """With the dtype that most of the weights have, if the file has none."""
        file = JsonFile.read(self.path / "config.json")
        if any(file.content.get(key) not in (None, "auto") for key in ("dtype", "torch_dtype")):
            return file
        if not ((self.path / SINGLE_FILE).exists() or (self.path / INDEX_FILE).exists()):
            return file
        sizes = dict.fromkeys(DTYPES.values(), 0)
        for tensor in self.tensors():
            if tensor.dtype in DTYPES:
                sizes[DTYPES[tensor.dtype]] += tensor.num_bytes
        most = max(sizes, key=lambda dtype: sizes[dtype])
        return JsonFile(file.path, {**file.content, "dtype": most}) if sizes[most] else file

    def generation(self) -> JsonFile | None:
        return self._optional("generation_config.json")

    def tokenizer_json(self) -> JsonFile:
        return JsonFile.read(self.path / "tokenizer.json")

    def tokenizer_kind(self) -> str:
        model = self.tokenizer_json().child("model")
        return model.get("type", str, "unknown") if model else "unknown"

    def tokenizer_config(self) -> Mapping[str, Any]:
        """Older checkpoints have what names their special tokens in a file of its own."""
        file = self._optional("tokenizer_config.json")
        config = file.content if file else {}
        older = None if "added_tokens_decoder" in config else self._optional("special_tokens_map.json")
        return {**config, **older.content} if older else config

    def special_tokens(self) -> Mapping[str, int]:
        file, config = self.tokenizer_json(), self.tokenizer_config()
        added = file.content.get("added_tokens") or []
        if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
            raise file.error("added_tokens", "must be a list of objects")
        entries = [JsonFile(file.path, token, "added_tokens.") for token in added]
        tokens = {entry.get("content", str): entry.get("id", int) for entry in entries}
        named = {token_text(value) for name, value in config.items() if name.endswith("_token")} - {None}
        if not named <= tokens.keys():
            vocabulary = _vocabulary(file.child("model"))
            tokens |= {text: vocabulary[text] for text in named - tokens.keys() if text in vocabulary}
        return tokens

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


def _vocabulary(model: JsonFile | None) -> dict[str, int]:
    """Token to id: an object of BPE's kinds, a list of pieces with scores of Unigram's."""
    found = model.content.get("vocab") if model else None
    if isinstance(found, list):
        return {str(entry[0]): i for i, entry in enumerate(found) if isinstance(entry, list) and entry}
    return found if isinstance(found, dict) else {}
