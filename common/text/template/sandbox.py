"""The Jinja that chat templates get: Hugging Face's, in a sandbox, with all work charged to a budget.

A template is straight-line code, so its work is bounded by its loop turns, its calls, and the size of the values that
it works on. Loop turns, `~`, comparisons, slices, keys and spread arguments are charged by filters that are put
around them in the parsed template; operators, calls and output by the hooks of Jinja's sandbox.
"""

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from common.text.template.budget import (
    MAX_BITS,
    PLAIN,
    charge,
    charge_deep,
    charge_product,
    charge_shallow,
    charge_text,
    check_key,
    check_number,
    held,
    joined,
)
from common.text.template.calls import (
    CONCATENATED,
    KEY,
    SPREAD,
    TURN,
    WEIGHED,
    call_method,
    check_format,
    filters,
    tests,
)

MAX_TIME_FORMAT = 256  # characters
ODD_ITEM = 16  # units: of other objects it is tried first as an item, then as an attribute
JINJAS_OWN = ("_loop_vars", "_block_vars")  # arguments that its compiler adds to calls
Calling = TypeVar("Calling", nodes.Call, nodes.Filter, nodes.Test)


class GenerationBlock(Extension):
    """{% generation %} … {% endgeneration %} marks training text; for serving it is its body, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Charging(NodeTransformer):
    """Puts charges where Jinja's compiler has no hook."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_through(TURN, nodes.Const(None)), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_through(TURN, nodes.Const(True)), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through(CONCATENATED, nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _weighed(node.expr)
        for operand in node.ops:
            operand.expr = _weighed(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _through(SPREAD, node.node)
        else:
            node.arg = _weighed(node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = node.key if isinstance(node.key, nodes.Const) else _through(KEY, node.key)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if isinstance(node.value, int) and node.value.bit_length() > MAX_BITS:
            raise jinja2.TemplateSyntaxError(f"an integer has more than {MAX_BITS} bits", node.lineno)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        return self._spread(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        return self._spread(node)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        return self._spread(node)

    def _spread(self, node: Calling) -> Calling:
        self.generic_visit(node)
        node.dyn_args = node.dyn_args and _through(SPREAD, node.dyn_args)
        node.dyn_kwargs = node.dyn_kwargs and _through(SPREAD, node.dyn_kwargs)
        return node


def _through(name: str, node: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno or 1)


def _weighed(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _through(WEIGHED, node)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """What is rendered must be rendered inside `budget_for`."""

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

        self.filters: dict[str, Any] = filters()
        self.tests: dict[str, Any] = tests()
        functions = {"dict": dict, "namespace": Namespace, "raise_exception": _raise_exception}
        self.globals = {**functions, "range": self.globals["range"], "strftime_now": time_text}
        self._functions = frozenset(map(id, self.globals.values()))

    def template(self, source: str) -> jinja2.Template:
        """Raises what Jinja and Python raise for source that they can't compile."""
        return self.from_string(cast(nodes.Template, _Charging().visit(self.parse(source))))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """One call of anything, out of a template."""
        charge(1)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | dict | list | tuple):
            return call_method(__obj, args, {key: kwargs[key] for key in kwargs if key not in JINJAS_OWN})
        if isinstance(owner, LoopContext):  # loop.cycle, loop.changed
            charge_deep(args)
        elif id(__obj) in __self._functions:
            args = charge_deep(tuple(map(held, args)))
            if __obj is dict:
                _check_pairs(args)
        elif not isinstance(__obj, Macro | LoopContext | BlockReference | Undefined | _Format):
            raise SecurityError(f"a chat template must not call {type(__obj).__name__} objects")
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Charged by what comes out of it."""
        if operator in ("*", "**"):
            charge_product(operator, left, right)
        elif operator == "%" and isinstance(left, str):
            check_format(left)
            charge_deep((left, right))
        elif operator == "+":
            charge_shallow(left)
            charge_shallow(right)
        result = super().call_binop(context, operator, left, right)
        return charge_shallow(result) if isinstance(result, str) else check_number(result)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An item, or one of a path of attributes, which filters follow for each of their values."""
        charge(1 if type(obj) in PLAIN else ODD_ITEM)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox's own, with narrow fields only."""
        wrapped = super().wrap_str_format(value)
        return None if wrapped is None else _Format(self, value.__self__, value.__name__ == "format_map")


class _Formatter(SandboxedFormatter):
    """Widths may come out of fields, so they are checked last."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        check_format(format_spec)
        text = super().format_field(charge_deep(value), format_spec)
        charge_text(len(text))
        return text


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


def _check_pairs(args: tuple[Any, ...]) -> None:
    """What a dictionary is made of."""
    for pair in args[0] if args and not isinstance(args[0], dict) else ():
        if not isinstance(pair, tuple | list):
            raise SecurityError("a chat template must make a dictionary of pairs")
        check_key(pair[0] if pair else None)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
