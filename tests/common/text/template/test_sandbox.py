"""Proves that no chat template takes the router's time, memory or secrets, and that honest ones have enough of all."""

from contextlib import suppress
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from common.errors import InvalidRequest, ModelError
from common.text.template.budget import BASE, PER_UNIT_OF_INPUT, TooMuchWork, budget_for, charge
from common.text.template.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate
from tests.support.chat_templates import FAMILIES
from tests.support.hostile_templates import NOTHING, REFUSED, TOO_MUCH

MESSAGES = [{"role": "user", "content": "hello " * 10}] * 3


def a_template(source: str, name: str = "chat_template.jinja") -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, lambda: datetime(2024, 2, 29), name)


def render(source: str, messages: list[dict[str, Any]] | None = None) -> str:
    return a_template(source).render(messages or MESSAGES)


@pytest.mark.parametrize("source", TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_too_much_work_is_stopped_and_is_the_models_fault(source: str) -> None:
    template = a_template(source)
    with pytest.raises(ModelError, match=r"^chat_template\.jinja was stopped: .") as caught:
        template.render(MESSAGES)
    assert caught.value.http_status == 500
    with pytest.raises(ModelError):  # as often as it is tried
        template.render(MESSAGES)


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED.keys())
def test_what_no_template_needs_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match="the chat template refuses these messages"):
        render(source)


@pytest.mark.parametrize("source", NOTHING.values(), ids=NOTHING.keys())
def test_secrets_read_as_nothing(source: str) -> None:
    assert render(source) == ""


@pytest.mark.parametrize("name", ["center", "batch", "slice", "wordwrap", "urlize", "pprint", "xmlattr", "random"])
def test_filters_without_a_known_cost_do_not_exist(name: str) -> None:
    with pytest.raises(ModelError, match=f"line 1: No filter named '{name}'"):
        a_template(f"{{{{ 'a' | {name} }}}}")


@pytest.mark.parametrize("name", ["lipsum", "cycler", "joiner", "open", "self", "environment", "context"])
def test_other_globals_do_not_exist(name: str) -> None:
    with pytest.raises(InvalidRequest):
        render(f"{{{{ {name}(1, 2) }}}}")


@pytest.mark.parametrize(
    "source",
    [
        "(" * 5000 + "1" + ")" * 5000,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% for x in y %}" * 30 + "{% endfor %}" * 30,
        "{% if x %}" * 500 + "{% endif %}" * 500,
        "{{ " + "not " * 5000 + "x }}",
    ],
    ids=["text", "brackets", "loops", "conditions", "operators"],
)
def test_source_that_python_cannot_compile_is_one_error(source: str) -> None:
    """Some of these are fine; none raises anything else."""
    with suppress(ModelError):
        assert isinstance(a_template(source).render(MESSAGES), str)


def test_a_huge_source_is_refused() -> None:
    a_template("x" * MAX_TEMPLATE_CHARS)
    with pytest.raises(ModelError, match="characters"):
        a_template("x" * (MAX_TEMPLATE_CHARS + 1))


@pytest.mark.parametrize("length", [1, 100, 1000])
@pytest.mark.parametrize("family", FAMILIES)
def test_honest_templates_have_enough_for_any_conversation(family: str, length: int) -> None:
    """Long ones of short messages are the hardest: there is least text a step."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>x</think>b"}] * length
    template = ChatTemplate(FAMILIES[family].template, {"bos_token": "<s>", "eos_token": ""}, datetime.now)
    assert template.render(messages[:-1]).count("a") >= length


def test_a_long_text_is_rendered_whole() -> None:
    text = "word " * 1_000_000
    assert (
        render(FAMILIES["llama2"].template, [{"role": "user", "content": text}]) == f"<s>[INST] {text.strip()} [/INST]"
    )


@pytest.mark.parametrize(
    ("messages", "units"), [([], 1), ([{"content": "x" * 400}], 1 + 1 + (1 + 1) + (1 + 100)), ([[], [[]]], 4)]
)
def test_the_budget_grows_with_the_conversation(messages: list[Any], units: int) -> None:
    """A unit for each thing in it, and one for each four characters."""
    with budget_for(messages):
        charge(BASE + PER_UNIT_OF_INPUT * units)
        with pytest.raises(TooMuchWork):
            charge(1)


USES = (
    "{{ m.content.split(x) | join('-') }}",
    "{{ m.content | replace(x, 'yy') }}",
    "{{ m.content.replace(x, 'yy') }}",
    "{{ x.join([m.content, 'b', x]) }}",
    "{{ [m.content, x] | join(', ') }}",
    "{{ m.content[1:3] ~ x ~ 1 ~ none }}",
    "{{ '%s|%5s' % (x, m.content) }}",
    "{{ '{}{:>4}{a[0]}'.format(x, 1, a=[2]) }}",
    "{{ '%s' | format(x) }}",
    "{{ x * 3 + m.content }}",
    "{{ 2 ** 10 // 3 % 5 - 1.5 }}",
    "{{ m | tojson(indent=2) }}",
    "{{ m.content | indent(2) }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ messages | map(attribute='role') | unique | list }}",
    "{{ messages | rejectattr('role', 'in', ['tool']) | map('upper') | first | length }}",
    "{{ [3, 1, 2] | sort | sum }}",
    "{{ dict(a=1, b=x) | dictsort }}",
    "{% for k, v in m.items() %}{{ k }}={{ v }};{% endfor %}",
    "{{ m.get('none', x) }}",
    "{% for y in [1, 2, 3] if y != 2 %}{{ loop.last }}{{ loop.length }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{% for y in [[1], [2, [3]]] recursive %}{{ loop(y) if y is sequence else y }}{% endfor %}",
    "{{ range(3) | list }}",
    "{% macro f(a, b='z') %}<{{ a }}{{ b }}{{ varargs }}{{ kwargs }}>{% endmacro %}{{ f(*[1, 2, 3], **{'c': 4}) }}",
    "{% set ns = namespace(a=[]) %}{% for y in m.content %}{% set ns.a = ns.a + [y] %}{% endfor %}{{ ns.a[-2:] }}",
    "{% call(z) mac(x) %}[{{ z }}]{% endcall %}",
    "{% filter upper %}{{ m.content }}{% endfilter %}",
    "{{ m.missing }}",
    "{% set b %}{{ x }}{{ m.content }}{% endset %}{{ b | trim }}",
    "{{ x in m.content }}{{ 'role' in m }}{{ 1 < 2 < 3 }}",
    "{{ m.content | safe }}{{ (m.content | e).strip() }}",
    "{{ {x: 1}[x] }}{{ {1: 3, 1.5: 4} }}",
    "{{ 3.7 | round | int }}",
    "{% block b %}{{ x }}{% endblock %}{{ self.b() }}",
    "{{ messages | groupby('role') | first | first }}",
    "{{ ns is defined }}",
    "{% generation %}{% set x = 'inner' %}{{ x }}{% endgeneration %}{{ x }}",
    "{{ m.content | truncate(4) }}{{ -1 | abs }}",
    "{% for y in messages %}{% if loop.first %}{% continue %}{% endif %}{{ loop.changed(y) }}{% break %}{% endfor %}",
    "{% for y in messages %}{{ loop.previtem is defined }}{{ (loop.nextitem or y).role }}{% endfor %}",
)
MACRO = "{% macro mac(a) %}{{ caller(a) }}{% endmacro %}"


@pytest.mark.parametrize("use", USES)
@settings(max_examples=20, deadline=None)
@given(content=st.text("ab <>&{}%\n", max_size=12), x=st.text("ab-<", min_size=1, max_size=3))
def test_all_else_means_what_it_means_in_transformers(use: str, content: str, x: str) -> None:
    loop = use if "block" in use else f"{{% for m in messages %}}{use}{{% endfor %}}"
    source = f"{MACRO}{{% set x = {x!r} %}}{loop}"
    messages = [{"role": "user", "content": content}, {"role": "tool", "content": x}]
    (wanted,), _ = render_jinja_template([messages], chat_template=source)
    assert render(source, messages) == wanted
