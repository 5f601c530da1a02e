"""Chat templates render as transformers renders them; what they refuse is the client's error."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tiny_text import BARE, CHATML, CONVERSATIONS, SYSTEM, TRIMMED, USER, model_directory, user
from transformers import PreTrainedTokenizerFast

from common.errors import InvalidRequest
from router.text import TextModel

FEATURES = (
    "{% set ns = namespace(count=0) %}{% for message in messages %}{% if message.content == 'skip' %}{% continue %}"
    "{% endif %}{% set ns.count = ns.count + 1 %}{{ message | tojson }}{% generation %}{{ message.content }}"
    "{% endgeneration %}{% endfor %}{{ ns.count }} {{ bos_token }} {{ strftime_now('%Y-%m-%d') }}"
    "{{ messages | tojson(indent=2) }}{% if tools is none %} no tools{% endif %}"
)


def reference(directory: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.mark.parametrize("template", [CHATML, TRIMMED, BARE, FEATURES], ids=["chatml", "trimmed", "bare", "features"])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompted", [True, False])
def test_renders_as_transformers_does(
    tmp_path: Path, template: str, messages: list[dict[str, str]], prompted: bool
) -> None:
    directory = model_directory(tmp_path, chat_template=template)
    wanted = reference(directory).apply_chat_template(messages, tokenize=False, add_generation_prompt=prompted)
    assert TextModel.load(directory).render_chat(messages, prompted) == wanted


def test_knows_the_time_it_is_given(tmp_path: Path) -> None:
    directory = model_directory(tmp_path, chat_template="{{ strftime_now('%d %b %Y') }}")
    model = TextModel.load(directory, now=lambda: datetime(2024, 2, 29))
    assert model.render_chat(user("hi")) == "29 Feb 2024"


def test_refusal_has_the_templates_words(tmp_path: Path) -> None:
    model = TextModel.load(model_directory(tmp_path, chat_template=TRIMMED))
    with pytest.raises(InvalidRequest, match="system comes first") as caught:
        model.render_chat([USER, SYSTEM])
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "template",
    ["{{ messages[7].content }}", "{{ messages[0].content + 1 }}", "{{ ''.__class__.mro() }}", "{{ 1 / 0 }}"],
)
def test_whatever_a_template_raises_is_a_refusal(tmp_path: Path, template: str) -> None:
    model = TextModel.load(model_directory(tmp_path, chat_template=template))
    with pytest.raises(InvalidRequest, match="chat template"):
        model.render_chat(user("hi"))


def test_chat_needs_a_template(tmp_path: Path) -> None:
    model = TextModel.load(model_directory(tmp_path, chat_template=None))
    with pytest.raises(InvalidRequest, match="no chat template"):
        model.encode_chat(user("hi"))


@pytest.mark.parametrize(
    "named", ["plain", [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "plain"}]]
)
def test_template_may_be_in_the_tokenizer_config(tmp_path: Path, named: Any) -> None:
    directory = model_directory(tmp_path, chat_template=None, tokenizer_config={"chat_template": named})
    assert TextModel.load(directory).render_chat(user("hi")) == "plain"
