"""Tensors mapped from a directory's safetensors files.

Worker processes of one host share a mapped file's pages, and mapping costs no time at start. Tensors that are
neighbours in a file, as `kvrelay model fetch` writes Q, K and V and as gate and up are in most files, are one view of
the mapping, which is as fast as memory of our own.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from common.errors import ModelError
from common.model.safetensors_header import DTYPES, TensorInfo, read_checkpoint


class SafetensorsReader:
    """A TensorReader; each file is mapped once, when its first tensor is wanted."""

    shared = True

    def __init__(self, directory: Path) -> None:
        self.path = Path(directory)
        self.tensors = {tensor.name: tensor for file in read_checkpoint(self.path) for tensor in file.tensors}
        self._maps: dict[Path, torch.Tensor] = {}  # bytes of each file, private and never written to

    def view(self, name: str) -> torch.Tensor:
        tensor = self.tensors[name]
        return self._view(tensor, tensor.shape)

    def stacked(self, names: Sequence[str]) -> torch.Tensor | None:
        parts = [self.tensors[name] for name in names]
        for a, b in pairwise(parts):
            if (a.path, a.dtype, a.offset + a.num_bytes, a.shape[1:]) != (b.path, b.dtype, b.offset, b.shape[1:]):
                return None
        return self._view(parts[0], (sum(part.shape[0] for part in parts), *parts[0].shape[1:]))

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
