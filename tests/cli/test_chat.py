"""A chat streams answers, keeps its history, and tells every failure of the server in one line."""

import asyncio
import contextlib
import os
import pty
import signal
import socket
import sys

import pytest
from aiohttp import web

from cli.chat import first_key, show
from cluster.chat_client import REPORT_HEADER, ChatClient
from common.deadlines import Deadlines
from common.errors import InvalidRequest, KVRelayError, Timeout, Unavailable
from tests.support.fake_router import DONE, FakeRouter, event, running_router

pytestmark = pytest.mark.slow


@pytest.fixture
async def router():
    async with running_router() as fake:
        yield fake


async def ask(router: FakeRouter, *, url: str = "", deadlines: Deadlines | None = None, **options):
    pieces: list[str] = []
    async with ChatClient(url or router.url, deadlines) as client:
        messages = [{"role": "user", "content": "hi"}]
        answer = await client.ask(messages, pieces.append, model="tiny", max_tokens=9, **options)
    return answer, pieces


async def test_an_answer_comes_in_pieces_with_its_usage_and_report(router):
    router.events = [
        b": keep-alive\n\n",
        event(""),
        event("Hel"),
        event("lo\n"),
        event("ü", "stop"),
        event(usage={"prompt_tokens": 3}, kvrelay={"attempts": 1}),
        DONE,
    ]
    answer, pieces = await ask(router, report=True, temperature=0.0)
    assert pieces == ["Hel", "lo\n", "ü"]
    assert (answer.text, answer.finish_reason) == ("Hello\nü", "stop")
    assert (answer.usage, answer.report) == ({"prompt_tokens": 3}, {"attempts": 1})
    assert router.headers[0][REPORT_HEADER] == "1"
    assert router.requests[0]["temperature"] == 0.0
    assert router.requests[0]["stream_options"] == {"include_usage": True}


async def test_no_temperature_and_no_report_are_asked_for_unless_wanted(router):
    await ask(router)
    assert "temperature" not in router.requests[0]
    assert REPORT_HEADER not in router.headers[0]


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_the_address_may_end_as_people_write_it(router, suffix):
    answer, _ = await ask(router, url=router.url + suffix)
    assert answer.text == "echo hi"


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        (
            lambda: web.json_response({"error": {"message": "top_p is odd", "param": "top_p"}}, status=400),
            "400: top_p is odd",
        ),
        (lambda: web.json_response({"error": "down"}, status=503), '503: {"error": "down"}'),
        (lambda: web.Response(text="<html>", status=502), "502: <html>"),
        (lambda: web.Response(status=500), "500: Internal Server Error"),
    ],
)
async def test_a_refusal_is_told_with_its_status_and_reason(router, refusal, message):
    router.refusal = refusal()
    with pytest.raises(KVRelayError) as caught:
        await ask(router)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([event("Hel"), b'data: {"error": {"message": "worker lost"}}\n\n'], "worker lost"),
        ([event("Hel")], "broke the answer off"),
        ([], "broke the answer off"),
        ([b"data: {\n\n"], "no event"),
        ([b"data: []\n\n"], "no event"),
        ([b'data: {"choices": [{}]}\n\n'], "no event"),
    ],
)
async def test_an_answer_that_fails_on_its_way_is_an_error(router, events, message):
    router.events = events
    with pytest.raises(KVRelayError, match=message):
        await ask(router)


async def test_a_silent_server_is_given_up(router):
    router.events, router.hang = [event("Hel")], True
    with pytest.raises(Timeout, match="is silent"):
        await ask(router, deadlines=Deadlines().scaled(0.01))


async def test_a_server_that_is_not_there_is_named():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    async with ChatClient(url) as client:
        with pytest.raises(Unavailable, match=f"can't reach {url}: Connect"):
            await client.model()


@pytest.mark.parametrize(("keys", "wanted"), [("", None), ("a", "Bearer a"), (" a , b", "Bearer a")])
async def test_the_environments_key_is_shown(router, keys, wanted):
    async with ChatClient(router.url, api_key=first_key({"KVRELAY_API_KEY": keys})) as client:
        await client.ask([{"role": "user", "content": "hi"}], lambda text: None, model="tiny", max_tokens=9)
    assert router.headers[-1].get("Authorization") == wanted


@pytest.mark.parametrize("url", ["", "nowhere", "http://", "http://x:port"])
async def test_what_is_no_address_is_refused(url):
    async with ChatClient(url) as client:
        with pytest.raises((InvalidRequest, Unavailable)):
            await client.model()


def test_text_is_shown_as_it_is_where_no_terminal_is(capsys):
    show("a\x1b[2J\n")
    assert capsys.readouterr().out == "a\x1b[2J\n"


def test_a_terminal_is_not_steered_by_an_answer(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    show("a\x1b[2J\r\x9b\tü\n")
    assert capsys.readouterr().out == "a[2J\tü\n"


async def chat(router: FakeRouter, *arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """The command itself, its standard input a pipe."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", "chat", "--url", router.url, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(stdin), 30)
    return process.returncode, out.decode(), err.decode()


async def test_one_prompt_is_an_argument(router):
    status, out, err = await chat(router, "--system", "be short", "--max-tokens", "7", "hello there")
    assert (status, out, err) == (0, "echo hello there\n", "")
    assert router.requests[0]["messages"] == [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "hello there"},
    ]
    assert (router.requests[0]["model"], router.requests[0]["max_tokens"]) == ("tiny", 7)


async def test_one_prompt_is_standard_input(router):
    status, out, _ = await chat(router, stdin=b"hello\n\xff\n")
    assert (status, out) == (0, "echo hello\n\N{REPLACEMENT CHARACTER}\n")


async def test_an_empty_prompt_is_an_error(router):
    assert await chat(router, stdin=b" \n") == (2, "", "error: the prompt is empty\n")


async def test_a_failure_is_one_line_and_status_2(router):
    router.refusal = web.json_response({"error": {"message": "too\nbusy"}}, status=429)
    assert await chat(router, "hello") == (2, "", "error: 429: too busy\n")


async def test_a_conversation_on_a_terminal_keeps_its_history_and_survives_ctrl_c(router):
    parent, child = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", "chat", "--url", router.url), stdin=child, stdout=child, stderr=child
    )
    os.close(child)
    seen = ""

    async def until(text: str, after: int = 0) -> int:
        nonlocal seen
        async with asyncio.timeout(30):
            while text not in seen[after:]:
                try:
                    seen += (await asyncio.to_thread(os.read, parent, 4096)).decode()
                except OSError:  # the other side is closed
                    break
        assert text in seen[after:]
        return len(seen)

    try:
        at = await until("> ")
        os.write(parent, b"one\n")
        at = await until("echo one\r\n> ", at)
        router.events, router.hang = [event("half")], True
        os.write(parent, b"two\n")
        at = await until("half", at)
        process.send_signal(signal.SIGINT)
        at = await until("> ", at)
        router.events, router.hang = None, False
        os.write(parent, b"three\n")
        at = await until("echo three\r\n> ", at)
        os.write(parent, b"\x04")
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        os.close(parent)
    assert [message["content"] for message in router.requests[-1]["messages"]] == ["one", "echo one", "three"]
