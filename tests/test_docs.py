"""The documents name tests that exist."""

import ast
import re

from tests.support.paths import ROOT

NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_promise_names_a_test_that_exists():
    texts = [(ROOT / "docs" / name).read_text() for name in ("promises.md", "operations.md")]
    named = [pair for text in texts for pair in NAMED.findall(text)]
    assert len(named) > 30
    assert [f"{path}::{test}" for path, test in named if test not in names_in(path)] == []
