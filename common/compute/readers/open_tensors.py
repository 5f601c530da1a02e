"""From a model source to its tensors."""

from common.compute.readers.safetensors_reader import SafetensorsReader
from common.compute.weights import TensorReader
from common.model.gguf.gguf_model import GgufSource
from common.model.open import WithTokenizer
from common.model.source import ModelSource


def open_tensors(source: ModelSource) -> TensorReader:
    """A source's tensors; their headers are checked, none is read. Raises ModelError."""
    if isinstance(source, WithTokenizer):
        return open_tensors(source.model)
    if isinstance(source, GgufSource):
        from common.compute.readers.gguf_reader import GgufReader  # imports the gguf package, for these files alone

        return GgufReader(source)
    return SafetensorsReader(source.path)
