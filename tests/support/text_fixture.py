"""A text model for tests: ask for `text`."""

import pytest

from common.text.text_model import TextModel
from tests.support.tiny_text import model_directory


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """A byte-level tokenizer: each ASCII letter has a token of its own."""
    return TextModel.load(model_directory(tmp_path_factory.mktemp("text")))
