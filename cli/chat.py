"""kvrelay chat: a conversation with a running router, or with any server of the same HTTP API."""

import argparse
import asyncio
import io
import os
import sys
from collections.abc import Mapping

from cluster.chat_client import ChatClient, ChatTurn
from common.errors import InvalidRequest, KVRelayError
from common.settings import listed

CONTROLS = {code: None for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}  # of terminals


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
            chat = Dialogue(client, model, arguments)
            if prompt is not None:
                runner.run(chat.say(prompt))
            else:
                _converse(runner, chat)
        finally:
            runner.run(client.__aexit__())
    return 0


class Dialogue:
    """The messages so far. A turn that fails or is interrupted is as if it had not been."""

    def __init__(self, client: ChatClient, model: str, arguments: argparse.Namespace) -> None:
        self.client, self.model = client, model
        self.messages: list[ChatTurn] = []
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


def _converse(runner: asyncio.Runner, chat: Dialogue) -> None:
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
