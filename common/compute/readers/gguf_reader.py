"""Tensors of a GGUF file as numbers in Hugging Face's order."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from common.errors import ModelError
from common.model.gguf.gguf_model import GgufSource
from common.model.gguf.tensor_names import NamedTensor
from common.model.safetensors_header import TensorInfo

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufReader:
    """A TensorReader; what is quantized becomes float32, a tensor at a time."""

    shared = False  # they are made of what the file has

    def __init__(self, source: GgufSource) -> None:
        self.path = source.path
        self._named: Mapping[str, NamedTensor] = source.named
        self.tensors = {tensor.name: _as_read(tensor) for tensor in source.tensors()}
        self._data = {path: _mapped(path) for path in source.file.paths}

    def view(self, name: str) -> torch.Tensor:
        """In the tensor's own dtype, or float32. Raises ModelError for numbers that are not finite."""
        tensor = self._named[name]
        values = self._numbers(tensor)
        if not bool(torch.isfinite(values).all()):
            place = f"{tensor.source.path}: tensor {tensor.source.name}"
            raise ModelError(f"{place} has numbers that are not finite", field="model")
        if tensor.plus_one:
            values = values - 1
        if tensor.pair_heads:
            values = halves_from_pairs(values, tensor.pair_heads)
        return values

    def stacked(self, names: Sequence[str]) -> torch.Tensor | None:
        """None: there is no view of several tensors."""
        return None

    def _numbers(self, tensor: NamedTensor) -> torch.Tensor:
        source = tensor.source
        data = np.array(self._data[source.path][source.offset : source.offset + source.num_bytes])
        if source.type.name in _PLAIN:
            return torch.from_numpy(data).view(_PLAIN[source.type.name]).view(source.shape)
        with np.errstate(invalid="ignore", over="ignore"):  # of corrupt scales, which the caller looks for
            blocks = dequantize(data.reshape(*source.shape[:-1], -1), GGMLQuantizationType(source.kind))
        return torch.from_numpy(np.ascontiguousarray(blocks, dtype=np.float32)).view(source.shape)


def _mapped(path: Path) -> npt.NDArray[np.uint8]:
    try:
        return np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be mapped: {error}", field="model") from error


def _as_read(tensor: TensorInfo) -> TensorInfo:
    """The info of what view() gives."""
    dtype = tensor.dtype if tensor.dtype in _PLAIN else "F32"
    return TensorInfo(tensor.name, tensor.path, dtype, tensor.shape, tensor.offset, tensor.num_bytes)


def halves_from_pairs(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a head from GGUF's rotary order (pairs 0,1 2,3 ...) to Hugging Face's (two halves: 0,2,... 1,3,...)."""
    pairs = values.view(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)
