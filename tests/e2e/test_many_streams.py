"""Proves that of many streams at once through one router none is lost, and none gets another one's text."""

from pathlib import Path

from tests.support.many_streams import run

STREAMS = 200  # a thousand: python -m tests.support.many_streams


async def test_many_streams_at_once_each_get_their_own_answer(tmp_path: Path) -> None:
    outcome = await run(tmp_path, STREAMS)
    assert (outcome.complete, outcome.lost, outcome.mixed_up) == (STREAMS, 0, 0)
    assert outcome.tokens > STREAMS * 4
