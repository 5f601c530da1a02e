"""`kvrelay bench` hands each kind of measurement its own options, and explains itself without loading what it runs."""

import argparse
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bench.options import ServeOptions, StepOptions
from cli import bench as cli_bench
from cli.main import main


@pytest.fixture
def measured(monkeypatch):
    """Every measurement takes its options and returns 7."""
    seen = []

    def load(name):
        def run(options):
            seen.append((name, options))
            return 7

        return SimpleNamespace(run=run)

    monkeypatch.setattr(cli_bench, "importlib", SimpleNamespace(import_module=load))
    return seen


def test_the_help_imports_nothing_heavy():
    heavy = ("torch", "aiohttp", "grpc", "numpy", "redis")
    code = f"import atexit, sys; atexit.register(lambda: print(sorted(set({heavy}) & sys.modules.keys())))\n"
    code += "from cli.main import main; main(['bench', 'step', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--peer" in done.stdout
    assert done.stdout.rstrip().endswith("[]")


def arguments(*argv):
    parser = argparse.ArgumentParser()
    cli_bench.add_parser(parser.add_subparsers(dest="command"))
    return parser.parse_args(["bench", *argv])


def test_options_reach_the_measurement(measured):
    assert cli_bench.run(arguments("step", "--model", "m", "--cores", "2", "--json")) == 7
    assert measured == [("bench.step.step", StepOptions(model="m", cores="2", json=True))]


def test_a_running_server_needs_no_model(measured):
    assert cli_bench.run(arguments("serve", "--url", "http://here", "--slo-ttft-ms", "250")) == 7
    assert measured == [("bench.serve.serve", ServeOptions(url="http://here", slo_ttft_ms=250.0))]


@pytest.mark.parametrize("kind", ["step", "handover", "router", "batching", "soak", "burst", "streams"])
def test_without_a_model_the_demo_model_is_taken(measured, monkeypatch, kind):
    monkeypatch.setattr("cluster.model_fetch.ensure_demo_model", lambda: "demo")
    cli_bench.run(arguments(kind))
    assert [options.model for _, options in measured] == ["demo"]


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["serve", "--rate", "0"], "--rate"),
        (["serve", "--scale", "0"], "--scale"),
        (["step", "--rounds", "0"], "--rounds"),
        (["handover", "--tokens", "0"], "--tokens"),
        (["soak", "--seconds", "0"], "--seconds"),
        (["soak", "--aborts", "1.5"], "--aborts"),
        (["burst", "--times", "0"], "--times"),
        (["step", "--model", "m", "--cores", "none"], "--cores"),
    ],
)
def test_a_value_out_of_bounds_is_one_line_that_names_its_flag(argv, flag, capsys):
    assert main(["bench", *argv]) == 2
    assert flag in capsys.readouterr().err
