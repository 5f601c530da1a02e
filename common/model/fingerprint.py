"""What must be equal before two workers exchange KV: the model and the layout of the cache."""

import hashlib
import json
from pathlib import Path

from common.block_hash import BLOCK_SIZE, SCHEME
from common.errors import ModelError
from common.model.config import JsonFile
from common.model.file_digests import file_digests
from common.model.safetensors_header import checkpoint_files

WIRE_VERSION = 3  # of proto/; raised when old and new peers would misread each other


def add_to_digest(digest: "hashlib._Hash", *parts: bytes) -> None:
    """Parts are length-prefixed so that no two lists of them collide."""
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)


def model_fingerprint(directory: Path) -> str:
    """SHA-256 (hex) of config, tokenizer and every byte of the weights; the revision in block hashes."""
    directory = Path(directory)
    digest = hashlib.sha256()
    config = JsonFile.read(directory / "config.json").content
    add_to_digest(digest, json.dumps(config, sort_keys=True).encode(), _read(directory / "tokenizer.json"))
    add_to_digest(digest, *(content.encode() for content in file_digests(checkpoint_files(directory))))
    return digest.hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}", field="model") from error


def fingerprint(
    model: str,
    *,
    dtype: str,
    kv_dtype: str,
    layout_id: str,
    hash_scheme: str = SCHEME,
    wire_version: int = WIRE_VERSION,
) -> str:
    """SHA-256 (hex) of all that two workers must share; `model` is model_fingerprint's answer."""
    digest = hashlib.sha256()
    parts = (model, dtype, kv_dtype, layout_id, str(BLOCK_SIZE), hash_scheme, str(wire_version))
    add_to_digest(digest, *(part.encode() for part in parts))
    return digest.hexdigest()
