"""A worker process is announced while it serves, takes its leave in order, and says in one line what keeps it down."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common.compute.numerics import numerics
from common.deadlines import Deadlines
from common.discovery.redis_client import connect
from common.discovery.registry import Registry, WorkerRecord
from common.rpc.channel import open_channel
from kvtransfer.holder_client import HolderClient
from kvtransfer.lease import ROUTER
from tests.support.checkpoints import make_random_checkpoint
from tests.support.paths import ROOT
from tests.support.redis_process import RedisServer
from tests.support.redis_tools import eventually
from tests.support.worker_stream import open_stream

pytestmark = pytest.mark.slow

ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")}
# Several starts in one interpreter: importing torch is most of what one takes.
STARTS = """
import contextlib, importlib, io, json, sys
from prefill_svc.__main__ import main as prefill
from decode_svc.__main__ import main as decode
results = []
for flags in json.loads(sys.argv[1]):
    main = (prefill, decode)[len(results) % 2]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(flags)
    results.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(results))
"""
# A step loop that dies when there is something to do.
MORTAL = """
import sys
from common.engine.engine import Engine
step = Engine.step
def mortal(self, wait_s=0.0):
    if self.load().waiting:
        raise MemoryError("no more memory")
    return step(self, wait_s)
Engine.step = mortal
from decode_svc.__main__ import main
sys.exit(main())
"""
# A registry loop that dies in an unforeseen way.
MUTE = """
import sys
from common.discovery.registry import Registry
async def die(self, record):
    raise RuntimeError("a defect")
Registry.keep_announced = die
from decode_svc.__main__ import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


def flags_of(**changes: Any) -> list[str]:
    flags: dict[str, Any] = {
        "redis_namespace": "worker-test",
        "max_model_len": 256,
        "kv_cache_memory": "512Ki",
        "threads": 1,
        "log_level": "warning",
    }
    return [f"--{name.replace('_', '-')}={value}" for name, value in (flags | changes).items()]


def broken_model(model: Path, directory: Path, what: str) -> Path:
    """A copy of the model with something wrong in it."""
    shutil.copytree(model, directory)
    weights, config = directory / "model.safetensors", directory / "config.json"
    if what == "cut":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif what == "header":
        weights.write_bytes(b"\xff" * 8 + weights.read_bytes()[8:])
    elif what == "no weights":
        weights.unlink()
    else:
        config.write_text(config.read_text().replace("LlamaForCausalLM", "MambaForCausalLM"))
    return directory


def test_what_keeps_a_worker_down_is_one_line(model: Path, redis_server: RedisServer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases: list[tuple[str, dict[str, Any]]] = [
            (r"no usable Redis at redis://127.0.0.1:1/0: .*", {"redis_url": "redis://127.0.0.1:1/0"}),
            (r"redis_url must be redis://.*", {"redis_url": "http://127.0.0.1"}),
            (rf"--port: can't listen on 127.0.0.1:{port}: Address already in use", {"port": port}),
            (rf"--metrics-port: .*{port}.*", {"metrics_port": port}),
            (r".*nowhere.*", {"model": tmp_path / "nowhere"}),
            (r".*model.safetensors.*", {"model": broken_model(model, tmp_path / "cut", "cut")}),
            (r".*model.safetensors.*", {"model": broken_model(model, tmp_path / "header", "header")}),
            (r".*safetensors.*", {"model": broken_model(model, tmp_path / "empty", "no weights")}),
            (r".*Mamba.*", {"model": broken_model(model, tmp_path / "mamba", "architecture")}),
            (r".*KV pool.*max_model_len.*", {"kv_cache_memory": "64Ki"}),
            (r"no transport 'pigeon'.*", {"transport": "pigeon"}),
            (r"the cluster key must have at least 16 characters, got 6", {"cluster_key": "s3cret"}),
            (r"--tls-keyfile: is needed with --tls-certfile", {"tls_certfile": "chain.pem"}),
            (r"--host: can't bind \[10.0.0.5\]:0: .*", {"host": "[10.0.0.5]"}),
            (r"--advertise must be host:port: 'http://here' .*", {"advertise": "http://here"}),
            (r"--advertise must be host:port: 'fd00::1:7001' .*", {"advertise": "fd00::1:7001"}),
            (r"--advertise must be host:port: nobody can call ::", {"host": "::", "advertise": "[::]:7001"}),
            (r"--host 0:0::0 needs --advertise.*", {"host": "0:0::0"}),
        ]
        starts = json.dumps([flags_of(**({"model": str(model), "redis_url": redis_server.url} | c)) for _, c in cases])
        done = subprocess.run(
            [sys.executable, "-c", STARTS, starts], cwd=ROOT, env=ENVIRON, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    for (wanted, changes), (status, stdout, stderr) in zip(cases, json.loads(done.stdout), strict=True):
        assert (changes, status, stdout) == (changes, 2, "")
        assert re.fullmatch(f"error: {wanted}\n", stderr), (changes, stderr)


@dataclass
class Started:
    """A worker in a process of its own, ready."""

    process: Process
    address: str
    record: WorkerRecord
    registry: Registry

    def stream(self) -> Any:
        return open_stream(self.address, self.record.role, epoch=self.record.epoch, fingerprint=self.record.fingerprint)

    async def ended(self) -> tuple[int, list[str]]:
        """Exit status and lines on stderr."""
        async with asyncio.timeout(30):
            _, stderr = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, stderr.decode().splitlines()


def http(address: str, path: str) -> tuple[int, str]:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as reply:
        return reply.status, reply.read().decode()


@asynccontextmanager
async def started(role: str, *command: str, redis_url: str, model: Path, **flags: Any) -> AsyncIterator[Started]:
    redis = await connect(redis_url, Deadlines())
    await redis.flushall()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        *flags_of(model=model, redis_url=redis_url, **flags),
        cwd=ROOT,
        env=ENVIRON,
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        assert line.startswith(f"ready {role} "), line + (await process.communicate())[1].decode()
        registry = Registry(redis, "worker-test", Deadlines())
        [record] = await registry.workers()
        assert record.numerics.partition("/")[2] == numerics("any").partition("/")[2]
        yield Started(process, line.split()[2], record, registry)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await redis.aclose()


async def test_a_draining_worker_finishes_what_it_has_and_takes_nothing_new(
    model: Path, redis_server: RedisServer
) -> None:
    """Leases first: it stays until the KV that it holds has been fetched."""
    async with started("prefill", "-m", "prefill_svc", redis_url=redis_server.url, model=model) as worker:
        record, holder = worker.record, HolderClient(open_channel(worker.address, Deadlines()), "it", Deadlines())
        async with worker.stream() as stream:
            for index in range(8):
                await stream.submit([6 + index] * 30, request=str(index))
            await stream.event("accepted", "7")
            worker.process.send_signal(signal.SIGTERM)
            await eventually(lambda: stream.loads[-1].draining)
            await stream.submit([5] * 20, request="new")
            assert await stream.failure("new") == ("draining", "")
            handles = [(await stream.event("first_tokens", str(index))).handle for index in range(8)]
            with pytest.raises(urllib.error.HTTPError, match="503"):
                await asyncio.to_thread(http, record.http_address, "/ready")
            assert (await asyncio.to_thread(http, record.http_address, "/health"))[0] == 200
            assert [record.leaving for record in await worker.registry.workers()] == [True]
            for handle in handles:
                assert not stream.ended
                assert await holder.release(handle.id, handle.epoch, ROUTER)
            await eventually(lambda: stream.ended)
        assert await worker.ended() == (0, [])


async def test_a_second_signal_ends_a_draining_worker_at_once(model: Path, redis_server: RedisServer) -> None:
    async with (
        started("prefill", "-m", "prefill_svc", redis_url=redis_server.url, model=model) as worker,
        worker.stream() as stream,
    ):
        await stream.submit([5] * 20)
        await stream.event("first_tokens")
        worker.process.send_signal(signal.SIGTERM)
        await eventually(lambda: stream.loads[-1].draining)
        worker.process.send_signal(signal.SIGTERM)
        assert (await worker.ended())[0] == -signal.SIGTERM


async def test_what_is_left_when_the_grace_is_over_breaks_off(model: Path, redis_server: RedisServer) -> None:
    """With one prompt held and others on their way."""
    async with started(
        "prefill", "-m", "prefill_svc", redis_url=redis_server.url, model=model, drain_timeout=0.2
    ) as worker:
        record = worker.record
        assert (record.address, record.leaving, record.epoch > 0) == (worker.address, False, True)
        assert (await asyncio.to_thread(http, record.http_address, "/health"))[0] == 200
        assert "kvrelay:num_requests_running" in (await asyncio.to_thread(http, record.http_address, "/metrics"))[1]
        async with worker.stream() as stream:
            await stream.submit([5] * 20)
            assert (await stream.event("first_tokens")).HasField("handle")
            for index in range(20):
                await stream.submit([6] * 200, request=str(index))
            await stream.event("accepted", "19")
            worker.process.send_signal(signal.SIGTERM)
            await eventually(lambda: stream.ended)
        status, [line] = await worker.ended()
        assert status == 0
        assert "stopping with work left" in line
        assert [record.leaving for record in await worker.registry.workers()] == [True]


async def test_a_worker_ends_when_its_step_loop_dies(model: Path, redis_server: RedisServer) -> None:
    async with started("decode", "-c", MORTAL, redis_url=redis_server.url, model=model) as worker:
        async with worker.stream() as stream:
            await stream.submit([5] * 20)
            await eventually(lambda: stream.ended)
        status, lines = await worker.ended()
        assert status == 2
        assert lines[-1] == "error: the step loop died: no more memory"
        assert [line for line in lines if line.startswith("error")] == lines[-1:]
        assert [record.leaving for record in await worker.registry.workers()] == [True]


async def test_a_worker_that_can_not_be_announced_any_more_ends(model: Path, redis_server: RedisServer) -> None:
    """Else routers that come later would never hear of it."""
    async with started("decode", "-c", MUTE, redis_url=redis_server.url, model=model) as worker:
        status, lines = await worker.ended()
    assert (status, lines[-1]) == (2, "error: the loop of announcing died: a defect")
