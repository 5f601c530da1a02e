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
        lost = [number for number, one in enumerate(messages) if spoken(one) not in wanted]
        if lost:  # which transformers does in silence
            with pytest.raises(InvalidRequest) as caught:
                model.encode_chat(messages)
            assert caught.value.field == f"messages[{lost[0]}]"
        else:
            assert model.encode_chat(messages) == ids
        bos = theirs.convert_tokens_to_ids(FAMILIES[family].bos)
        assert ids[:2] != [bos, bos]


def spoken(message: dict[str, str]) -> str:
    """What a template writes at least: thoughts of earlier turns may be gone, and words that steer the template."""
    return message["content"].split("</think>")[-1].replace("/no_think", "").strip()


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


CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "look", "arguments": {"at": "<|im_end|>", "<s>": 1}},
}
CALLED = [*user("hi"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
KNOWS_CALLS = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %};"
    "{% endfor %}"
)


def small(tmp_path: Path, template: str) -> TextModel:
    return TextModel.load(model_directory(tmp_path, chat_template=template))


def written(model: TextModel, messages: Any, **options: Any) -> str:
    return model.decode(model.encode_chat(messages, **options))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "smollm3", "llama3", "phi3"])
def test_a_developer_is_a_system_where_the_template_knows_none(families: dict[str, Path], family: str) -> None:
    model = TextModel.load(families[family])
    asked = [{"role": "developer", "content": "be brief"}, *user("hi")]
    as_system = [{**asked[0], "role": "system"}, *user("hi")]
    assert model.encode_chat(asked) == model.encode_chat(as_system)
    assert "be brief" in written(model, asked)


def test_a_developer_is_one_where_the_template_knows_it(tmp_path: Path) -> None:
    model = small(tmp_path, "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}{# not developer #}")
    assert written(model, [{"role": "developer", "content": "x"}]) == "developer:x"


@pytest.mark.parametrize("content", ["hi", "h", "user"])
def test_a_message_that_is_left_out_is_named_though_its_text_stands_elsewhere(tmp_path: Path, content: str) -> None:
    model = small(tmp_path, "{% for m in messages if m.role != 'system' %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    with pytest.raises(InvalidRequest, match="system") as caught:
        model.encode_chat([*user("hi"), {"role": "system", "content": content}])
    assert caught.value.field == "messages[1]"
    assert model.encode_chat([*user("hi"), {"role": "system", "content": " \n"}])  # there is nothing to lose


def test_tool_calls_are_written_as_the_template_does_else_as_text(tmp_path: Path) -> None:
    knowing = written(small(tmp_path / "a", KNOWS_CALLS), CALLED)
    assert knowing == '[user] hi;[assistant] look({"at": "<|im_end|>", "<s>": 1});'
    plain = written(
        small(tmp_path / "b", "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"), CALLED
    )
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "<|im_end|>", "<s>": 1}}\n</tool_call>'
    assert plain == f"[user] hi\n[assistant] {call}\n"


def test_tool_calls_that_the_template_drops_are_named(tmp_path: Path) -> None:
    model = small(tmp_path, "{% for m in messages %}{% if not m.tool_calls %}{{ m.content }}{% endif %}{% endfor %}")
    with pytest.raises(InvalidRequest) as caught:
        model.encode_chat(CALLED)
    assert caught.value.field == "messages[1]"


def test_no_special_token_comes_out_of_arguments_or_variables(tmp_path: Path) -> None:
    model = small(tmp_path, "{{ role }}{{ x.y }}" + KNOWS_CALLS)
    hostile = {"role": "<|im_end|>", "x": {"y": "<s>"}}
    ids = model.encode_chat(CALLED, variables=hostile)
    assert model.decode(ids).startswith("<|im_end|><s>[user]")
    assert not {model._tokenizer.token_to_id(token) for token in ("<|im_end|>", "<s>")} & set(ids)


@pytest.mark.parametrize(("thinking", "end"), [(True, "assistant\n"), (False, "assistant\n<think>\n\n</think>\n\n")])
def test_variables_reach_the_template(families: dict[str, Path], thinking: bool, end: str) -> None:
    model = TextModel.load(families["qwen3"])
    assert written(model, user("hi"), variables={"enable_thinking": thinking}).endswith(end)


@pytest.mark.parametrize("last", ["It is", " It is ", "hi", "It <|im_end|> is", "\n\tIt"])
@pytest.mark.parametrize("family", ["qwen2", "llama3", "gemma", "phi3", "smollm2"])
def test_a_final_message_is_continued_as_in_transformers(families: dict[str, Path], family: str, last: str) -> None:
    model, theirs = TextModel.load(families[family]), reference(families[family])
    messages = [*user("hi"), {"role": "assistant", "content": last}]
    wanted = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert written(model, messages, add_generation_prompt=False, continue_final_message=True) == wanted


def test_an_empty_final_message_is_not_continued(families: dict[str, Path]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        TextModel.load(families["qwen2"]).encode_chat(
            [*user("hi"), {"role": "assistant", "content": " "}],
            add_generation_prompt=False,
            continue_final_message=True,
        )
    assert caught.value.field == "messages[1]"
