"""A soak's client keeps answers whole, tells every way in which a request can end, and finds what differs."""

import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from bench.soak.request_mix import PlannedRequest, Template
from bench.soak.whole_answers import SoakAnswer, SoakChoice, SoakClient, SoakOutcome

COMPLETION = Template("t0", False, {"prompt": "x"})
CHAT = Template("t1", True, {"messages": [{"role": "user", "content": "x"}]})
LOGPROBS = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -1.0}], "text_offset": [0]}
CONTENT = {"content": [{"token": "a", "logprob": -0.5, "top_logprobs": [{"token": "a", "logprob": -0.5}]}]}


def chunk(text="", *, chat=False, logprobs=None, **part):
    shape = {"delta": {"content": text}} if chat else {"text": text}
    return {"choices": [{"index": 0, "logprobs": logprobs, "finish_reason": None, **shape, **part}]}


def usage(tokens):
    return {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": tokens, "total_tokens": 4 + tokens}}


def stream(*events, done=True):
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + ("data: [DONE]\n\n" if done else "")


@asynccontextmanager
async def client_of(text="", *, status=200, timeout_s=10.0, retry_after=None, silent=False):
    """A client of a server that always says this."""

    async def answer(_):
        headers = {"Retry-After": retry_after} if retry_after else {}
        if not silent:
            return web.Response(text=text, status=status, headers=headers)
        response = web.StreamResponse()
        await response.prepare(_)
        await response.write(text.encode())
        await request_gone.wait()
        return response

    import asyncio

    request_gone = asyncio.Event()
    app = web.Application()
    app.add_routes([web.post(path, answer) for path in ("/v1/completions", "/v1/chat/completions")])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        async with SoakClient(f"http://{host}:{port}", "tiny", timeout_s) as client:
            yield client
    finally:
        request_gone.set()
        await runner.cleanup()


async def test_a_streamed_answer_equals_the_whole_one():
    parts = [chunk("a", logprobs=LOGPROBS), chunk("bc", finish_reason="stop", stop_reason="x"), usage(3)]
    whole = chunk("abc", logprobs=LOGPROBS, finish_reason="stop", stop_reason="x") | usage(3) | {}
    whole["choices"] = chunk("abc", logprobs=LOGPROBS, finish_reason="stop", stop_reason="x")["choices"]
    async with client_of(stream(*parts)) as client:
        streamed = await client.send(PlannedRequest(COMPLETION, True))
    async with client_of(json.dumps(whole)) as client:
        at_once = await client.send(PlannedRequest(COMPLETION, False))
    assert (streamed.end, at_once.end) == ("answered", "answered")
    assert (
        streamed.answer
        == at_once.answer
        == SoakAnswer([SoakChoice("abc", streamed.answer.choices[0].tokens, "stop", "x")], 4, 3)
    )
    assert streamed.answer.choices[0].tokens == [("a", -0.5, {"a": -0.5, "b": -1.0})]
    assert len(streamed.event_s) == 2


async def test_a_chat_is_read_as_well():
    parts = [
        chunk(chat=True),
        chunk("a", chat=True, logprobs=CONTENT),
        chunk(chat=True, finish_reason="length"),
        usage(1),
    ]
    async with client_of(stream(*parts)) as client:
        outcome = await client.send(PlannedRequest(CHAT, True))
    assert outcome.answer == SoakAnswer([SoakChoice("a", [("a", -0.5, {"a": -0.5})], "length")], 4, 1)


@pytest.mark.parametrize(
    ("text", "options", "end", "code"),
    [
        ('{"error": {"code": "overloaded"}}', {"status": 429, "retry_after": "2"}, "refused", "429 overloaded"),
        ('{"error": {"code": "no_worker"}}', {"status": 503, "retry_after": "1"}, "refused", "503 no_worker"),
        ('{"error": {"code": "overloaded"}}', {"status": 429}, "failed", "429 overloaded"),
        ('{"error": {"code": "internal"}}', {"status": 500, "retry_after": "1"}, "failed", "500 internal"),
        (stream(chunk("a"), done=False), {}, "failed", "broken_off"),
        (stream({"error": {"code": "worker_lost", "message": "gone"}}), {}, "failed", "worker_lost"),
        ("data: nonsense\n\n", {}, "failed", "unreadable: "),
        (stream(chunk("a", finish_reason="stop"), chunk("b")), {}, "failed", "unreadable: "),
        (stream(chunk("a"), done=False), {"silent": True, "timeout_s": 0.2}, "hung", ""),
    ],
)
async def test_every_other_end_is_told(text, options, end, code):
    async with client_of(text, **options) as client:
        outcome = await client.send(PlannedRequest(COMPLETION, True))
    assert outcome.end == end
    assert outcome.code.startswith(code)
    assert bool(outcome.code) == bool(code)


@pytest.mark.parametrize("plan", [{"leave_after_events": 1}, {"leave_after_s": 0.1}])
async def test_a_client_that_leaves_has_what_had_come(plan):
    async with client_of(stream(chunk("a"), done=False), silent=True) as client:
        outcome = await client.send(PlannedRequest(COMPLETION, True, **plan))
    assert (outcome.end, outcome.answer.choices[0].text) == ("aborted", "a")


WHOLE = SoakAnswer([SoakChoice("abc", [("a", -1.0, {}), ("b", -2.0, {})], "stop", None)], 4, 3)


def seen(text="abc", tokens=2, finish="stop", completion=3, end="answered"):
    answer = SoakAnswer([SoakChoice(text, WHOLE.choices[0].tokens[:tokens], finish)], 4, completion)
    return SoakOutcome(PlannedRequest(COMPLETION, True), answer, end)


@pytest.mark.parametrize(
    ("outcome", "wrong"),
    [
        (seen(), False),
        (seen("abd"), True),
        (seen(tokens=1), True),
        (seen(finish="length"), True),
        (seen(completion=2), True),
        (seen("ab", 1, None, 0), True),  # answered, but not all of it
        (seen("ab", 1, None, 0, "aborted"), False),
        (seen("", 0, None, 0, "refused"), False),
        (seen("ac", 1, None, 0, "aborted"), True),
        (seen("abcd", 2, None, 0, "failed"), True),
        (seen("ab", 1, "stop", 0, "aborted"), True),  # it ended too early
        (seen(end="hung"), False),
    ],
)
def test_what_differs_from_the_reference_is_wrong(outcome, wrong):
    assert outcome.wrong(WHOLE) is wrong


def test_a_token_with_another_logprob_is_wrong():
    other = seen()
    other.answer.choices[0].tokens = [("a", -1.0, {}), ("b", -2.0000001, {})]
    assert other.wrong(WHOLE)
