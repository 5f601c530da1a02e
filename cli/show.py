"""kvrelay model show: what would be loaded, without loading it."""

import json
import math
from dataclasses import dataclass
from typing import Any

from common.block_hash import BLOCK_SIZE
from common.engine.config import EngineConfig
from common.engine.memory import MemoryPlan
from common.layout import DTYPE_BYTES
from common.model.config import parse_config
from common.model.end_tokens import read_generation
from common.model.fingerprint import fingerprint
from common.model.open import open_model
from common.model.safetensors_header import DTYPES


@dataclass(frozen=True, slots=True)
class Shown:
    """A model and the cache it needs; sizes are in bytes."""

    name: str
    path: str
    architecture: str
    parameters: int
    layers: int
    dtype: str
    file_bytes: int  # of the tensors, as the files have them
    weights_bytes: int  # in memory
    kv_bytes_per_token: int
    block_size: int  # tokens
    block_bytes: int
    blocks: int  # that fit into kv_cache_memory, or into the memory here now
    max_model_len: int  # tokens
    tokenizer: str
    chat_template: bool
    eos_token_ids: tuple[int, ...]
    fingerprint: str


def describe(settings: EngineConfig) -> Shown:
    """Reads the headers of a model's files. Raises ModelError."""
    source = open_model(settings, weights=True)
    file = source.config()
    config, generation = parse_config(file), read_generation(source)
    dtype = config.resolve_dtype(settings.dtype)
    layout, tensors = config.kv_layout(dtype), source.tensors()
    parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    revision, mapped = source.revision(), all(DTYPES.get(tensor.dtype) == dtype for tensor in tensors)
    return Shown(
        name=settings.names(source)[0],
        path=str(source.path),
        architecture=config.architecture,
        parameters=parameters,
        layers=config.num_layers,
        dtype=dtype,
        file_bytes=sum(tensor.num_bytes for tensor in tensors),
        weights_bytes=parameters * DTYPE_BYTES[dtype],
        kv_bytes_per_token=layout.block_bytes // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        block_bytes=layout.block_bytes,
        blocks=_blocks(settings, layout.block_bytes, parameters * DTYPE_BYTES[dtype], mapped=mapped),
        max_model_len=config.context_length(settings.max_model_len),
        tokenizer=source.tokenizer_kind(),
        chat_template=source.chat_template() is not None,
        eos_token_ids=generation.eos_token_ids,
        fingerprint=fingerprint(revision, dtype=dtype, kv_dtype=layout.dtype, layout_id=layout.layout_id),
    )


def _blocks(settings: EngineConfig, block_bytes: int, weights: int, *, mapped: bool) -> int:
    """Without the working memory of a step, which only a step tells."""
    size: int | None = settings.kv_cache_memory
    if size is None:
        plan = MemoryPlan.here(
            settings.gpu_memory_utilization,
            settings.workers_per_host,
            weights=weights,
            shared_weights=mapped,
            working=0,
        )
        size = max(0, plan.pool_bytes())
    return size // block_bytes


def as_json(shown: Shown) -> dict[str, Any]:
    """Under the same names."""
    return {name: getattr(shown, name) for name in Shown.__slots__}


def as_lines(shown: Shown) -> list[str]:
    """For people, a fact a line."""
    context = f"{shown.max_model_len:,} tokens, {-(-shown.max_model_len // shown.block_size):,} blocks"
    rows = [
        ("model", shown.name),
        ("path", shown.path),
        ("architecture", f"{shown.architecture}, {shown.layers} layers"),
        ("parameters", f"{shown.parameters:,}"),
        ("weights", f"{_size(shown.weights_bytes)} in {shown.dtype} ({_size(shown.file_bytes)} in the files)"),
        ("KV cache", f"{shown.kv_bytes_per_token:,} bytes a token"),
        ("block", f"{shown.block_size} tokens, {shown.block_bytes:,} bytes"),
        ("blocks", f"{shown.blocks:,} fit, or {shown.blocks * shown.block_size:,} tokens"),
        ("context", context),
        ("tokenizer", f"{shown.tokenizer}, {'with' if shown.chat_template else 'without'} a chat template"),
        ("EOS", ", ".join(map(str, shown.eos_token_ids)) or "none"),
        ("fingerprint", shown.fingerprint),
    ]
    return [f"{name:<13} {value}" for name, value in rows]


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def show(settings: EngineConfig, *, in_json: bool) -> None:
    """Prints it."""
    shown = describe(settings)
    print(json.dumps(as_json(shown), indent=2) if in_json else "\n".join(as_lines(shown)))
