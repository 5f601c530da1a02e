"""Each floor imports only those below, light parts stay light, and names, folders and generated code are in order."""

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT

# From the top down. A module stands on the floor of its longest prefix here and imports from its own prefix and from
# the floors below, never from beside.
FLOORS = (
    ("cli",),
    ("bench", "sim"),
    ("cluster",),
    ("router", "prefill_svc", "decode_svc"),
    ("router.http",),
    ("router.openai",),
    ("router.pipeline",),
    ("router.fleet",),
    ("router.config", "router.metrics"),
    ("kvtransfer", "common.worker"),
    ("common.engine",),
    ("common.compute",),
    ("common.text", "common.discovery", "common.rpc"),
    ("common.model",),
    ("common",),  # the leaves
)
# What lies on floors below and is still not to be imported.
NEVER = {
    "router": ("common.worker", "common.engine", "common.compute"),
    "prefill_svc": ("router",),
    "decode_svc": ("router",),
    "kvtransfer": ("common.engine", "common.compute"),
}
PACKAGES = ("bench", "cli", "cluster", "common", "decode_svc", "kvtransfer", "prefill_svc", "router", "sim")
WIRE = {"grpc", "grpc_health", "google"}
HEAVY = {"torch", "transformers", "numpy"}
LONGEST = 350  # lines
MOST_FILES, MOST_LEAVES = 14, 20  # __init__ not counted
SHARED_NAMES = {"config", "metrics", "service", "__main__"}  # of modules in several folders


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}
WRITTEN = {name: path for name, path in MODULES.items() if not name.startswith("common.rpc.pb")}


def lies_in(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def place_of(name: str) -> tuple[int, str]:
    """Its floor and the prefix that it has there."""
    found = [(prefix, floor) for floor, row in enumerate(FLOORS) for prefix in row if lies_in(name, [prefix])]
    prefix, floor = max(found, key=lambda one: len(one[0]))
    return floor, prefix


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
            elif imported.split(".")[0] not in PACKAGES:
                reached[imported.split(".")[0]] = name
    return reached


def folder_of(name: str) -> str:
    return ".".join(MODULES[name].relative_to(ROOT).parent.parts)


def may_import(name: str, imported: str) -> bool:
    (floor, prefix), (other_floor, other_prefix) = place_of(name), place_of(imported)
    if other_floor <= floor and other_prefix != prefix:
        return False
    return not any(lies_in(name, [above]) and lies_in(imported, below) for above, below in NEVER.items())


def test_each_floor_imports_only_those_below():
    wrong = [
        f"{name} imports {imported}"
        for name in WRITTEN
        for imported in sorted(imports_of(name) & MODULES.keys() - set(PACKAGES))
        if not may_import(name, imported)
    ]
    assert wrong == []


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The groups of more than one in which each reaches each."""

    @cache
    def reached(start: str) -> frozenset[str]:
        todo, seen = [start], set[str]()
        while todo:
            for other in edges.get(todo.pop(), set()) - seen:
                seen.add(other)
                todo.append(other)
        return frozenset(seen)

    groups = {frozenset(other for other in reached(one) if one in reached(other)) for one in edges}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def test_no_modules_import_each_other_in_a_circle():
    assert circles({name: set(imports_of(name) & WRITTEN.keys() - set(PACKAGES)) for name in WRITTEN}) == []


def test_no_folders_import_each_other_in_a_circle():
    """A folder and what lies in it count as one: a table and what fills it. Settings and metrics are no folder."""
    edges: dict[str, set[str]] = defaultdict(set)
    for name in WRITTEN:
        for imported in imports_of(name) & WRITTEN.keys():
            one, other = folder_of(name), folder_of(imported)
            if not (lies_in(one, [other]) or lies_in(other, [one])):
                edges[one].add(other)
    assert circles(edges) == []


def test_the_engine_knows_no_wire():
    reached = reached_from(name for name in MODULES if name.startswith("common.engine"))
    assert {package: by for package, by in reached.items() if package in WIRE} == {}


@pytest.mark.parametrize(
    ("names", "without"),
    [
        (["common.engine.scheduler"], {"torch", "numpy"}),
        (["common.engine.block_pool"], {"torch", "numpy"}),
        (["common.model"], {"torch"}),
        (["common.text"], {"torch"}),
        (["common.discovery"], HEAVY),
        (["router"], HEAVY),
    ],
    ids=lambda value: ",".join(sorted(value)),
)
def test_what_is_light_names_nothing_heavy(names: list[str], without: set[str]):
    reached = reached_from(name for name in MODULES if lies_in(name, names))
    assert {package: by for package, by in reached.items() if package in without} == {}


def test_the_router_loads_nothing_heavy_and_no_engine():
    """Nor does anything that it imports."""
    modules = sorted(name for name in MODULES if lies_in(name, ["router"]))
    program = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
    program += f"print(sorted(({HEAVY} | {{'common.engine', 'common.compute'}}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_checks_see_what_they_should():
    """They would pass on nothing, too."""
    assert "common.errors" in imports_of("common.settings")
    assert "torch" in reached_from(name for name in MODULES if name.startswith("prefill_svc"))
    assert "grpc" in reached_from(name for name in MODULES if name.startswith("router"))
    assert place_of("router.fleet.workers") == (7, "router.fleet")
    assert may_import("router.fleet.workers", "router.metrics")
    assert not may_import("router.fleet.workers", "router.pipeline.gate")
    assert not may_import("prefill_svc.service", "decode_svc.service")
    assert not may_import("common.errors", "common.rpc.channel")
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_no_module_is_too_long():
    lines = {name: len(path.read_text().splitlines()) for name, path in WRITTEN.items()}
    assert {name: count for name, count in lines.items() if count > LONGEST} == {}


def test_no_class_name_is_there_twice():
    places = defaultdict(list)
    for name, path in WRITTEN.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_two_modules_differ_by_their_folder_only():
    places = defaultdict(list)
    for name, path in WRITTEN.items():
        if path.stem not in SHARED_NAMES | {"__init__"}:
            places[path.stem].append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_folder_has_too_many_files():
    counts = Counter(folder_of(name) for name, path in WRITTEN.items() if path.name != "__init__.py")
    most = {folder: MOST_LEAVES if folder == "common" else MOST_FILES for folder in counts}
    assert {folder: count for folder, count in counts.items() if count > most[folder]} == {}


def test_generated_code_is_that_of_the_proto_files(tmp_path: Path):
    """As `make proto` makes it, but for the version of the generator."""
    made = ROOT / "common/rpc/pb"
    protos = sorted(path.name for path in (ROOT / "proto").glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}"]
    command += [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([*command, *protos], check=True, timeout=60)

    def without_versions(text: str) -> str:
        text = re.sub(r"^import (\w+_pb2)( as|$)", r"from common.rpc.pb import \1\2", text, flags=re.MULTILINE)
        text = re.sub(r"^# (Protobuf Python Version|NO CHECKED-IN).*\n", "", text, flags=re.MULTILINE)
        text = re.sub(r"ValidateProtobufRuntimeVersion\(.*?\)", "", text, flags=re.DOTALL)
        return re.sub(r"GRPC_GENERATED_VERSION = .*", "", text)

    fresh = {path.name: path for path in tmp_path.glob("*_pb2*") if path.name != "types_pb2_grpc.py"}
    assert {path.name for path in made.glob("*_pb2*")} == fresh.keys()
    stale = [
        n for n, path in fresh.items() if without_versions(path.read_text()) != without_versions((made / n).read_text())
    ]
    assert stale == []
