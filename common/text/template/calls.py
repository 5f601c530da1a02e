"""What a chat template may call, each with its cost: filters, tests, and methods of texts and containers."""

import json
import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.tests import TESTS
from markupsafe import soft_str

from common.text.template.budget import (
    charge,
    charge_deep,
    charge_indents,
    charge_shallow,
    charge_sorted,
    charge_text,
    charge_times,
    check_key,
    check_number,
    counted,
    held,
    joined,
    narrow,
    step,
)
from common.text.template.text_methods import linear

# By what a filter works on: its value as a whole, the value's items, or all that is in them.
CONSTANT = ("attr", "count", "d", "default", "first", "items", "last", "length", "safe")
SHALLOW = ("list", "map", "reject", "rejectattr", "reverse", "select", "selectattr")
DEEP = (*("abs", "capitalize", "e", "escape", "float", "lower", "max", "min", "string", "truncate", "upper"),)
CONSTANT_TESTS = (
    *("boolean", "callable", "defined", "divisibleby", "even", "false", "filter", "float", "integer", "iterable"),
    *("mapping", "none", "number", "odd", "sameas", "sequence", "string", "test", "true", "undefined"),
)
STR_METHODS = frozenset(
    (
        *("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii"),
        *("isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isspace", "istitle", "isupper", "join"),
        *("lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition"),
        *("rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper"),
    )
)
METHODS: dict[type, frozenset[str]] = {
    str: STR_METHODS,
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
}
MAX_INDENT = 16  # characters a level
WIDE = re.compile(r"\d{4}|\*")  # in a format: a number above MAX_PADDING, or one that comes with the values
SORTED = ("dictsort", "groupby", "sort")
WORDS = ("title", "wordcount")  # what takes a text apart costs several times a pass
WORD_PASSES, SORT_PASSES = 4, 16
TURN, WEIGHED, SPREAD, CONCATENATED = "one turn", "all of a value", "items of a value", "a concatenation"
KEY = "a key"


def call_method(method: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Of a text or a container."""
    owner, name = method.__self__, method.__name__
    kind = str if isinstance(owner, str) else type(owner)
    if name not in METHODS.get(kind, ()):
        raise SecurityError(f"a chat template must not call {kind.__name__}.{name}")
    if kind is str or name in ("count", "index"):
        charge_deep(owner)
    elif name == "copy":
        charge_shallow(owner)
    if name == "join" and args:
        args = (_pieces(args[0], owner), *args[1:])
    charge_deep((args, kwargs))
    if name == "replace" and len(args) >= 2:
        _charge_replace(owner, *args[:2])
    return linear(method)(*args, **kwargs) if kind is str else method(*args, **kwargs)


def _pieces(values: Any, separator: str) -> list[Any]:
    """What is to be joined, paid for."""
    pieces = list(charge_shallow(values))
    charge_deep(pieces)
    charge_text(len(pieces) * len(separator))
    return pieces


def _charge_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        charge_text(text.count(old) * len(new))


def check_format(pattern: str) -> None:
    if WIDE.search(pattern):
        raise SecurityError("a chat template must not format to such a width")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML, which models have not seen in training."""
    size = len(indent) if isinstance(indent, str) else indent or 0
    if max(size, *map(len, separators or ("", ""))) > MAX_INDENT:
        raise SecurityError(
            f"a chat template must not ask for JSON with more than {MAX_INDENT} characters between items"
        )
    charge_indents(value, size)
    if sort_keys:
        charge_times(value, SORT_PASSES)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@jinja2.pass_eval_context
def _replace(context: nodes.EvalContext, s: str, old: str, new: str, count: int | None = None) -> str:
    _charge_replace(str(s), str(old), str(new))
    return cast(str, FILTERS["replace"](context, s, old, new, count))


@jinja2.pass_eval_context
def _join_filter(context: nodes.EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    return cast(str, FILTERS["join"](context, _pieces(value, str(d)), d, attribute))


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    narrow(len(width) if isinstance(width, str) else width, "an indent")
    charge_text(len(s.splitlines()) * (len(width) if isinstance(width, str) else width))
    return cast(str, FILTERS["indent"](s, width, first, blank))


@jinja2.pass_environment
def _sum(environment: jinja2.Environment, iterable: Any, attribute: str | int | None = None, start: float = 0) -> Any:
    if not isinstance(start, int | float):
        raise SecurityError("a chat template must sum up numbers only")
    return FILTERS["sum"](environment, iterable, attribute, start)


@jinja2.pass_environment
def _unique(
    environment: jinja2.Environment, value: Any, case_sensitive: bool = False, attribute: str | int | None = None
) -> Any:
    key = make_attrgetter(environment, attribute)
    for item in value:
        check_key(key(item))
    return FILTERS["unique"](environment, value, case_sensitive, attribute)


def _trim(value: str, chars: str | None = None) -> str:
    return cast(str, linear(soft_str(value).strip)(chars))


def _int(value: Any, default: int = 0, base: int = 10) -> int:
    return check_number(cast(int, FILTERS["int"](value, default, base)))


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    narrow(precision, "a precision")
    return cast(float, FILTERS["round"](value, precision, method))


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    check_format(value)
    return cast(str, FILTERS["format"](value, *args, **kwargs))


def _charged(function: Any, charge_value: Callable[[Any], Any]) -> Callable[..., Any]:
    """A filter or test that charges for what it is given and, where it is a text, for what it gives."""
    take = counted if charge_value in (charge_shallow, step) else held  # what looks into items needs them all
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # context or environment comes first

    @wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        charge(1)
        if len(args) > skipped:
            value = charge_value(take(args[skipped]))
            args = (*args[:skipped], value, *args[skipped + 1 :])
        if len(args) > skipped + 1 or kwargs:
            charge_deep((args[skipped + 1 :], kwargs))
        result = function(*args, **kwargs)
        if isinstance(result, str):
            charge_text(len(result))
        return result

    return charged


def filters() -> dict[str, Callable[..., Any]]:
    """By name. Those that templates can't name, for their spaces, are called by what the sandbox adds to templates."""
    own = {"format": _format, "indent": _indent, "join": _join_filter, "replace": _replace, "round": _round}
    own |= {"sum": _sum, "tojson": _tojson, "trim": _trim, "int": _int, "unique": _unique}
    known = {name: _charged(FILTERS[name], step) for name in CONSTANT}
    known |= {name: _charged(FILTERS[name], charge_shallow) for name in SHALLOW}
    known |= {name: _charged(FILTERS[name], charge_deep) for name in DEEP}
    known |= {name: _charged(FILTERS[name], charge_sorted) for name in SORTED}
    known |= {name: _charged(FILTERS[name], lambda value: charge_times(value, WORD_PASSES)) for name in WORDS}
    known |= {name: _charged(function, charge_deep) for name, function in own.items()}
    return known | {
        KEY: lambda value: check_key(charge_deep(value)),
        TURN: step,
        WEIGHED: lambda value: counted(charge_deep(value)),
        SPREAD: lambda value: counted(charge_shallow(value)),
        CONCATENATED: lambda values: joined(str(value) for value in charge_deep(values)),
    }


def tests() -> dict[str, Callable[..., Any]]:
    """By name."""
    known: dict[str, Any] = TESTS
    return {name: _charged(test, step if name in CONSTANT_TESTS else charge_deep) for name, test in known.items()}
