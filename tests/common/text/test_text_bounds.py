"""What can't fit a context is refused before any work, and long texts are looked through in short steps."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ContextLengthExceeded
from common.text import special_tokens
from common.text.text_model import TextModel
from tests.support.tiny_text import model_directory, user


class NoGuard:
    def protect(self, messages: Sequence[Any]) -> Any:
        raise AssertionError("work was done")


@pytest.mark.parametrize(("messages", "count"), [(user("a") * 500_000, "500000 entries"), (user("a" * 10**7), "0000")])
def test_a_conversation_that_cannot_fit_is_refused_before_any_work(
    tmp_path: Path, messages: list[dict[str, str]], count: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TextModel.load(model_directory(tmp_path))
    monkeypatch.setattr(text, "_guard", NoGuard())
    with pytest.raises(ContextLengthExceeded, match=count) as caught:
        text.encode_chat(messages, limit=512)
    assert (caught.value.http_status, caught.value.field) == (400, "messages")


@settings(deadline=None)
@given(text=st.text("ab<", max_size=60), size=st.integers(1, 8))
def test_matches_in_short_steps_are_those_of_one(text: str, size: int) -> None:
    pattern, longest = re.compile("<a|ab?a?|b<b"), 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(special_tokens, "CHUNK", size)
        assert [match.span() for match in special_tokens._matches(pattern, text, longest)] == [
            match.span() for match in pattern.finditer(text)
        ]
        assert special_tokens._replaced(pattern, text, longest, str.upper) == pattern.sub(
            lambda match: match[0].upper(), text
        )
