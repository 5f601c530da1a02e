"""Linear stand-ins for methods of texts mean what Python's mean, and no template keeps everybody else waiting."""

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import KVRelayError, ModelError
from common.text.template.budget import TooMuchWork
from common.text.template.chat_template import ChatTemplate
from common.text.template.text_methods import MAX_STRIPPED, linear
from tests.support.hostile_templates import COLLIDING, LONG_HOLDS

TEXTS = st.text("ab", max_size=40)
SOUGHT = st.text("ab", min_size=1, max_size=3).map(lambda text: text * 4)  # on both sides of what is short
PLACE = st.none() | st.integers(-45, 45)


def outcome(method: Callable[..., Any], *args: Any) -> Any:
    try:
        return method(*args)
    except ValueError as error:
        return str(error)


@given(text=TEXTS, sought=SOUGHT, start=PLACE, stop=PLACE)
@settings(max_examples=300, deadline=None)
def test_places_are_pythons(text: str, sought: str, start: int | None, stop: int | None) -> None:
    for method in (text.rfind, text.rindex):
        assert outcome(linear(method), sought, start, stop) == outcome(method, sought, start, stop)
        assert outcome(linear(method), sought) == outcome(method, sought)


@given(text=TEXTS, sought=SOUGHT, most=st.integers(-1, 4))
@settings(max_examples=200, deadline=None)
def test_parts_are_pythons(text: str, sought: str, most: int) -> None:
    assert linear(text.rpartition)(sought) == text.rpartition(sought)
    assert linear(text.rsplit)(sought, most) == text.rsplit(sought, most)
    assert linear(text.rsplit)(sep=sought, maxsplit=most) == text.rsplit(sought, most)
    assert linear(text.rsplit)() == text.rsplit()


@given(text=TEXTS, letters=st.text("abc", max_size=200) | st.none())
@settings(max_examples=100, deadline=None)
def test_stripped_is_as_python_strips(text: str, letters: str | None) -> None:
    for method in (text.strip, text.lstrip, text.rstrip):
        assert linear(method)(letters) == method(letters)


def test_too_many_different_letters_are_not_stripped() -> None:
    letters = "".join(map(chr, range(0x100, 0x100 + MAX_STRIPPED)))
    assert linear("a".strip)(letters) == "a"
    with pytest.raises(TooMuchWork):
        linear("a".strip)(letters + "a")


@pytest.mark.parametrize("name", LONG_HOLDS)
def test_no_single_call_takes_long(name: str) -> None:
    """Processor time of this thread, so that a busy machine doesn't count; each took 0.1 s to forever in one call."""
    template = ChatTemplate(LONG_HOLDS[name], {}, datetime.now)
    messages = [{"role": "user", "content": "hello " * 2000}]
    before = time.thread_time()
    with suppress(KVRelayError):
        template.render(messages)
    assert time.thread_time() - before < (0.7 if name == "path of attributes" else 0.06)  # a path is many steps


@pytest.mark.parametrize("source", COLLIDING.values(), ids=COLLIDING.keys())
def test_keys_whose_hashes_could_collide_are_refused(source: str) -> None:
    with pytest.raises(ModelError, match=r"tuple as a key|more than 60 bits"):
        ChatTemplate(source, {}, datetime.now).render([{"role": "user", "content": "hello"}])
