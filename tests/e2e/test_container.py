"""Both kinds of role run where a container gives least: pid 1, a read-only root, an unknown user, no HOME, no cache."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.checkpoints import make_random_checkpoint
from tests.support.paths import ROOT
from tests.support.process_tools import first_of, needs_namespaces
from tests.support.redis_process import RedisServer

UNKNOWN_UID = 54321
# The root file system is read-only, /proc is its own; then a user that no passwd file knows, and nothing else.
CONTAINER = (
    "mount -o remount,bind,ro / && ! touch /tmp/x 2>/dev/null && "
    f"exec unshare --user --map-user={UNKNOWN_UID} --map-group={UNKNOWN_UID} "
    f'env -i PATH="$PATH" PYTHONPATH={ROOT} PYTHONUNBUFFERED=1 "$@"'
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@contextmanager
def contained(*command: str) -> Iterator[subprocess.Popen[str]]:
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    process = subprocess.Popen(
        [*namespaces, "sh", "-c", CONTAINER, "sh", sys.executable, *command],
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@needs_namespaces
@pytest.mark.parametrize("role", ["prefill", "router"])
def test_a_role_serves_and_ends_in_order(role: str, model: Path, redis_server: RedisServer) -> None:
    flags = [f"--model={model}", f"--redis-url={redis_server.url}", "--redis-namespace=contained", "--port=0"]
    if role == "prefill":
        flags += ["--max-model-len=256", "--kv-cache-memory=512Ki", "--threads=1"]
    with contained("-m", "cli.main", role, *flags) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"ready {role} "), line + process.communicate(timeout=30)[1]
        _, _, address, details = line.split(" ", 3)
        page = f"http://{json.loads(details)['metrics']}" if role == "prefill" else address
        with urllib.request.urlopen(f"{page}/health", timeout=30) as reply:
            assert reply.status == 200
        first = first_of(process)
        assert Path(f"/proc/{first}/task/{first}/children").read_text().split()  # the role is not pid 1 itself
        os.kill(first, signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=30)
        assert (process.returncode, stdout) == (0, "")
        assert "Traceback" not in stderr
        if role == "prefill":
            assert "no home directory: set KVRELAY_CACHE" in stderr  # nowhere to keep what would be compiled
