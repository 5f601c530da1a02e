"""TLS between roles: who shows the right certificate under the right name is talked to; and what is open says so."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.cluster_key import ClusterKey
from common.deadlines import Deadlines
from common.errors import ConfigError
from common.rpc.channel import GrpcServer, channel_opener, join_address
from common.rpc.config import SecurityConfig
from common.rpc.security import OPEN, Security
from tests.support.certificates import pem_files
from tests.support.redis_tools import lines_of

FAST = Deadlines().scaled(0.1)
KEY = "the key of this cluster"


def a_config(folder: Path, *names: str, ca: str = "ours", **changes: Any) -> SecurityConfig:
    pem = pem_files(folder, *names, ca=ca)
    fields = {"tls_certfile": pem.chain, "tls_keyfile": pem.key, "tls_ca_certfile": pem.ca}
    return SecurityConfig(**(fields | changes))


@asynccontextmanager
async def listening(security: Security) -> AsyncIterator[GrpcServer]:
    server = GrpcServer("127.0.0.1", 0, FAST, security)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def answers(server: GrpcServer, security: Security, host: str = "127.0.0.1") -> bool:
    """Whether a health check comes through."""
    channel = channel_opener(security)(join_address(host, server.port), FAST)
    async with channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return False
            raise
    return True


async def test_with_a_ca_both_sides_show_a_certificate_of_it(tmp_path: Path) -> None:
    ours = Security.load(a_config(tmp_path / "a", "127.0.0.1"), serves=True)
    router = Security.load(a_config(tmp_path / "b", "router.example"), serves=False)
    stranger = Security.load(a_config(tmp_path / "c", "router.example", ca="theirs"), serves=False)
    nobody = Security.load(SecurityConfig(tls_ca_certfile=str(tmp_path / "a/ca.pem")), serves=False)
    theirs = pem_files(tmp_path / "d", "router.example", ca="theirs")
    pretender = Security.load(
        a_config(tmp_path / "e", "router.example", tls_certfile=theirs.chain, tls_keyfile=theirs.key), serves=False
    )
    async with listening(ours) as server:
        assert await answers(server, router)
        assert [await answers(server, one) for one in (stranger, nobody, pretender, OPEN)] == [False] * 4


async def test_a_worker_must_be_who_its_address_says(tmp_path: Path) -> None:
    elsewhere = Security.load(a_config(tmp_path, "10.0.0.1", "worker.example"), serves=True)
    async with listening(elsewhere) as server:
        assert not await answers(server, elsewhere)
        named = Security.load(a_config(tmp_path, "worker.example", tls_server_name="worker.example"), serves=True)
        assert await answers(server, named)


async def test_names_of_hosts_are_checked_as_well(tmp_path: Path) -> None:
    ours = Security.load(a_config(tmp_path, "localhost"), serves=True)
    async with listening(ours) as server:
        assert [await answers(server, ours, host) for host in ("localhost", "127.0.0.1")] == [True, False]


async def test_without_a_ca_nobody_is_asked_for_a_certificate(tmp_path: Path) -> None:
    worker = Security.load(a_config(tmp_path, "127.0.0.1", tls_ca_certfile=""), serves=True)
    router = Security.load(SecurityConfig(tls_ca_certfile=str(tmp_path / "ca.pem")), serves=False)
    async with listening(worker) as server:
        assert await answers(server, router)
        assert not await answers(server, OPEN)


@pytest.mark.parametrize(
    ("changes", "serves", "field"),
    [
        ({"tls_keyfile": ""}, True, "tls_keyfile"),
        ({"tls_certfile": "", "tls_keyfile": ""}, True, "tls_certfile"),
        (
            {"tls_certfile": "", "tls_keyfile": "", "tls_ca_certfile": "", "tls_server_name": "x"},
            True,
            "tls_server_name",
        ),
        ({"tls_certfile": "/nowhere"}, False, "tls_certfile"),
        ({"cluster_key": "short"}, False, "cluster_key"),
    ],
)
def test_what_can_not_work_is_refused_by_name(
    tmp_path: Path, changes: dict[str, str], serves: bool, field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Security.load(a_config(tmp_path, "localhost", **changes), serves=serves)
    assert caught.value.field == field


def test_no_secret_is_in_a_repr(tmp_path: Path) -> None:
    security = Security.load(a_config(tmp_path, "localhost", cluster_key=KEY), serves=True)
    assert "PRIVATE KEY" in Path(tmp_path / "key.pem").read_text()
    assert not [text for text in (KEY, "PRIVATE KEY") if text in repr(security)]


@pytest.mark.parametrize(
    ("host", "open_to_all"),
    [("127.0.0.1", 0), ("localhost", 0), ("::1", 0), ("[::1]", 0), ("0.0.0.0", 1), ("::", 1), ("10.0.0.5", 1), ("", 1)],
)
def test_an_open_port_beyond_this_host_is_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str, open_to_all: int
) -> None:
    one_sided = Security.load(a_config(tmp_path, "localhost", tls_ca_certfile=""), serves=True)
    closed = Security(ClusterKey(KEY)), Security.load(a_config(tmp_path, "localhost"), serves=True)
    for security in closed:
        security.warn_if_open(host)
    assert lines_of(caplog) == []
    OPEN.warn_if_open(host)
    one_sided.warn_if_open(host)
    assert len(lines_of(caplog)) == 2 * open_to_all
