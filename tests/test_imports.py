"""Imports run one way, light parts stay light, and no module grows too long."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT

MAY_IMPORT = {
    "common": {"common"},
    "kvtransfer": {"kvtransfer", "common"},
    "router": {"router", "kvtransfer", "common"},
    "prefill_svc": {"prefill_svc", "kvtransfer", "common"},
    "decode_svc": {"decode_svc", "kvtransfer", "common"},
    "bench": {"bench", "cli", "router", "prefill_svc", "decode_svc", "kvtransfer", "common"},
    "cli": {"bench", "cli", "router", "prefill_svc", "decode_svc", "kvtransfer", "common"},
}
WIRE = {"grpc", "grpc_health", "google"}
LONGEST = 350  # lines


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))}
WRITTEN = {name: path for name, path in MODULES.items() if not name.startswith("common.rpc")}


def nodes_that_run(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        yield child
        yield from nodes_that_run(child)


@cache
def imports_of(name: str) -> frozenset[str]:
    """Everything a module imports, wherever in it; of `from a import b` both a and a.b."""
    found = set()
    for node in nodes_that_run(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def packages_of(name: str) -> Iterator[str]:
    """The packages whose __init__ runs first."""
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))


def reached_from(names: Iterable[str]) -> dict[str, str]:
    """Top-level packages of others that these modules import, directly or through ours; to who does it."""
    todo, seen, reached = list(names), set(), {}
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        todo += [package for package in packages_of(name) if package in MODULES]
        for imported in imports_of(name):
            if imported in MODULES:
                todo.append(imported)
            elif imported.split(".")[0] not in MAY_IMPORT:
                reached[imported.split(".")[0]] = name
    return reached


def test_imports_run_one_way():
    wrong = {}
    for name in WRITTEN:
        ours = {imported.split(".")[0] for imported in imports_of(name)} & MAY_IMPORT.keys()
        if forbidden := ours - MAY_IMPORT[name.split(".")[0]]:
            wrong[name] = forbidden
    assert wrong == {}


def test_the_engine_knows_no_wire():
    reached = reached_from(name for name in MODULES if name.startswith("common.engine"))
    assert {package: by for package, by in reached.items() if package in WIRE} == {}


@pytest.mark.parametrize("name", ["common.engine.scheduler", "common.engine.block_pool"])
def test_policy_is_free_of_torch(name):
    reached = reached_from([name])
    assert {package: by for package, by in reached.items() if package in ("torch", "numpy")} == {}


def test_the_router_names_neither_torch_nor_transformers():
    reached = reached_from(name for name in MODULES if name.split(".")[0] == "router")
    assert {package: by for package, by in reached.items() if package in ("torch", "transformers", "numpy")} == {}


def test_the_router_loads_neither_torch_nor_transformers():
    """Nor does anything that it imports."""
    modules = sorted(name for name in MODULES if name.split(".")[0] == "router")
    program = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
    program += "print(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_checks_see_what_they_should():
    """They would pass on nothing, too."""
    assert "common.errors" in imports_of("common.settings")
    assert "torch" in reached_from(name for name in MODULES if name.startswith("prefill_svc"))
    assert "grpc" in reached_from(name for name in MODULES if name.startswith("router"))


def test_no_module_is_too_long():
    lines = {name: len(path.read_text().splitlines()) for name, path in WRITTEN.items()}
    assert {name: count for name, count in lines.items() if count > LONGEST} == {}
