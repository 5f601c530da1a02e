"""What a client sees of one request, event by event, in a form that can be compared."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp

BROKEN = "broken connection"


@dataclass(slots=True)
class Choice:
    """One answer; logprobs are compared bit for bit."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def begins_with(self, part: "Choice") -> bool:
        """Whether the part is what this choice was at some moment."""
        return all(
            getattr(self, name)[: len(value)] == value
            for name in ("text", "tokens", "logprobs", "top", "offsets")
            for value in (getattr(part, name),)
        )

    def add(self, part: dict[str, Any]) -> None:
        assert self.finish_reason is None, "something came after the end"
        self.text += part["text"]
        self.finish_reason, self.stop_reason = part["finish_reason"], part.get("stop_reason")
        if logprobs := part.get("logprobs"):
            self.tokens += logprobs["tokens"]
            self.logprobs += logprobs["token_logprobs"]
            self.top += logprobs["top_logprobs"]
            self.offsets += logprobs["text_offset"]


@dataclass(slots=True)
class Answer:
    """A request's whole outcome: its choices and usage, or its one error."""

    choices: list[Choice]
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None  # a status and a code, or BROKEN


class Asked:
    """A request on its way, streamed; `times` are those of its events with tokens, in seconds of the loop's clock."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.times: list[float] = []
        self.report: dict[str, Any] = {}
        self._body = body | {"stream": True, "stream_options": {"include_usage": True}}
        self._answer = Answer([Choice() for _ in range(body.get("n", 1))])
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._run(url))

    async def reached(self, events: int, timeout_s: float = 30.0) -> None:
        """Returns when so many events with tokens have come."""
        async with asyncio.timeout(timeout_s):
            while len(self.times) < events:
                assert not self._task.done(), f"it ended after {len(self.times)} events: {self._answer.error}"
                self._news.clear()
                await self._news.wait()

    async def answer(self, timeout_s: float = 60.0) -> Answer:
        async with asyncio.timeout(timeout_s):
            return await self._task

    def cancel(self) -> None:
        self._task.cancel()

    async def _run(self, url: str) -> Answer:
        answer, connector = self._answer, aiohttp.TCPConnector(force_close=True)
        headers = {"X-KVRelay-Report": "1"}
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session,
                session.post(f"{url}/v1/completions", json=self._body, headers=headers) as reply,
            ):
                if reply.status != 200:
                    answer.error = f"{reply.status} {(await reply.json())['error']['code']}"
                    return answer
                done = False
                async for line in reply.content:
                    done = self._take(line.decode().strip()) or done
                if not (done or answer.error):
                    answer.error = BROKEN
        except aiohttp.ClientError:
            answer.error = BROKEN
        finally:
            self._news.set()
        return answer

    def _take(self, line: str) -> bool:
        """Whether this line ends the stream."""
        if not line.startswith("data: "):
            return False
        if line == "data: [DONE]":
            return True
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            self._answer.error = f"event {event['error']['code']}"
            return True
        for part in event["choices"]:
            self._answer.choices[part["index"]].add(part)
            self.times.append(asyncio.get_running_loop().time())
            self._news.set()
        if usage := event.get("usage"):
            self._answer.prompt_tokens = usage["prompt_tokens"]
            self._answer.completion_tokens = usage["completion_tokens"]
        self.report = event.get("kvrelay", self.report)
        return False
