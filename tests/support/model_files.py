"""What the files of a model directory say."""

from pathlib import Path

from common.model.config import GenerationDefaults, ModelConfig, parse_config, parse_generation
from common.model.directory import DirectorySource


def load_config(directory: Path) -> ModelConfig:
    return parse_config(DirectorySource(directory).config())


def load_generation(directory: Path) -> GenerationDefaults:
    source = DirectorySource(directory)
    return parse_generation(source.config(), source.generation())
