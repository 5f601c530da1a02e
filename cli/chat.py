"""kvrelay chat: a conversation with a running router, or with any server of the same HTTP API."""

import argparse
import asyncio
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from common.deadlines import Deadlines
from common.errors import InvalidRequest, KVRelayError, Timeout, Unavailable
from common.settings import listed

REPORT_HEADER = "X-KVRelay-Report"
CONTROLS = {code: None for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}  # of terminals
Message = dict[str, str]


@dataclass(slots=True)
class Answer:
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
        messages: list[Message],
        on_text: Callable[[str], None],
        *,
        model: str,
        max_tokens: int,
        temperature: float | None = None,
        report: bool = False,
    ) -> Answer:
        """Streams one answer."""
        body: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": max_tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if temperature is not None:
            body["temperature"] = temperature
        headers = {REPORT_HEADER: "1"} if report else {}
        answer = Answer()
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


def _take(data: bytes, answer: Answer) -> str:
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
    except aiohttp.ClientConnectorError as error:
        raise Unavailable(f"can't reach {url}: {error.os_error.strerror or error}") from error
    except aiohttp.ClientError as error:
        raise Unavailable(f"{url}: {error}") from error


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "chat",
        description="Talks to a running router: one prompt (an argument or standard input), or a conversation.",
    )
    parser.add_argument("prompt", nargs="?", help="one prompt (default: a conversation, or standard input if piped)")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the router (default: %(default)s)")
    parser.add_argument("--model", help="name in the API (default: the server's first)")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the server's)")


def first_key(environ: Mapping[str, str] = os.environ) -> str:
    """Of the keys that a router would take its own from; "" where there is none."""
    return next(iter(listed(environ.get("KVRELAY_API_KEY", ""))), "")


def run(arguments: argparse.Namespace) -> int:
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    prompt = arguments.prompt
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().strip()
    if prompt is not None and not prompt.strip():
        raise InvalidRequest("the prompt is empty", field="prompt")
    with asyncio.Runner() as runner:
        client = ChatClient(arguments.url, api_key=first_key())
        runner.run(client.__aenter__())
        try:
            model = arguments.model or runner.run(client.model())
            chat = Conversation(client, model, arguments)
            if prompt is not None:
                runner.run(chat.say(prompt))
            else:
                _converse(runner, chat)
        finally:
            runner.run(client.__aexit__())
    return 0


class Conversation:
    """The messages so far. A turn that fails or is interrupted is as if it had not been."""

    def __init__(self, client: ChatClient, model: str, arguments: argparse.Namespace) -> None:
        self.client, self.model = client, model
        self.messages: list[Message] = []
        self._max_tokens: int = arguments.max_tokens
        self._temperature: float | None = arguments.temperature
        if arguments.system:
            self.messages.append({"role": "system", "content": arguments.system})

    async def say(self, text: str) -> None:
        """One turn, printed as it comes."""
        messages = [*self.messages, {"role": "user", "content": text}]
        answer = await self.client.ask(
            messages, show, model=self.model, max_tokens=self._max_tokens, temperature=self._temperature
        )
        print(flush=True)
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]


def show(text: str) -> None:
    """Prints a piece of an answer; on a terminal without what would steer it."""
    print(text.translate(CONTROLS) if sys.stdout.isatty() else text, end="", flush=True)


def _converse(runner: asyncio.Runner, chat: Conversation) -> None:
    import readline  # noqa: F401  (gives input() its line editing and history)

    print(f"{chat.model} at {chat.client.url}; Ctrl-C stops an answer, Ctrl-D ends the conversation.")
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        if not text:
            continue
        try:
            runner.run(chat.say(text))
        except KeyboardInterrupt:
            print()
        except KVRelayError as error:
            print(f"\nerror: {' '.join(error.message.split())}", file=sys.stderr)
