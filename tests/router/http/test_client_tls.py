"""The router speaks TLS to clients: ours trust the CA that SSL_CERT_FILE names, and say in one line when they don't."""

import asyncio
import os
import ssl
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cluster.chat_client import ChatClient
from common.deadlines import Deadlines
from common.errors import ConfigError, Unavailable
from common.text.text_model import TextModel
from router.config import RouterConfig
from router.http.client_tls import client_tls
from tests.support.certificates import PemFiles, pem_files
from tests.support.fake_router import running_router
from tests.support.http_tools import COMPLETION, HELLO, PATIENCE_S, serve
from tests.support.tiny_text import model_directory


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(model_directory(tmp_path_factory.mktemp("model")))


@pytest.fixture
def pem(tmp_path: Path) -> PemFiles:
    return pem_files(tmp_path, "127.0.0.1")


def tls_of(pem: PemFiles, **changes: Any) -> ssl.SSLContext:
    context = client_tls(RouterConfig(**({"model": "m", "ssl_certfile": pem.chain, "ssl_keyfile": pem.key} | changes)))
    assert context is not None
    return context


async def test_answers_and_streams_come_over_tls(pem: PemFiles, text: TextModel) -> None:
    trusting = ssl.create_default_context(cafile=pem.ca)
    async with serve(text, *HELLO, tls=tls_of(pem)) as served:
        response, body = await served.post("/v1/completions", COMPLETION, ssl=trusting)
        assert (response.status, body["choices"][0]["text"]) == (200, "Hello")
        response, events = await served.stream("/v1/completions", COMPLETION, ssl=trusting)
        assert (response.status, events[-1]) == (200, "data: [DONE]")
        with pytest.raises(aiohttp.ClientError):
            await served.get("/health")  # who doesn't know the CA
        with pytest.raises(aiohttp.ClientError):
            async with served.session.get(served.url.replace("https", "http") + "/health"):
                pass


async def test_a_slow_client_is_cut_off_over_tls_as_well(pem: PemFiles, text: TextModel) -> None:
    async with serve(text, tls=tls_of(pem), deadlines=Deadlines(http_header_s=0.2)) as served:
        trusting = ssl.create_default_context(cafile=pem.ca)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]), ssl=trusting)
        writer.write(b"GET /health HTTP/1.1\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_clients_show_a_certificate_where_a_ca_is_given(pem: PemFiles, text: TextModel, tmp_path: Path) -> None:
    showing = ssl.create_default_context(cafile=pem.ca)
    other = pem_files(tmp_path / "client", "client.example")
    showing.load_cert_chain(other.chain, other.key)
    async with serve(text, tls=tls_of(pem, ssl_ca_certs=pem.ca)) as served:
        response, _ = await served.get("/health", ssl=showing)
        assert response.status == 200
        with pytest.raises((aiohttp.ClientError, OSError)):
            await served.get("/health", ssl=ssl.create_default_context(cafile=pem.ca))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"ssl_keyfile": ""}, "ssl_keyfile"),
        ({"ssl_certfile": ""}, "ssl_certfile"),
        ({"ssl_certfile": "", "ssl_keyfile": "", "ssl_ca_certs": "{ca}"}, "ssl_certfile"),
        ({"ssl_ca_certs": "/nowhere"}, "ssl_ca_certs"),
    ],
)
def test_what_does_not_belong_together_is_named(pem: PemFiles, changes: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^--{field.replace('_', '-')}: ") as caught:
        tls_of(pem, **{name: value.format(ca=pem.ca) for name, value in changes.items()})
    assert caught.value.field == field


def test_without_certificate_there_is_no_tls() -> None:
    assert client_tls(RouterConfig(model="m")) is None


async def test_the_chat_trusts_the_ca_of_the_environment(pem: PemFiles) -> None:
    async with running_router(tls_of(pem)) as router:
        done = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cli.main", "chat", "--url", router.url, "hello"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "SSL_CERT_FILE": pem.ca},
        )
        out, err = await asyncio.wait_for(done.communicate(), 60)
        assert (done.returncode, out, err) == (0, b"echo hello\n", b"")


async def test_a_certificate_that_is_not_trusted_is_one_line(pem: PemFiles) -> None:
    async with running_router(tls_of(pem)) as router, ChatClient(router.url) as client:
        with pytest.raises(Unavailable) as caught:
            await client.model()
    assert caught.value.message.startswith(f"{router.url}: its certificate is not trusted: ")
    assert "SSL_CERT_FILE" in caught.value.message
