"""The Jinja that chat templates get: Hugging Face's, in a sandbox, and with all work charged to a budget.

A template runs straight-line code, so its work is bounded by its loop turns, its calls and the size of the values that
it works on. Loop turns, `~`, comparisons, slices and keys are charged by functions that are put around them in
the parsed template; operators, calls and output by the hooks of Jinja's sandbox. Filters, functions and methods are
those that are known here, each with its cost: what is not known is refused.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import wraps
from types import BuiltinMethodType
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from router.template_budget import (
    charge,
    charge_deep,
    charge_product,
    charge_shallow,
    charge_text,
    counted,
    joined,
    narrow,
    step,
)

# By what a filter works on: nothing but its value as a whole, the value's items, or all that is in them.
CONSTANT = ("attr", "count", "d", "default", "first", "items", "last", "length", "safe")
SHALLOW = ("list", "map", "reject", "rejectattr", "reverse", "select", "selectattr")
DEEP = (
    *("abs", "capitalize", "dictsort", "e", "escape", "float", "groupby", "int", "lower", "max", "min", "sort"),
    *("string", "title", "trim", "truncate", "unique", "upper", "wordcount"),
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
WIDE = re.compile(r"\d{4}|\*")  # in a format: a number above MAX_PADDING, or one that comes with the values
MAX_TIME_FORMAT = 256  # characters


class GenerationBlock(Extension):
    """{% generation %} … {% endgeneration %} marks training text; for serving it is its body, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Charging(NodeTransformer):
    """Puts charges where Jinja's compiler would call nothing that could."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        turn = nodes.ExprStmt(_filtered(nodes.Const(None), "a turn"), lineno=node.lineno)
        node.body.insert(0, turn)
        if node.test is not None:
            node.test = nodes.And(_filtered(nodes.Const(True), "a turn"), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "a concatenation")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _weighed(node.expr)
        for operand in node.ops:
            operand.expr = _weighed(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, "a slice")
        else:
            node.arg = _weighed(node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _weighed(node.key)
        return node


def _filtered(node: nodes.Expr, name: str) -> nodes.Expr:
    """The names have spaces: no template can write them."""
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno or 1)


def _weighed(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filtered(node, "all of a value")


class _Formatter(SandboxedFormatter):
    """Of str.format; widths may come out of fields."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        _check_format(format_spec)
        text = super().format_field(charge_deep(value), format_spec)
        charge_text(len(text))
        return text


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Every rendering must be inside `budget_for`."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    concat = staticmethod(joined)

    def __init__(self, strftime_now: Callable[[str], str]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationBlock],
            optimized=False,  # nothing runs before it is asked for
            finalize=_finalize,
        )

        def time_text(pattern: str) -> str:
            if len(pattern) > MAX_TIME_FORMAT:
                raise SecurityError("the format of strftime_now is too long")
            return strftime_now(pattern)

        self.filters = _filters()
        self.tests = {name: _charged(test, charge_deep) for name, test in self.tests.items()}
        self.globals = {
            "range": self.globals["range"],
            "dict": dict,
            "namespace": Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": time_text,
        }
        self._functions = frozenset(map(id, self.globals.values()))

    def template(self, source: str) -> jinja2.Template:
        """Raises what Jinja and Python raise for source that they can't compile."""
        return self.from_string(cast(nodes.Template, _Charging().visit(self.parse(source))))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        """One call of anything, out of a template."""
        charge(1)
        if isinstance(__obj, BuiltinMethodType):
            return _call_method(__obj, args, kwargs)
        known = isinstance(__obj, (Macro, LoopContext, BlockReference, Undefined, _Format))
        if not known and not isinstance(getattr(__obj, "__self__", None), LoopContext):
            if id(__obj) not in __self._functions:
                raise SecurityError(f"a chat template must not call {type(__obj).__name__} objects")
            for value in (*args, *kwargs.values()):
                charge_shallow(value)
            args = tuple(map(counted, args))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Charged by what comes out of it."""
        if operator in ("*", "**"):
            charge_product(operator, left, right)
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
            charge_deep((left, right))
        elif operator == "+":
            charge_shallow(left)
            charge_shallow(right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox's own, with narrow fields only."""
        wrapped = super().wrap_str_format(value)
        return None if wrapped is None else _Format(self, value.__self__, value.__name__ == "format_map")


class _Format:
    """A text's method format or format_map."""

    def __init__(self, environment: TemplateEnvironment, text: str, takes_mapping: bool) -> None:
        self._formatter = _Formatter(environment)
        self._text = text
        self._takes_mapping = takes_mapping

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        charge_text(len(self._text))
        if self._takes_mapping:
            (kwargs,), args = args, ()
        return self._formatter.vformat(self._text, args, kwargs)


@jinja2.pass_context  # so that Jinja doesn't run it while it compiles
def _finalize(_: Context, value: Any) -> Any:
    """Before a value is written out as text; `joined` counts texts."""
    return value if isinstance(value, str) else charge_deep(value)


def _call_method(method: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Of a text or a container."""
    owner, name = method.__self__, method.__name__
    if name not in METHODS.get(type(owner), ()) and not (isinstance(owner, str) and name in STR_METHODS):
        raise SecurityError(f"a chat template must not call {type(owner).__name__}.{name}")
    if isinstance(owner, str) or name in ("count", "index"):
        charge_deep(owner)
    elif name == "copy":
        charge_shallow(owner)
    charge_deep(args)
    if name == "join":
        return _join(args[0], owner) if args else method(*args, **kwargs)
    if name == "replace" and len(args) >= 2:
        _charge_replace(owner, *args[:2])
    return method(*args, **kwargs)


def _charge_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        charge_text(text.count(old) * len(new))


def _join(values: Any, separator: str) -> str:
    pieces = list(counted(values))
    charge_deep(pieces)
    charge_text(len(pieces) * len(separator))
    return separator.join(pieces)


def _check_format(pattern: str) -> None:
    if WIDE.search(pattern):
        raise SecurityError("a chat template must not format to such a width")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML, which models have not seen in training."""
    narrow(len(indent) if isinstance(indent, str) else indent, "an indent")
    for separator in separators or ():
        narrow(len(separator), "a separator")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@jinja2.pass_eval_context
def _replace(context: nodes.EvalContext, s: str, old: str, new: str, count: int | None = None) -> str:
    _charge_replace(str(s), str(old), str(new))
    return cast(str, FILTERS["replace"](context, s, old, new, count))


@jinja2.pass_eval_context
def _join_filter(context: nodes.EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    pieces = list(value)
    charge_deep(pieces)
    charge_text(len(pieces) * len(str(d)))
    return cast(str, FILTERS["join"](context, pieces, d, attribute))


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    narrow(len(width) if isinstance(width, str) else width, "an indent")
    charge_text(len(s.splitlines()) * (len(width) if isinstance(width, str) else width))
    return cast(str, FILTERS["indent"](s, width, first, blank))


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    narrow(precision, "a precision")
    return cast(float, FILTERS["round"](value, precision, method))


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    _check_format(value)
    return cast(str, FILTERS["format"](value, *args, **kwargs))


def _charged(function: Callable[..., Any], charge_value: Callable[[Any], Any]) -> Callable[..., Any]:
    """A filter or test that charges for what it is given and, where it is a text, for what it gives."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # context or environment comes first

    @wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        charge(1)
        given = list(args)
        if len(given) > skipped:
            charge_value(given[skipped])
            given[skipped] = counted(given[skipped])
        for value in (*given[skipped + 1 :], *kwargs.values()):
            charge_deep(value)
        result = function(*given, **kwargs)
        if isinstance(result, str):
            charge_text(len(result))
        return result

    return charged


def _filters() -> dict[str, Callable[..., Any]]:
    own = {"format": _format, "indent": _indent, "join": _join_filter, "replace": _replace, "round": _round}
    own["tojson"] = _tojson
    filters = {name: _charged(FILTERS[name], step) for name in CONSTANT}
    filters |= {name: _charged(FILTERS[name], charge_shallow) for name in SHALLOW}
    filters |= {name: _charged(FILTERS[name], charge_deep) for name in DEEP}
    filters |= {name: _charged(function, charge_deep) for name, function in own.items()}
    filters |= {
        "a turn": step,
        "all of a value": charge_deep,
        "a slice": charge_shallow,
        "a concatenation": lambda values: joined(map(str, charge_deep(values))),
    }
    return filters
