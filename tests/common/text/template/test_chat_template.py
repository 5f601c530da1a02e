"""Chat templates render as transformers renders them; what they refuse is the client's error."""

import re
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest
import transformers.utils.chat_template_utils
from transformers import PreTrainedTokenizerFast

from common.errors import InvalidRequest
from common.text.text_model import TextModel
from tests.support.chat_templates import FAMILIES
from tests.support.tiny_text import (
    BARE,
    CHATML,
    CONVERSATIONS,
    SYSTEM,
    TRIMMED,
    USER,
    byte_level,
    model_directory,
    special_token,
    user,
)

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


def say(*turns: str) -> list[dict[str, str]]:
    """`u: hello` is a user's turn."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn[3:]} for turn in turns]


DIALOGUES = {
    "one turn": say("u: hi"),
    "system first": say("s: be brief ", "u:  hi\n"),
    "system alone": say("s: be brief"),
    "system later": say("u: hi", "s: be brief"),
    "long": say("s: /no_think be brief", "u: hi", "a: <think>\nhm\n</think>\n\nhello", "u: and?", "a:  well "),
    "with a tool": say("u: hi", "a: I look", "t: [1, 2]", "t: 3", "u: thanks"),
    "twice the user": say("u: hi", "u: there"),
    "assistant first": say("a: hi", "u: there"),
    "empty": say("u: "),
    "letters": say('u: Über 東京 \N{GRINNING FACE} & <b> "quoted" \\n {{ x }} {% if %}'),
    "spaces": say("s: \n ", "u: \t a  b \n\n"),
}


class Today(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> "Today":
        return cls(2024, 2, 29)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory of each, whose tokenizer puts a BOS before a plain prompt."""
    directories = {}
    for name, family in FAMILIES.items():
        tokenizer = byte_level(bos=True)
        tokens = (family.bos, family.eos, *family.special)
        tokenizer.add_special_tokens([special_token(token) for token in tokens])
        directories[name] = model_directory(
            tmp_path_factory.mktemp(name),
            tokenizer=tokenizer,
            chat_template=family.template,
            tokenizer_config={"bos_token": family.bos, "eos_token": family.eos},
        )
    return directories


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("dialogue", DIALOGUES)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_renders_or_refuses_as_in_transformers(
    families: dict[str, Path], family: str, dialogue: str, prompted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", Today)
    model = TextModel.load(families[family], now=Today.now)
    theirs, messages = reference(families[family]), DIALOGUES[dialogue]
    try:
        wanted = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompted)
    except jinja2.TemplateError as error:
        with pytest.raises(InvalidRequest, match=re.escape(str(error))):
            model.render_chat(messages, prompted)
        return
    assert model.render_chat(messages, prompted) == wanted
    if prompted:
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert model.encode_chat(messages) == ids
        bos = theirs.convert_tokens_to_ids(FAMILIES[family].bos)
        assert ids[:2] != [bos, bos]


def test_the_families_refuse_what_they_should(families: dict[str, Path]) -> None:
    """Else the test above would compare nothing."""
    refused = {
        (family, dialogue)
        for family, directory in families.items()
        for dialogue, messages in DIALOGUES.items()
        if refuses(TextModel.load(directory), messages)
    }
    alternating = {"llama2", "mistral", "gemma", "gemma3"}
    assert {family for family, dialogue in refused if dialogue == "twice the user"} == alternating
    assert {family for family, dialogue in refused if dialogue == "system first"} == {"gemma"}
    assert {family for family, _ in refused} == alternating


def refuses(model: TextModel, messages: list[dict[str, str]]) -> bool:
    try:
        model.render_chat(messages)
    except InvalidRequest:
        return True
    return False
