"""A model on the hub is fetched once, only the files that are read; offline, missing, private and gated ones end in one
line. The hub is a small one of our own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.model.hub import is_hub_name
from tests.support.fake_hub import Hub

pytestmark = pytest.mark.slow

TEXT = {"config.json": b"{}", "tokenizer.json": b"[1]", "tokenizer_config.json": b"{ }", "chat_template.jinja": b"x"}
FILES = TEXT | {
    "model.safetensors": b"weights",
    "README.md": b"# no",
    "modeling_evil.py": b"import os",
    "pytorch_model.bin": b"pickle",
    "original/model.safetensors": b"again",
    "small.Q4_0.gguf": b"GGUF",
    "Q8/x-00001-of-00002.gguf": b"GGUF first",
    "Q8/x-00002-of-00002.gguf": b"GGUF second",
}
PROGRAM = """
import sys
from common.errors import ModelError
from common.model.hub import fetch_from_hub
name, revision, weights = sys.argv[1:]
try:
    path = fetch_from_hub(name, revision or None, weights=weights == "1")
    files = sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())
    print(path if path.is_file() else " ".join(files))
except ModelError as error:
    print("error:", error.field, error)
assert "torch" not in sys.modules
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub(FILES)
    yield hub
    hub.close()


def ask(
    home: Path, endpoint: str, name: str = "owner/name", revision: str = "", weights: bool = True, **env: str
) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    clean |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1", **env}
    command = [sys.executable, "-c", PROGRAM, name, revision, str(int(weights))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return done.stdout.strip()


def test_only_what_is_read_is_fetched(hub: Hub, tmp_path: Path):
    assert ask(tmp_path, hub.address, weights=False).split() == sorted(TEXT)
    assert set(hub.fetched) == set(TEXT)
    assert ask(tmp_path, hub.address, revision="v1").split() == sorted([*TEXT, "model.safetensors"])
    assert set(hub.fetched) == {*TEXT, "model.safetensors"}


def test_all_files_of_a_split_model_are_fetched(hub: Hub, tmp_path: Path):
    first = Path(ask(tmp_path, hub.address, "owner/name/Q8/x-00001-of-00002.gguf"))
    assert (first.read_bytes(), first.with_name("x-00002-of-00002.gguf").read_bytes()) == (
        b"GGUF first", b"GGUF second",
    )  # fmt: skip


def test_what_is_cached_needs_no_hub(hub: Hub, tmp_path: Path):
    online = ask(tmp_path, hub.address)
    fetched = list(hub.fetched)
    assert ask(tmp_path, hub.address, HF_HUB_OFFLINE="1") == online
    assert ask(tmp_path, "http://127.0.0.1:9") == online
    assert hub.fetched == fetched


def test_a_gguf_is_named_with_its_repository(hub: Hub, tmp_path: Path):
    path = Path(ask(tmp_path, hub.address, "owner/name/small.Q4_0.gguf"))
    assert path.read_bytes() == b"GGUF"
    assert hub.fetched == ["small.Q4_0.gguf"]
    answer = ask(tmp_path, hub.address, "owner/name/large.gguf")
    assert answer == "error: model owner/name/large.gguf is not on the hub: it has no such file"


@pytest.mark.parametrize(
    ("name", "revision", "env", "answer"),
    [
        ("owner/name", "", {"HF_HUB_OFFLINE": "1"}, "owner/name is not here, not in the hub's cache"),
        ("owner/name", "v1", {"HF_HUB_OFFLINE": "1"}, "owner/name at revision v1 is not here"),
        ("owner/name", "", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "and the hub can't be reached"),
        ("owner/name/a.gguf", "", {"HF_HUB_OFFLINE": "1"}, "owner/name/a.gguf is not here"),
        ("owner/secret", "", {}, "owner/secret is neither here nor on the hub; if it is private"),
        ("gated/name", "", {}, "gated/name needs its terms accepted on the hub"),
        ("owner/name", "v2", {}, "revision owner/name has no revision v2"),
    ],
)
def test_what_cannot_be_had_is_one_line(
    name: str, revision: str, env: dict[str, str], answer: str, hub: Hub, tmp_path: Path
):
    said = ask(tmp_path, hub.address, name, revision, **env)
    assert said.startswith("error: ")
    assert answer in said
    assert hub.fetched == []


@pytest.mark.parametrize(
    ("name", "ok"),
    [
        ("owner/name", True),
        ("HuggingFaceTB/SmolLM2-135M.Instruct_x", True),
        ("owner/name/file.Q4_K.gguf", True),
        ("owner/name/Q4_K/file-00001-of-00002.gguf", True),
        ("owner/name/./file.gguf", False),
        ("owner/name/.gguf", False),
        ("name", False),
        ("/owner/name", False),
        ("./owner", False),
        ("../name", False),
        ("owner/..", False),
        ("owner/name/", False),
        ("owner/name/file.bin", False),
        ("owner/name/../file.gguf", False),
        ("models/file.gguf", False),
        ("owner/na me", False),
        ("owner/näme", False),
        ("", False),
    ],
)
def test_names_of_the_hub(name: str, ok: bool):
    assert is_hub_name(name) == ok
