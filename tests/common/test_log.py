"""Logs are one line an event, in text or JSON, and never carry prompts, keys or handle ids."""

import asyncio
import io
import json
import logging

import pytest

from common.errors import ConfigError
from common.log import FORMAT_ENV, get_logger, log_event, request_id, setup_logging

pytestmark = pytest.mark.usefixtures("restored_logging")


def logged(event: str, /, *, level: str = "info", at: int = logging.INFO, log_format: str = "text", **values) -> str:
    stream = io.StringIO()
    setup_logging(level, "prefill", "p1", stream=stream, environ={FORMAT_ENV: log_format})
    log_event(get_logger("test"), at, event, **values)
    return stream.getvalue()


def test_an_event_is_one_line_with_time_level_source_and_values():
    line = logged("worker ready", address="127.0.0.1:4000", epoch=12, load=0.25, note="two words", empty="")
    time, rest = line.split(" ", 1)
    assert rest == (
        'info prefill/p1 worker ready address=127.0.0.1:4000 epoch=12 load=0.25 note="two words" empty=""\n'
    )
    assert len(time) == len("2025-01-31T12:00:00.000Z")
    assert time.endswith("Z")


@pytest.mark.parametrize("text", ["a\nb", "a\r\nb", "\x1b[2J", 'say "x"', "ünï"])
def test_line_breaks_and_control_characters_of_values_are_escaped(text):
    line = logged("odd", value=text)
    assert line.count("\n") == 1
    assert line.isprintable() or line[:-1].isprintable()
    assert json.loads(line.split("value=")[1]) == text


def test_line_breaks_of_the_event_are_escaped():
    assert logged("a\nb\rc").endswith("a\\nb\\rc\n")


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prompt", "tell me"),
        ("messages", "tell me"),
        ("api_key", "tell me"),
        ("Authorization", "tell me"),
        ("handle_id", "tell me"),
        ("handle", b"tell me"),
        ("ids", [77123, 77124]),
        ("ids", (77123,)),
        ("options", {"tell me": 77123}),
    ],
)
def test_secrets_are_never_logged(log_format, key, value):
    line = logged("request", log_format=log_format, **{key: value})
    assert "tell me" not in line
    assert "77123" not in line
    assert key in line


def test_json_is_one_object_a_line_and_values_cannot_shadow_its_fields():
    line = logged("step", log_format="json", role="x", event="y", infinite=float("inf"))
    entry = json.loads(line)
    assert line.count("\n") == 1
    assert {key: entry[key] for key in ("level", "role", "id", "event")} == {
        "level": "info",
        "role": "prefill",
        "id": "p1",
        "event": "step",
    }
    assert entry["values"] == {"role": "x", "event": "y", "infinite": "inf"}


@pytest.mark.parametrize(("level", "at", "seen"), [("info", logging.DEBUG, False), ("debug", logging.DEBUG, True)])
def test_the_level_decides_what_is_logged(level, at, seen):
    assert bool(logged("event", level=level, at=at)) is seen


def test_other_packages_are_heard_from_warning_on():
    stream = io.StringIO()
    setup_logging("debug", "router", stream=stream, environ={})
    logging.getLogger("somebody").info("chatter")
    logging.getLogger("somebody").warning("trouble")
    assert "chatter" not in stream.getvalue()
    assert stream.getvalue().endswith("warning router trouble\n")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_is_kept(log_format):
    try:
        raise ValueError("broken")
    except ValueError as error:
        text = logged("failed", log_format=log_format, exc_info=error)
    assert "ValueError: broken" in text
    assert all(line.startswith("    ") for line in text.splitlines()[1:])


def test_an_unknown_format_is_an_error():
    with pytest.raises(ConfigError, match=FORMAT_ENV):
        setup_logging("info", "router", environ={FORMAT_ENV: "xml"})


async def test_lines_of_a_task_name_the_request_it_works_for():
    async def work(name):
        request_id.set(name)
        await asyncio.sleep(0)
        return logged("odd", seen=1)

    lines = await asyncio.gather(*map(work, ("a", "b")))
    assert [line.split(" odd ")[1] for line in lines] == ["seen=1 request_id=a\n", "seen=1 request_id=b\n"]
    assert logged("odd", seen=1).endswith(" odd seen=1\n")
