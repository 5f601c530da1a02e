"""Checks litellm against a running router: python check_litellm.py URL MODEL, in an environment of its own.

Prints a line for each check and ends with 1 if one fails. Imports nothing of kvrelay.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing outside is asked

import litellm

litellm.telemetry = False
MESSAGES = [{"role": "user", "content": "Hi."}]


def check(url: str, model: str) -> list[str]:
    """The names of what failed."""
    place = {"api_base": f"{url}/v1", "api_key": "none", "timeout": 60, "max_retries": 0}
    greedy = {**place, "temperature": 0, "max_tokens": 16}
    chat_model, text_model = f"openai/{model}", f"text-completion-openai/{model}"
    failed: list[str] = []

    def step(name: str, run: Callable[[], Any]) -> Any:
        try:
            value = run()
        except Exception as error:
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:300]}")
            failed.append(name)
            return None
        if value is False:
            print(f"FAILED {name}")
            failed.append(name)
        else:
            print(f"ok     {name}")
        return value

    def chat(**more: Any) -> Any:
        return litellm.completion(model=chat_model, messages=MESSAGES, **{**greedy, **more})

    def text(**more: Any) -> Any:
        return litellm.text_completion(model=text_model, prompt="Once upon", **{**greedy, **more})

    def joined(stream: Any) -> str:
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

    def joined_text(stream: Any) -> str:
        return "".join(chunk.choices[0].text or "" for chunk in stream if chunk.choices)

    async def asynchronous() -> str:
        reply = await litellm.acompletion(model=chat_model, messages=MESSAGES, **greedy)
        return said(reply)

    def raises(kind: type[Exception], **more: Any) -> bool:
        try:
            chat(**more)
        except kind:
            return True
        return False

    whole = step("chat", chat)
    wanted = whole.choices[0].message.content if whole else ""
    step("chat has usage", lambda: whole.usage.prompt_tokens > 0 and whole.usage.completion_tokens <= 16)
    step("chat, streamed, is the same", lambda: joined(chat(stream=True)) == wanted)
    step("chat, asynchronous, is the same", lambda: asyncio.run(asynchronous()) == wanted)
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    step("streamed usage", lambda: usage_of(chat(**with_usage)) == whole.usage.total_tokens)
    step("n", lambda: len(chat(n=2, temperature=0.8, seed=1).choices) == 2)
    seeded = {"temperature": 0.8, "seed": 1}
    step("seed", lambda: said(chat(**seeded)) == said(chat(**seeded)))
    stop = wanted[1:2] or "x"
    step("stop", lambda: said(chat(stop=[stop])) == wanted.partition(stop)[0])
    step("logprobs", lambda: len(chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content) > 0)
    step("parameters of vLLM", lambda: said(chat(temperature=1.0, extra_body={"top_k": 1})) == wanted)
    words = step("completion", text)
    step("completion, streamed, is the same", lambda: joined_text(text(stream=True)) == words.choices[0].text)
    step("a context error is litellm's own", lambda: raises(litellm.ContextWindowExceededError, max_tokens=10**6))
    step("a bad request is litellm's own", lambda: raises(litellm.BadRequestError, extra_body={"no_such_field": 1}))
    return failed


def said(reply: Any) -> str:
    return str(reply.choices[0].message.content)


def usage_of(stream: Any) -> int | None:
    found = [chunk.usage.total_tokens for chunk in stream if getattr(chunk, "usage", None)]
    return found[-1] if found else None


if __name__ == "__main__":
    sys.exit(1 if check(*sys.argv[1:3]) else 0)
