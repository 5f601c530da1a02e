"""A client of the completions API that takes times: each event's, as it comes in. Works with any such server."""

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.serve.workload import TimedRequest
from cluster.chat_client import REPORT_HEADER

CONNECT_S = 10.0


@dataclass(slots=True)
class Outcome:
    """What came of one request; times are time.perf_counter's, in seconds."""

    request: TimedRequest
    due_s: float = 0.0  # when it should have been sent
    sent_s: float = 0.0
    text_s: list[float] = field(default_factory=list)  # of each event that brought text
    ended_s: float = 0.0
    completion_tokens: int = 0
    cached_tokens: int = 0
    report: dict[str, Any] = field(default_factory=dict)  # kvrelay's own; others have none
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def ttft_s(self) -> float:
        return self.text_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None where there is no second one."""
        later = self.completion_tokens - 1
        return (self.text_s[-1] - self.text_s[0]) / later if later > 0 else None

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.text_s, self.text_s[1:], strict=False)]


class CompletionsClient:
    """One server and one model of it. Open with `async with`."""

    def __init__(self, url: str, model: str, timeout_s: float) -> None:
        self._url = f"{url.rstrip('/').removesuffix('/v1')}/v1/completions"
        self._model = model
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)

    async def __aenter__(self) -> "CompletionsClient":
        connector = aiohttp.TCPConnector(limit=0)  # an open loop waits for nobody
        self._session = aiohttp.ClientSession(timeout=self._timeout, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def send(self, request: TimedRequest, due_s: float | None = None) -> Outcome:
        """Streams one answer to its end; a failure is an outcome, too."""
        body = {
            "model": self._model,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", REPORT_HEADER: "1"}
        outcome = Outcome(request)
        outcome.sent_s = time.perf_counter()
        outcome.due_s = outcome.sent_s if due_s is None else due_s
        lines: list[tuple[float, bytes]] = []  # looked at when the answer is complete: nothing else should take time
        try:
            async with self._session.post(self._url, data=data, headers=headers) as response:
                if response.status == 200:
                    async for line in response.content:
                        if line.startswith(b"data:"):
                            lines.append((time.perf_counter(), line[5:].strip()))
                else:
                    outcome.error = f"{response.status}: {(await response.text(errors='replace'))[:300]}"
        except (TimeoutError, aiohttp.ClientError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.ended_s = time.perf_counter()
        return outcome if outcome.error else read_events(outcome, lines)

    async def open_loop(self, requests: Sequence[TimedRequest]) -> list[Outcome]:
        """Sends each request when it is due, whatever became of those before."""
        start_s = time.perf_counter() + 0.05
        tasks = []
        try:
            for request in requests:
                due_s = start_s + request.at_s
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                tasks.append(asyncio.create_task(self.send(request, due_s)))
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def streams(self, streams: Sequence[Sequence[TimedRequest]]) -> list[Outcome]:
        """Each stream sends its requests one after another; all streams side by side. In the order of streams."""

        async def one(requests: Sequence[TimedRequest]) -> list[Outcome]:
            return [await self.send(request) for request in requests]

        return [outcome for outcomes in await asyncio.gather(*map(one, streams)) for outcome in outcomes]


def read_events(outcome: Outcome, lines: Iterable[tuple[float, bytes]]) -> Outcome:
    """Fills the outcome from events and when they came; an answer that is not complete is an error."""
    done, finished_s = False, None
    try:
        for at_s, data in lines:
            if data == b"[DONE]":
                done = True
                break
            chunk = json.loads(data)
            if "error" in chunk:
                outcome.error = str(chunk["error"].get("message") or chunk["error"])
                return outcome
            if any(choice.get("text") for choice in chunk["choices"]):
                outcome.text_s.append(at_s)
            if any(choice.get("finish_reason") for choice in chunk["choices"]):
                finished_s = at_s
            if usage := chunk.get("usage"):
                outcome.completion_tokens = usage["completion_tokens"]
                outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            outcome.report = chunk.get("kvrelay") or outcome.report
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        outcome.error = f"this is no event of the completions API: {error}"
        return outcome
    if not done:
        outcome.error = "the answer was broken off"
    elif not outcome.text_s:
        if finished_s is None or not outcome.completion_tokens:
            outcome.error = "the answer has no tokens"
        else:  # special tokens, or half a character: they were seen when the answer ended
            outcome.text_s.append(finished_s)
    return outcome
