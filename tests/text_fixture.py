"""A text model for tests: `pytest_plugins = ("text_fixture",)` in a test file, then ask for `text`."""

import pytest
from tiny_text import model_directory

from router.text import TextModel


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """A byte-level tokenizer: each ASCII letter has a token of its own."""
    return TextModel.load(model_directory(tmp_path_factory.mktemp("text")))
