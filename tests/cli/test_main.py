"""The command is quick to explain itself, and every failure is one line with its own exit status."""

import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest

from cli import main as cli_main
from cli.main import COMMANDS, ROLES, main
from common.errors import ConfigError
from common.version import VERSION
from tests.support.paths import ROOT


def kvrelay(*argv: str, code: str = "") -> subprocess.CompletedProcess:
    """The command in a process of its own, with `code` run before it."""
    program = f"import sys\nfrom cli.main import main\n{code}\nsys.exit(main({list(argv)!r}))"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_help_names_every_command_and_imports_nothing_heavy():
    heavy = ("torch", "transformers", "aiohttp", "grpc", "numpy", "redis")
    code = f"import atexit; atexit.register(lambda: print(sorted(set({heavy}) & sys.modules.keys())))"
    done = kvrelay("--help", code=code)
    assert done.returncode == 0
    assert all(name in done.stdout for name in COMMANDS)
    assert done.stdout.rstrip().endswith("[]")


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"kvrelay {VERSION}\n"


def test_the_version_is_that_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION


@pytest.mark.parametrize("argv", [[], ["nothing"], ["--unknown"], ["chat", "--unknown"], ["up"]])
def test_a_wrong_command_line_is_status_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.fixture
def fails_with(monkeypatch):
    """Makes the command raise an error."""

    def arrange(error: BaseException) -> None:
        def run(argv):
            raise error

        monkeypatch.setattr(cli_main, "_run", run)

    return arrange


def test_an_error_of_ours_is_one_line_and_status_2(fails_with, capsys):
    fails_with(ConfigError("--port must be\n between 0 and 65535"))
    assert main([]) == 2
    assert capsys.readouterr().err == "error: --port must be between 0 and 65535\n"


def test_an_interruption_is_status_130_without_a_word(fails_with, capsys):
    fails_with(KeyboardInterrupt())
    assert main([]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_bug_keeps_its_traceback(fails_with):
    fails_with(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main([])


@pytest.mark.parametrize("flush", [True, False])
def test_a_reader_that_leaves_is_no_error_message(flush):
    code = f"""
import cli.main
def run(argv):
    for _ in range(100_000):
        print("line", flush={flush})
    return 0
cli.main._run = run
"""
    program = f"import sys\nfrom cli.main import main\n{code}\nsys.exit(main([]))"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), errors) == (141, b"")


@pytest.mark.parametrize("role", ROLES)
def test_a_role_gets_its_own_arguments_untouched(role, monkeypatch):
    modules = {"router": "router", "prefill": "prefill_svc", "decode": "decode_svc"}
    calls = []
    fake = SimpleNamespace(main=lambda argv: calls.append(argv) or 3)
    monkeypatch.setitem(sys.modules, f"{modules[role]}.__main__", fake)
    assert main([role, "--model", "m", "--help"]) == 3
    assert calls == [["--model", "m", "--help"]]
