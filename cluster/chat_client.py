"""The HTTP side of a chat with a running router, or with any server of the same API."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from common.deadlines import Deadlines
from common.errors import InvalidRequest, KVRelayError, Timeout, Unavailable

REPORT_HEADER = "X-KVRelay-Report"
ChatTurn = dict[str, str]


@dataclass(slots=True)
class ChatAnswer:
    """One answer as it came; `report` is router/pipeline/generation.py's Report, where it was asked for."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)


class ChatClient:
    """The HTTP side of a chat. Open with `async with`; every failure is a KVRelayError of one line."""

    def __init__(self, url: str, deadlines: Deadlines | None = None, api_key: str = "") -> None:
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        deadlines = deadlines or Deadlines()
        self.url = url.rstrip("/").removesuffix("/v1")
        silence_s = 2 * deadlines.keepalive_s + deadlines.rpc_s  # the router is never silent for longer
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=deadlines.connect_s, sock_read=silence_s)

    async def __aenter__(self) -> "ChatClient":
        self._session = aiohttp.ClientSession(timeout=self._timeout, headers=self._headers, read_bufsize=2**20)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def model(self) -> str:
        """The first model of the server."""
        return (await self.models())[0][0]

    async def models(self) -> list[tuple[str, int | None]]:
        """The server's models, each with its context length where the server tells it (vLLM's way); at least one."""
        with _one_line_errors(self.url):
            async with self._session.get(f"{self.url}/v1/models") as response:
                await _check(response)
                data = await response.read()
        try:
            models = [(str(model["id"]), model.get("max_model_len")) for model in json.loads(data)["data"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Unavailable(f"{self.url}/v1/models names no model") from error
        if not models:
            raise Unavailable(f"{self.url}/v1/models names no model")
        return models

    async def ask(
        self,
        messages: list[ChatTurn],
        on_text: Callable[[str], None],
        *,
        model: str,
        max_tokens: int,
        temperature: float | None = None,
        report: bool = False,
    ) -> ChatAnswer:
        """Streams one answer."""
        body: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": max_tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if temperature is not None:
            body["temperature"] = temperature
        headers = {REPORT_HEADER: "1"} if report else {}
        answer = ChatAnswer()
        with _one_line_errors(self.url):
            async with self._session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as response:
                await _check(response)
                async for line in response.content:
                    if not line.startswith(b"data:"):
                        continue  # comments keep the connection alive
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return answer
                    if text := _take(data, answer):
                        on_text(text)
        raise Unavailable(f"{self.url} broke the answer off")


def _take(data: bytes, answer: ChatAnswer) -> str:
    """Adds one event to the answer and returns its text. Raises KVRelayError for an error event."""
    try:
        chunk = json.loads(data)
        if "error" in chunk:
            raise KVRelayError(chunk["error"]["message"])
        answer.usage = chunk.get("usage") or answer.usage
        answer.report = chunk.get("kvrelay") or answer.report
        text = ""
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unavailable(f"this is no event of the chat completions API: {data[:80]!r}") from error
    answer.text += text
    return text


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    text = await response.text(errors="replace")
    try:
        reason = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        reason = text.strip()[:200] or response.reason
    raise KVRelayError(f"{response.status}: {reason}")


@contextlib.contextmanager
def _one_line_errors(url: str) -> Iterator[None]:
    try:
        yield
    except aiohttp.InvalidURL as error:
        raise InvalidRequest(f"--url: {url!r} is no HTTP address", field="url") from error
    except TimeoutError as error:
        raise Timeout(f"{url} is silent") from error
    except aiohttp.ClientConnectorCertificateError as error:  # first: it is one of the next kind without its reason
        reason = getattr(error.certificate_error, "verify_message", "") or error.certificate_error
        raise Unavailable(f"{url}: its certificate is not trusted: {reason} (SSL_CERT_FILE names your CA's)") from error
    except aiohttp.ClientConnectorError as error:
        raise Unavailable(f"can't reach {url}: {error.os_error.strerror or error}") from error
    except aiohttp.ClientError as error:
        raise Unavailable(f"{url}: {error}") from error
