"""From a model source to its tensors."""

from typing import cast

from common.compute.readers.safetensors_reader import SafetensorsReader
from common.compute.weights import TensorReader
from common.model.gguf.gguf_model import GgufSource
from common.model.source import ModelSource


def open_tensors(source: ModelSource) -> TensorReader:
    """A source's tensors; their headers are checked, none is read. Raises ModelError."""
    if source.format == "gguf":
        from common.compute.readers.gguf_reader import GgufReader  # imports the gguf package, for these files alone

        return GgufReader(cast(GgufSource, source.weights))
    return SafetensorsReader(source.path)
