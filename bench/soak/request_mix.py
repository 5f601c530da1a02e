"""The requests of a soak: of many kinds, made from a seed alone, each with an answer that is always the same."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WORDS = ("river", "stone", "seven", "lamp", "quiet", "north", "table", "green", "paper", "copper", "morning", "orchard")
CHARS = (1, 15, 16, 17, 31, 60, 250, 700, 1500)  # of prompts
SHARED = (0, 0, 32, 320)  # characters that a prompt has in common with others
MAX_TOKENS = (1, 2, 3, 16, 17, 40, 100)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": -1},
    {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.5, "seed": 12345},
    {"temperature": 1.2, "min_p": 0.02, "seed": 99},
)
STOP_IDS = list(range(40, 120, 3))
PRINTABLE = re.compile(r"[!-~]{1,3}")


@dataclass(frozen=True, slots=True)
class Template:
    """One request that is sent again and again; neither model nor streaming is part of it."""

    name: str
    chat: bool
    body: dict[str, Any]

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def n(self) -> int:
        return int(self.body.get("n", 1))


def make_templates(count: int, seed: int, max_model_len: int) -> list[Template]:
    """Random ones; a character is taken for a token, so that even a model without merges has room for all."""
    numbers = random.Random(f"{seed}/templates")
    shared = _text(numbers, max(SHARED))
    return [_template(f"t{index}", numbers, shared, max_model_len) for index in range(count)]


def _template(name: str, numbers: random.Random, shared: str, max_model_len: int) -> Template:
    chat, max_tokens = numbers.random() < 0.4, numbers.choice(MAX_TOKENS)
    body: dict[str, Any] = {"max_tokens": max_tokens, **numbers.choice(SAMPLING)}
    room = max(1, max_model_len - max_tokens - 100)  # 100 for a chat template
    own = _text(numbers, numbers.choice(CHARS))
    prompt = (shared[: numbers.choice(SHARED)] + own)[-room:]
    if chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if numbers.random() < 0.4:
        body["n"] = numbers.choice((2, 3))
    if numbers.random() < 0.3:
        body["ignore_eos"] = True
    if numbers.random() < 0.2:
        body["stop_token_ids"] = STOP_IDS
    if numbers.random() < 0.2:
        body["min_tokens"] = max_tokens // 2
    if numbers.random() < 0.4:
        body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    return Template(name, chat, body)


def with_stop(template: Template, text: str) -> Template | None:
    """The same request with a stop string out of the middle of its answer; None where nothing there can be one."""
    found = PRINTABLE.search(text, len(text) // 3)
    if found is None:
        return None
    return Template(f"{template.name}-stop", template.chat, template.body | {"stop": [found[0], "\0never"]})


def _text(numbers: random.Random, chars: int) -> str:
    words: list[str] = []
    while sum(map(len, words)) + len(words) < chars:
        words.append(numbers.choice(WORDS))
    return " ".join(words)[:chars]


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """How one request is sent, and when its client leaves: after so many seconds or events; never, if neither."""

    template: Template
    stream: bool
    leave_after_s: float | None = None
    leave_after_events: int | None = None


def draw(templates: Sequence[Template], numbers: random.Random, aborts: float) -> PlannedRequest:
    """A random one; `aborts` is the share of clients that leave: queued, at the first token, or in the middle."""
    template, stream = numbers.choice(templates), numbers.random() < 0.6
    if numbers.random() >= aborts:
        return PlannedRequest(template, stream)
    if not stream or numbers.random() < 0.3:
        return PlannedRequest(template, stream, leave_after_s=numbers.choice((0.0, 0.002, 0.02, 0.1, 0.5)))
    return PlannedRequest(template, True, leave_after_events=numbers.choice((1, 1, 2, 5, 20)))
