"""`kvrelay up` plans the right processes, refuses early what can't work, and ends in order on every signal."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from cli.main import main
from cluster.plan import ClusterConfig, UpConfig, check, child_environment, divided_threads, plan, redis_ready
from common.discovery.config import RedisConfig
from common.engine.config import EngineConfig
from common.errors import AddressInUse, ConfigError, ModelError
from common.rpc.config import SecurityConfig
from common.settings import Bytes, add_arguments, from_arguments
from common.worker.config import WorkerConfig
from router.config import RequestLimits, RouterConfig
from tests.support.process_tools import wait_until_ended

pytestmark = pytest.mark.slow

FAKE_ROLE = """
import json, os, signal, sys, time
name, journal, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
def on_term(*_):
    time.sleep(options.get("drain", 0))
    with open(journal, "a") as file:
        file.write(name + "\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, on_term)
print("up", flush=True)
if not options.get("silent"):
    print("ready", name, "http://127.0.0.1:1", "{}", flush=True)
while True:
    time.sleep(60)
"""


def config(up: UpConfig | None = None, **engine) -> ClusterConfig:
    return ClusterConfig(
        up=up or UpConfig(redis_url="redis://elsewhere/0"),
        router=RouterConfig(model="m", port=0),
        engine=EngineConfig(model="m", **engine),
        worker=WorkerConfig(),
    )


def flags_of(command: tuple[str, ...], kind: type):
    """The config that a child would read from its command line."""
    parser = argparse.ArgumentParser()
    add_arguments(
        parser,
        *dict.fromkeys((kind, EngineConfig, WorkerConfig, RouterConfig, RequestLimits, RedisConfig, SecurityConfig)),
        environ={},
    )
    return from_arguments(kind, parser.parse_args(command[command.index("-m") + 2 :]))


@pytest.mark.parametrize(
    ("prefill", "decode", "names"),
    [
        (1, 1, ["prefill-0", "decode-0"]),
        (0, 1, ["decode-0"]),
        (2, 3, ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]),
    ],
)
def test_workers_start_together_before_the_router(prefill, decode, names):
    stages = plan(config(UpConfig(prefill=prefill, decode=decode, redis_url="redis://elsewhere/0")))
    assert [[spec.name for spec in stage] for stage in stages] == [names, ["router"]]
    assert [spec.name for stage in stages for spec in stage if spec.essential] == ["router"]


def test_a_cluster_brings_its_own_redis_first_unless_one_is_named():
    stages = plan(config(UpConfig()))
    assert [spec.name for spec in stages[0]] == ["redis"]
    url = stages[1][0].env["KVRELAY_REDIS_URL"]
    assert all(spec.env["KVRELAY_REDIS_URL"] == url for stage in stages[1:] for spec in stage)
    assert stages[0][0].parse_ready("1:M * Ready to accept connections").address == url


def test_settings_reach_the_processes_that_they_are_for():
    cluster = replace(
        config(dtype="float32", max_num_seqs=3, kv_cache_memory=Bytes(2**20), threads=5),
        router=RouterConfig(model="m", port=0, served_model_name="tiny"),
        worker=WorkerConfig(transport="shm", log_level="debug"),
    )
    (worker, _), (router,) = plan(cluster)
    assert flags_of(worker.command, EngineConfig) == replace(cluster.engine, workers_per_host=2)
    drain = {"drain_timeout": 8.0}  # requests have to end before the supervisor's patience does
    assert flags_of(worker.command, WorkerConfig) == replace(cluster.worker, worker_id="prefill-0", **drain)
    assert flags_of(router.command, RouterConfig) == replace(cluster.router, **drain)


def test_keys_reach_the_router_alone_and_are_in_no_command_line():
    cluster = replace(config(), router=RouterConfig(model="m", port=0, api_key="s3cret"), limits=RequestLimits(max_n=3))
    (*workers,), (router,) = plan(cluster)
    assert router.env["KVRELAY_API_KEY"] == "s3cret"
    assert flags_of(router.command, RequestLimits) == cluster.limits
    assert not any("s3cret" in " ".join(spec.command) for spec in (*workers, router))
    assert not any("KVRELAY_API_KEY" in spec.env for spec in workers)


def test_the_password_of_redis_reaches_every_role_and_is_in_no_command_line_and_no_repr():
    url = "redis://:s3cret@elsewhere/0"
    cluster = config(UpConfig(redis_url=url))
    specs = [spec for stage in plan(cluster) for spec in stage]
    assert [spec.env["KVRELAY_REDIS_URL"] for spec in specs] == [url] * 3
    assert not any("s3cret" in " ".join(spec.command) for spec in specs)
    assert "s3cret" not in repr(cluster) + repr(specs)


def test_the_cluster_key_reaches_routers_and_workers_and_is_in_no_command_line(monkeypatch):
    monkeypatch.setenv("KVRELAY_CLUSTER_KEY", "of another cluster")
    security = SecurityConfig(cluster_key="a s3cret of this one", tls_ca_certfile="ca.pem")
    (redis,), (*workers,), (router,) = plan(replace(config(UpConfig()), security=security))
    for spec in (*workers, router):
        assert spec.env["KVRELAY_CLUSTER_KEY"] == security.cluster_key
        assert "--tls-ca-certfile=ca.pem" in spec.command
    assert "KVRELAY_CLUSTER_KEY" not in redis.env
    assert not any("s3cret" in " ".join(spec.command) for spec in (redis, *workers, router))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"security": SecurityConfig(cluster_key="short")}, "cluster_key"),
        ({"security": SecurityConfig(tls_certfile="nowhere")}, "tls_keyfile"),
        ({"router": RouterConfig(model="m", port=0, ssl_certfile="nowhere")}, "ssl_keyfile"),
    ],
)
def test_keys_and_certificates_are_looked_at_before_anything_starts(changes, flag):
    with pytest.raises(ConfigError) as caught:
        check(replace(config(), **changes))
    assert caught.value.field == flag


def test_a_random_namespace_is_shared_by_one_cluster_and_no_other():
    def namespaces(stages):
        return {flags_of(spec.command, RedisConfig).redis_namespace for stage in stages for spec in stage}

    one, two = namespaces(plan(config())), namespaces(plan(config()))
    assert (len(one), len(two), len(one | two)) == (1, 1, 2)


def test_workers_in_a_namespace_of_others_have_no_names_that_could_clash():
    stages = plan(config(UpConfig(redis_url="redis://elsewhere/0", redis_namespace="shared")))
    assert flags_of(stages[0][0].command, WorkerConfig).worker_id == ""
    assert flags_of(stages[0][0].command, RedisConfig).redis_namespace == "shared"


@pytest.mark.parametrize(
    ("cores", "workers", "threads"), [(2, 2, [1, 1]), (2, 1, [2]), (1, 3, [1, 1, 1]), (8, 3, [3, 3, 2])]
)
def test_cores_are_divided_over_the_workers(cores, workers, threads, monkeypatch):
    monkeypatch.setattr("cluster.plan.usable_cores", lambda: cores)
    assert divided_threads(workers) == threads


def test_settings_of_the_environment_do_not_reach_the_children_twice():
    environ = {"KVRELAY_PORT": "9", "KVRELAY_THREADS": "4", "KVRELAY_LOG_FORMAT": "json", "HOME": "/h"}
    assert child_environment(environ) == {"KVRELAY_LOG_FORMAT": "json", "HOME": "/h", "PYTHONUNBUFFERED": "1"}


def test_another_line_of_redis_is_not_its_ready_line():
    assert redis_ready("redis://x", "1:M * Server initialized") is None


def test_a_model_that_is_not_there_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ModelError, match="there is no"):
        check(replace(config(), engine=EngineConfig(model=str(tmp_path / "none"))))


def test_an_occupied_port_is_refused_before_anything_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        router = RouterConfig(model="m", port=port)
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{port}"):
            check(replace(config(), engine=EngineConfig(model=str(tmp_path)), router=router))


@pytest.mark.parametrize("host", ["1.2.3.4", "no.such.host.invalid"])
def test_a_host_that_is_not_here_is_refused_in_one_line(host, tmp_path):
    router = RouterConfig(model="m", host=host, port=0)
    with pytest.raises(ConfigError, match=rf"^--host: can't bind {host}:0: [^\n]+$"):
        check(replace(config(), engine=EngineConfig(model=str(tmp_path)), router=router))


@pytest.mark.parametrize(
    "flags", [["--decode", "0"], ["--prefill", "-1"], ["--port", "70000"], ["--max-num-seqs", "0"], ["--threads=0"]]
)
def test_a_flag_out_of_bounds_is_one_line_that_names_it(flags, capsys):
    assert main(["up", "--model", "m", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {flags[0].split('=')[0]} must be ")
    assert error.count("\n") == 1


class Up:
    """`kvrelay up` in a process of its own: fake roles, a real Redis where asked for."""

    def __init__(self, folder: Path, *flags: str, own_redis: bool = False, **options) -> None:
        script, self.journal = folder / "role.py", folder / "journal"
        script.write_text(FAKE_ROLE)
        self.journal.touch()
        fakes = {
            name: (sys.executable, "-S", str(script), name, str(self.journal), json.dumps(options.get(name, {})))
            for name in ("prefill", "decode", "router")
        }
        program = f"""
import sys, cluster.plan
from dataclasses import replace
from cli.main import main
fakes, real = {fakes!r}, cluster.plan.plan
def plan(config):
    return tuple(
        tuple(replace(spec, command=fakes.get(spec.name.split("-")[0], spec.command)) for spec in stage)
        for stage in real(config)
    )
cluster.plan.plan = plan
sys.exit(main(["up", *sys.argv[1:]]))
"""
        redis_flags = [] if own_redis else ["--redis-url", "redis://127.0.0.1:1/0"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, "--model", str(folder), "--port", "0", *redis_flags, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pids: dict[str, int] = {}
        self.redis_url = ""

    def until(self, start: str) -> str:
        """Reads on to the line that starts so."""
        for line in self.process.stdout:
            words = line.split()
            if words[1:2] == ["pid"]:
                self.pids[words[0]] = int(words[2])
                self.redis_url = words[3] if words[0] == "redis" else self.redis_url
            if line.startswith(start):
                return line
        raise AssertionError(f"no {start!r}; {self.process.stderr.read()}")

    def end(self, number: int | None = None) -> tuple[int, list[str], str]:
        """Exit status, the order in which the roles stopped, standard error."""
        if number is not None:
            self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, self.journal.read_text().split(), errors

    def nothing_is_left(self) -> bool:
        for pid in self.pids.values():
            wait_until_ended(pid)
        return True


@pytest.fixture
def up(tmp_path):
    started: list[Up] = []

    def start(*flags: str, **options) -> Up:
        started.append(Up(tmp_path, *flags, **options))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_router_first_and_leaves_nothing(up, number):
    cluster = up("--prefill", "2", own_redis=True)
    line = cluster.until("ready http://127.0.0.1:1 (2 prefill, 1 decode) in ")
    assert line.endswith(" s\n")
    assert sorted(cluster.pids) == ["decode-0", "prefill-0", "prefill-1", "redis", "router"]
    status, stopped, _ = cluster.end(number)
    assert (status, stopped[0], sorted(stopped[1:])) == (0, "router", ["decode", "prefill", "prefill"])
    assert cluster.nothing_is_left()
    with pytest.raises(redis.ConnectionError):
        redis.Redis.from_url(cluster.redis_url).ping()


def test_a_signal_during_the_start_ends_it(up):
    cluster = up(router={"silent": True})
    while not cluster.pids.keys() >= {"prefill-0", "decode-0"}:  # ready in either order
        cluster.until("")
    status, stopped, _ = cluster.end(signal.SIGINT)
    assert (status, sorted(stopped)) == (130, ["decode", "prefill"])
    assert cluster.nothing_is_left()


def test_a_second_signal_kills_what_is_slow(up):
    cluster = up(router={"drain": 60})
    cluster.until("ready")
    cluster.process.send_signal(signal.SIGTERM)
    cluster.until("stopping")
    assert cluster.end(signal.SIGTERM)[0] == 128 + signal.SIGTERM
    assert cluster.nothing_is_left()


def test_what_had_to_be_killed_shows_in_the_exit_status(up):
    cluster = up("--shutdown-timeout", "1", decode={"drain": 60})
    cluster.until("ready")
    cluster.process.send_signal(signal.SIGTERM)
    cluster.until(f"decode-0 (pid {cluster.pids['decode-0']}) died: killed by SIGKILL")
    assert cluster.end()[0] == 1
    assert cluster.nothing_is_left()


@pytest.mark.parametrize("name", ["redis", "prefill-0", "decode-0"])
def test_a_dead_worker_or_redis_is_reported_and_the_rest_goes_on(up, name):
    cluster = up(own_redis=True)
    cluster.until("ready")
    os.kill(cluster.pids[name], signal.SIGKILL)
    assert cluster.until(f"{name} (pid ") == f"{name} (pid {cluster.pids[name]}) died: killed by SIGKILL\n"
    assert cluster.process.poll() is None
    assert cluster.end(signal.SIGTERM)[0] == 0


def test_a_dead_router_ends_the_cluster(up):
    cluster = up()
    cluster.until("ready")
    os.kill(cluster.pids["router"], signal.SIGKILL)
    status, stopped, errors = cluster.end()
    assert (status, sorted(stopped)) == (2, ["decode", "prefill"])
    assert errors.endswith(f"error: router (pid {cluster.pids['router']}) died: killed by SIGKILL\n")
    assert cluster.nothing_is_left()


def test_a_dead_redis_is_restarted_at_its_address_where_restarts_are_wanted(up):
    cluster = up("--restart", own_redis=True)
    cluster.until("ready")
    url, pid = cluster.redis_url, cluster.pids["redis"]
    os.kill(pid, signal.SIGKILL)
    assert cluster.until("redis (pid ").endswith("starts again in 1 s\n")
    cluster.until("redis ")
    assert cluster.redis_url == url
    assert cluster.pids["redis"] != pid
    assert redis.Redis.from_url(url).ping()
    assert cluster.end(signal.SIGTERM)[0] == 0
    assert cluster.nothing_is_left()


def test_a_killed_supervisor_leaves_nothing_behind(up):
    cluster = up(own_redis=True)
    cluster.until("ready")
    cluster.process.kill()
    assert cluster.nothing_is_left()
