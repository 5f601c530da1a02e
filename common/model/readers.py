"""From a model source to its tensors."""

from common.model.gguf_source import GgufSource
from common.model.opening import WithTokenizer
from common.model.source import ModelSource
from common.model.tensor_files import SafetensorsReader
from common.model.weights import TensorReader


def open_tensors(source: ModelSource) -> TensorReader:
    """A source's tensors; their headers are checked, none is read. Raises ModelError."""
    if isinstance(source, WithTokenizer):
        return open_tensors(source.model)
    if isinstance(source, GgufSource):
        from common.model.gguf_weights import GgufReader  # imports the gguf package, for these files alone

        return GgufReader(source)
    return SafetensorsReader(source.path)
