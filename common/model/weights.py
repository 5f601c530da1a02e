"""Weights of a Llama-like model, mapped from its safetensors files.

Worker processes of one host share a mapped file's pages, and mapping costs no time at start. Q, K and V, and gate and
up, are one matrix each: at batch 1 that saves 8 % of the linear layers' time (16.4 against 18 ms a step for a
135M-parameter model in bf16 on one core; nothing from batch 8 on), and rotary embedding and activation then run once a
layer. Where the parts are neighbours in the file, as `kvrelay model fetch` writes them and as gate and up are in most
files, the fused matrix is a view of the mapping. Where they are not, and where the dtype has to change, it is a copy.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from common.errors import ModelError
from common.model.checkpoint import DTYPES, TensorInfo, read_checkpoint
from common.model.config import ModelConfig

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Of one decoder layer; a matrix is [out, in], as torch's linear wants it."""

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 * kv heads) * head dim, hidden]
    out: torch.Tensor  # [hidden, heads * head dim]
    post_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab, hidden]; the embedding itself where the two are tied


def load_weights(
    directory: Path, config: ModelConfig, dtype: str, *, progress: Progress = lambda done, total: None
) -> ModelWeights:
    """All weights in `dtype`. Raises ModelError that names file and tensor, before any tensor is read."""
    tensors = {tensor.name: tensor for file in read_checkpoint(Path(directory)) for tensor in file.tensors}
    shapes = _expected_shapes(config)
    _check(Path(directory), tensors, shapes, config)
    loader = _Loader(tensors, getattr(torch, dtype), progress)
    embedding = loader.load(_EMBEDDING)
    layers = []
    for i in range(config.num_layers):
        part = f"model.layers.{i}."
        layers.append(
            LayerWeights(
                input_norm=loader.load(f"{part}input_layernorm.weight"),
                qkv=loader.load(*(f"{part}self_attn.{name}_proj.weight" for name in "qkv")),
                out=loader.load(f"{part}self_attn.o_proj.weight"),
                post_norm=loader.load(f"{part}post_attention_layernorm.weight"),
                gate_up=loader.load(*(f"{part}mlp.{name}_proj.weight" for name in ("gate", "up"))),
                down=loader.load(f"{part}mlp.down_proj.weight"),
            )
        )
    norm = loader.load("model.norm.weight")
    head = embedding if config.tie_word_embeddings else loader.load(_HEAD)
    if config.tie_word_embeddings and _HEAD in tensors and not torch.equal(loader.load(_HEAD), embedding):
        path = tensors[_HEAD].path
        raise ModelError(f"{path}: {_HEAD} is not the embedding, but tie_word_embeddings is true", field="model")
    return ModelWeights(embedding, tuple(layers), norm, head)


_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for i in range(config.num_layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, hidden)
    return shapes


def _check(
    directory: Path, tensors: dict[str, TensorInfo], shapes: dict[str, tuple[int, ...]], config: ModelConfig
) -> None:
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise ModelError(f"{directory}: tensor {missing[0]} is missing ({len(missing)} in all)", field="model")
    known = shapes | ({_HEAD: shapes[_EMBEDDING]} if config.tie_word_embeddings else {})
    for name, tensor in tensors.items():
        if name.endswith(".rotary_emb.inv_freq"):
            continue  # a constant that old checkpoints carry along
        if name not in known:
            raise ModelError(f"{tensor.path}: tensor {name} is no part of a {config.architecture}", field="model")
        if tensor.shape != known[name]:
            raise ModelError(
                f"{tensor.path}: tensor {name} is {list(tensor.shape)}, config.json wants {list(known[name])}",
                field="model",
            )
        if tensor.dtype not in DTYPES:
            raise ModelError(f"{tensor.path}: tensor {name} has the unsupported dtype {tensor.dtype}", field="model")


class _Loader:
    """Maps each file once; tensors are views of the mappings as far as dtype and place allow."""

    def __init__(self, tensors: dict[str, TensorInfo], dtype: torch.dtype, progress: Progress) -> None:
        self._tensors = tensors
        self._dtype = dtype
        self._progress = progress
        self._maps: dict[Path, torch.Tensor] = {}  # bytes of each file, private and never written to
        self._done = 0
        self._total = sum(tensor.num_bytes for tensor in tensors.values())

    def load(self, *names: str) -> torch.Tensor:
        """One tensor, or several with equal columns stacked along their rows."""
        parts = [self._tensors[name] for name in names]
        rows = sum(part.shape[0] for part in parts)
        neighbours = all(
            (a.path, a.dtype, a.offset + a.num_bytes) == (b.path, b.dtype, b.offset) for a, b in pairwise(parts)
        )
        if neighbours:
            result = self._view(parts[0], (rows, *parts[0].shape[1:])).to(self._dtype)
        else:
            result = torch.cat([self._view(part, part.shape).to(self._dtype) for part in parts])
        self._done += sum(part.num_bytes for part in parts)
        self._progress(self._done, self._total)
        return result

    def _view(self, first: TensorInfo, shape: tuple[int, ...]) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, DTYPES[first.dtype])
        data = self._map(first.path)[first.offset : first.offset + math.prod(shape) * dtype.itemsize]
        if first.offset % dtype.itemsize:
            data = data.clone()  # the format allows it; torch doesn't
        return data.view(dtype).view(shape)

    def _map(self, path: Path) -> torch.Tensor:
        if path not in self._maps:
            try:
                self._maps[path] = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
            except (OSError, RuntimeError) as error:
                raise ModelError(f"{path} can't be mapped: {error}", field="model") from error
        return self._maps[path]
