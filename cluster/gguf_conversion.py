"""A GGUF as a Hugging Face model directory: bf16 safetensors, tokenizer.json, chat template, configs."""

import json
import struct
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from common.compute.readers.gguf_reader import GgufReader
from common.compute.readers.safetensors_reader import SafetensorsReader
from common.compute.weights import load_weights
from common.errors import ModelError
from common.model.config import parse_config
from common.model.gguf.gguf_model import GgufSource
from common.progress_bar import Progress

_ALIGNMENT = 64  # of the data section, so that mapped tensors start on cache lines

# A layer's parts in the order in which they are written: q, k, v and gate, up are neighbours, so that each of the two
# groups can be mapped as one matrix.
_ORDER = (
    "input_layernorm",
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm"),
    *("post_attention_layernorm", "pre_feedforward_layernorm"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj", "post_feedforward_layernorm"),
)


def convert_gguf(path: Path, directory: Path, *, progress: Progress = lambda done, total: None) -> None:
    """Writes a model directory from a GGUF file, and reads it back. Raises ModelError."""
    source = GgufSource(path)
    reader = GgufReader(source)
    _write_json(directory / "config.json", source.config().content | {"dtype": "bfloat16"})
    _write_json(directory / "generation_config.json", source.generation().content)
    _write_tokenizer(directory, source)
    _write_weights(directory / "model.safetensors", reader, progress)
    load_weights(SafetensorsReader(directory), parse_config(source.config()), "bfloat16")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_tokenizer(directory: Path, source: GgufSource) -> None:
    try:
        tokenizer = Tokenizer.from_str(json.dumps(source.tokenizer_json().content))
    except Exception as error:  # tokenizers raises no narrower one
        raise ModelError(f"{source.path}: the tokenizer can't be used: {error}", field="model") from error
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", dict(source.tokenizer_config()))
    if template := source.chat_template():
        (directory / "chat_template.jinja").write_text(template.text, encoding="utf-8")


def _place(name: str) -> tuple[int, int, str, int]:
    """For sorting: the embedding, layers, the last norm, the head."""
    parts = name.split(".")
    if parts[1] == "layers":
        return 1, int(parts[2]), parts[-1], -_ORDER[::-1].index(parts[-2])  # biases, then weights
    return (0 if "embed_tokens" in name else 2), 0, "", "lm_head" in name


def _write_weights(path: Path, reader: GgufReader, progress: Progress) -> None:
    """Dequantizes one tensor at a time."""
    names = sorted(reader.tensors, key=_place)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        shape = reader.tensors[name].shape
        num_bytes = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + num_bytes]}
        at += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for i, name in enumerate(names):
            weight = reader.view(name).to(torch.bfloat16)
            file.write(weight.contiguous().view(torch.uint8).numpy().tobytes())
            progress(i + 1, len(names))
