"""A role starts with one ready line, ends by a signal, and says in one line why it can't start."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

ROLE = """
import asyncio, sys
from common.discovery.config import RedisConfig
from common.settings import from_arguments
from common.worker.config import WorkerConfig
from common.errors import KVRelayError, ModelError, RedisUnreachable
from common.role import announce_ready, run_role, stop_on_signals

async def main(arguments):
    settings = from_arguments(WorkerConfig, arguments)
{body}

sys.exit(run_role("decode", (WorkerConfig, RedisConfig), main, None))
"""
SERVE = """
    stop = stop_on_signals()
    announce_ready("decode", f"{settings.host}:{settings.port}", epoch=5, metrics="127.0.0.1:9")
    await stop.wait()
    print("stopping", flush=True)
    return 0
"""
SERVE_AND_HANG = SERVE.replace("return 0", "await asyncio.sleep(60)")
START_SLOWLY = """
    print("starting", flush=True)
    await asyncio.sleep(60)
"""


def role(body: str, *flags: str, **environ: str) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")}
    return subprocess.Popen(
        [sys.executable, "-c", ROLE.format(body=body), *flags],
        cwd=ROOT,
        env=clean | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status and what was said on stdout and stderr from now on."""
    try:
        stdout, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
    return process.returncode, stdout, stderr


@pytest.mark.parametrize(
    ("body", "flags", "environ", "line"),
    [
        ('    raise ModelError("no config.json in /m", field="model")', (), {}, "error: no config.json in /m"),
        ('    raise RedisUnreachable("no usable Redis")', (), {}, "error: no usable Redis"),
        ('    raise KVRelayError("odd")', (), {}, "error: odd"),
        (SERVE, ("--port", "65536"), {}, "error: --port must be between 0 and 65535, got 65536"),
        (SERVE, (), {"KVRELAY_PORT": "http"}, "error: KVRELAY_PORT='http' is not a whole number"),
        (SERVE, (), {"KVRELAY_LOG_LEVEL": "loud"}, "error: KVRELAY_LOG_LEVEL='loud' is none of .*"),
        (SERVE, (), {"KVRELAY_LOG_FORMAT": "xml"}, "error: KVRELAY_LOG_FORMAT='xml' is none of text, json"),
    ],
    ids=["model", "redis", "any", "flag", "environment", "choice", "log format"],
)
def test_what_keeps_a_role_from_starting_is_one_line(
    body: str, flags: tuple[str, ...], environ: dict[str, str], line: str
) -> None:
    status, stdout, stderr = ended(role(body, *flags, **environ))
    assert (status, stdout) == (2, "")
    assert re.fullmatch(f"{line}\n", stderr)


@pytest.mark.parametrize("flag", ["--no-such-flag", "--por=1", "--port=http"])
def test_a_wrong_flag_is_named(flag: str) -> None:
    status, stdout, stderr = ended(role(SERVE, flag))
    assert (status, stdout) == (2, "")
    assert stderr.splitlines()[-1].startswith("kvrelay decode: error:")
    assert flag.partition("=")[0] in stderr.splitlines()[-1]


def test_a_defect_shows_where_it_is() -> None:
    status, _, stderr = ended(role('    raise ValueError("a defect")'))
    assert (status, stderr.splitlines()[-1]) == (1, "ValueError: a defect")
    assert "Traceback" in stderr


def test_the_ready_line_has_role_address_and_details() -> None:
    process = role(SERVE, "--port", "4000")
    assert process.stdout is not None
    word, name, address, details = process.stdout.readline().split(" ", 3)
    assert (word, name, address) == ("ready", "decode", "127.0.0.1:4000")
    assert json.loads(details) == {"epoch": 5, "metrics": "127.0.0.1:9"}
    process.terminate()
    assert ended(process)[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order_and_a_second_one_at_once(number: signal.Signals) -> None:
    for body, signals, status in ((SERVE, 1, 0), (SERVE_AND_HANG, 2, -number)):
        process = role(body)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready")
        process.send_signal(number)
        assert process.stdout.readline() == "stopping\n"
        if signals == 2:
            process.send_signal(number)
        assert ended(process) == (status, "", "")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_while_it_starts_ends_it_without_a_traceback(number: signal.Signals, status: int) -> None:
    process = role(START_SLOWLY)
    assert process.stdout is not None
    assert process.stdout.readline() == "starting\n"
    process.send_signal(number)
    assert ended(process) == (status, "", "")
