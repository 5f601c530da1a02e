"""A client that keeps whole answers, of both endpoints, streamed or not, so that they can be compared bit for bit."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.soak.request_mix import PlannedRequest
from common.errors import KVRelayError, from_wire

CONNECT_S = 10.0
REFUSALS = (429, 503)
BROKEN_OFF = "broken_off"  # the connection ended before the answer did


@dataclass(slots=True)
class SoakChoice:
    """One answer. A token is (text, logprob, the top ones), where logprobs were asked for."""

    text: str = ""
    tokens: list[tuple[str, float, dict[str, float]]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def begins(self, whole: "SoakChoice") -> bool:
        """Whether this is what `whole` was at some moment."""
        if self.finish_reason is not None:
            return self == whole
        return whole.text.startswith(self.text) and whole.tokens[: len(self.tokens)] == self.tokens


@dataclass(slots=True)
class SoakAnswer:
    """All choices, and usage but for what depends on caches."""

    choices: list[SoakChoice]
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def begins(self, whole: "SoakAnswer") -> bool:
        return all(part.begins(choice) for part, choice in zip(self.choices, whole.choices, strict=True))


@dataclass(slots=True)
class SoakOutcome:
    """What came of one request. Times are time.perf_counter's."""

    plan: PlannedRequest
    answer: SoakAnswer
    end: str = ""  # answered, refused, aborted, hung or failed
    code: str = ""  # of a failure or refusal
    sent_s: float = 0.0
    event_s: list[float] = field(default_factory=list)  # of each event with something new in it
    ended_s: float = 0.0

    def wrong(self, reference: SoakAnswer) -> bool:
        """Whether the client saw something that it should not have seen; a part of an answer must be its beginning."""
        return self.answer != reference if self.end == "answered" else not self.answer.begins(reference)


class SoakClient:
    """One server and one model of it. Open with `async with`; requests have `timeout_s` each."""

    def __init__(self, url: str, model: str, timeout_s: float) -> None:
        self._url = url
        self._model = model
        self._timeout_s = timeout_s

    async def __aenter__(self) -> "SoakClient":
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=2**20,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def send(self, plan: PlannedRequest) -> SoakOutcome:
        """To its end, or until the client leaves; every failure is an outcome."""
        outcome = SoakOutcome(
            plan, SoakAnswer([SoakChoice() for _ in range(plan.template.n)]), sent_s=time.perf_counter()
        )
        leaving = plan.leave_after_s is not None and plan.leave_after_s < self._timeout_s
        limit_s = plan.leave_after_s if leaving else self._timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._run(plan, outcome)
        except TimeoutError:
            outcome.end = "aborted" if leaving else "hung"
        except KVRelayError as error:
            outcome.end, outcome.code = "failed", error.code
        except aiohttp.ClientError:
            outcome.end, outcome.code = "failed", BROKEN_OFF
        except (ValueError, KeyError, TypeError, IndexError) as error:
            outcome.end, outcome.code = "failed", f"unreadable: {error!r}"[:100]
        outcome.ended_s = time.perf_counter()
        return outcome

    async def _run(self, plan: PlannedRequest, outcome: SoakOutcome) -> None:
        body = plan.template.body | {"model": self._model}
        if plan.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self._session.post(self._url + plan.template.path, json=body) as response:
            if response.status != 200:
                code = json.loads(await response.read())["error"]["code"]
                refused = response.status in REFUSALS and response.headers.get("Retry-After", "").isdecimal()
                outcome.end, outcome.code = "refused" if refused else "failed", f"{response.status} {code}"
                return
            if not plan.stream:
                _take(json.loads(await response.read()), outcome)
                outcome.end = "answered"
                return
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    outcome.end = "answered"
                    return
                _take(json.loads(data), outcome)
                if plan.leave_after_events is not None and len(outcome.event_s) >= plan.leave_after_events:
                    outcome.end = "aborted"
                    response.close()
                    return
        outcome.end, outcome.code = "failed", BROKEN_OFF


def _take(event: dict[str, Any], outcome: SoakOutcome) -> None:
    """One chunk, or the whole reply."""
    if "error" in event:
        raise from_wire(event["error"]["code"], event["error"]["message"])
    answer = outcome.answer
    for part in event["choices"]:
        choice = answer.choices[part["index"]]
        if choice.finish_reason is not None:
            raise ValueError("something came after the end")
        message = part.get("message") or part.get("delta") or {}
        choice.text += part.get("text") or message.get("content") or ""
        choice.tokens += _tokens(part.get("logprobs") or {})
        choice.finish_reason, choice.stop_reason = part.get("finish_reason"), part.get("stop_reason")
    if event["choices"]:
        outcome.event_s.append(time.perf_counter())
    if usage := event.get("usage"):
        answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]


def _tokens(logprobs: dict[str, Any]) -> list[tuple[str, float, dict[str, float]]]:
    """Of either endpoint's shape."""
    if content := logprobs.get("content"):
        return [
            (one["token"], one["logprob"], {top["token"]: top["logprob"] for top in one["top_logprobs"]})
            for one in content
        ]
    names = ("tokens", "token_logprobs", "top_logprobs")
    return list(zip(*(logprobs.get(name) or [] for name in names), strict=True))
