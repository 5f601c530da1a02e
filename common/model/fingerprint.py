"""What must be equal before two workers exchange KV: the model and the layout of the cache; needs no torch."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from common.block_hash import BLOCK_SIZE, SCHEME
from common.errors import ModelError
from common.model.config import JsonFile
from common.model.safetensors_header import read_checkpoint

SAMPLED_BYTES = 4096  # of each tensor: enough to tell a fine-tune apart, little enough to read at each start
WIRE_VERSION = 3  # of proto/; raised when old and new peers would misread each other


def add_to_digest(digest: "hashlib._Hash", *parts: bytes) -> None:
    """Parts are length-prefixed so that no two lists of them collide."""
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)


def model_fingerprint(directory: Path) -> str:
    """SHA-256 (hex) of headers and the start of each tensor, config and tokenizer; the revision in block hashes.

    Tensors are read in part only, so this is an identity, not an integrity check.
    """
    directory = Path(directory)
    digest = hashlib.sha256()
    config = JsonFile.read(directory / "config.json").content
    add_to_digest(digest, json.dumps(config, sort_keys=True).encode(), _read(directory / "tokenizer.json"))
    for file in read_checkpoint(directory):
        add_to_digest(digest, file.header)
        add_tensors(digest, file.path, ((tensor.offset, tensor.num_bytes) for tensor in file.tensors))
    return digest.hexdigest()


def add_tensors(digest: "hashlib._Hash", path: Path, places: Iterable[tuple[int, int]]) -> None:
    """The start of each tensor of a file; a place is (offset, number of bytes). Raises ModelError."""
    try:
        with path.open("rb") as data:
            for offset, num_bytes in places:
                data.seek(offset)
                add_to_digest(digest, data.read(min(num_bytes, SAMPLED_BYTES)))
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}", field="model") from error


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
