"""Every wait is one of Deadlines' fields or made of one, and each field is a wait."""

import ast
from collections.abc import Iterator
from dataclasses import fields

from common.deadlines import Deadlines
from tests.support.paths import ROOT

PACKAGES = ("common", "kvtransfer", "router", "prefill_svc", "decode_svc")
WAITS = {"sleep", "timeout", "timeout_at", "wait_for", "call_later", "wait"}
NO_WAITS = {  # constants in seconds that no process of ours waits for
    "BUILD_S": "of a compiler",
    "HANDOVER_S": "an estimate",
    "PREFLIGHT_S": "a browser's",
    "QUIET_S": "between lines of the log",
    "RETRY_AFTER_S": "told to clients",
    "SESSION_S": "the life of a secret",
    "SWITCH_S": "between threads of one process",
    "TICK_S": "how fine a clock is",
}
SOURCES = {path: path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py")}


def own_numbers(source: str) -> Iterator[str]:
    """What a call that waits is given as a number, or as a constant of its module, instead of a deadline."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            yield from (name for name in names if name.endswith("_S") and name not in NO_WAITS)
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = [keyword.value for keyword in node.keywords if keyword.arg and "timeout" in keyword.arg]
        given += node.args[:1] if name in WAITS else []
        for value in given:
            is_number = isinstance(value, ast.Constant) and type(value.value) in (int, float) and value.value != 0
            is_constant = isinstance(value, ast.Name) and value.id.isupper() and value.id not in NO_WAITS
            if is_number or is_constant:
                yield ast.unparse(node)


def test_no_wait_has_a_number_of_its_own() -> None:
    found = {str(path.relative_to(ROOT)): list(own_numbers(source)) for path, source in SOURCES.items()}
    assert {path: calls for path, calls in found.items() if calls} == {}


def test_such_numbers_are_seen() -> None:
    source = "RETRY_S = 0.1\nasync def f():\n    await asyncio.sleep(0)\n    await sleep(0.2)\n    call(timeout=LONG)\n"
    assert set(own_numbers(source)) == {"RETRY_S", "sleep(0.2)", "call(timeout=LONG)"}


def test_every_deadline_is_somebody_s() -> None:
    text = "".join(SOURCES.values())
    assert [field.name for field in fields(Deadlines) if f".{field.name}" not in text] == []


def test_all_are_scaled_together() -> None:
    one, half = Deadlines(), Deadlines().scaled(0.5)
    assert all(getattr(half, field.name) == getattr(one, field.name) / 2 for field in fields(Deadlines))
    assert half.prefill_of_s(1000) == one.prefill_of_s(1000) / 2 == (10 + 25) / 2
