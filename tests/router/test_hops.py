"""Proves how few files the body of a streamed chat passes in the router until token 0 leaves, and that docs list them.

What carries the request makes something of it or hands it on; what is asked answers a question and changes nothing.
Both lists are in docs/architecture.md; together they are the files whose functions are called, libraries and leaves of
common/ not counted.
"""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from common.text.text_model import TextModel
from router.http.bodies import Bodies
from router.http.sse import EventStream
from tests.router.test_api_cases_scripted import chat, served
from tests.support.fake_cluster import letters
from tests.support.paths import ROOT

MOST_CARRIERS, MOST_FILES = 15, 32
SECTION = "## A request's way through the router, file by file"
OURS = ("router", "common", "kvtransfer")


class CalledFiles:
    """Files of ours whose functions are called, for sys.setprofile: from a body's arrival to its first content."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._begun: set[FrameType] = set()  # a coroutine that goes on is no call
        self._on = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code is Bodies.read.__code__ and event == "return":
            self._on = True
        if event != "call" or frame in self._begun:
            return
        self._begun.add(frame)
        path = Path(code.co_filename)
        if self._on and path.is_relative_to(ROOT) and (place := path.relative_to(ROOT)).parts[0] in OURS:
            self.files.add(str(place))
        if code is EventStream._write.__code__ and '"content":"' in frame.f_locals["text"].replace('""', ""):
            self._on = False


def listed_files(kind: str) -> list[str]:
    """Of the section's list whose items begin so."""
    section = (ROOT / "docs/architecture.md").read_text().split(SECTION + "\n")[1].split("\n## ")[0]
    return re.findall(rf"^{kind} `([a-z_/0-9]+\.py)`", section, re.MULTILINE)


async def called_files(text: TextModel) -> set[str]:
    async with served(text) as (cluster, http):
        for once in (None, CalledFiles()):  # the first request builds what all share
            cluster.words.answers = [letters(text, "hello")]
            sys.setprofile(once)
            try:
                streamed = await http.stream("/v1/chat/completions", chat(max_tokens=5))
            finally:
                sys.setprofile(None)
            assert streamed.text() == "hello"
    return {file for file in once.files if not re.fullmatch(r"common/\w+\.py", file)}


async def test_a_streamed_chat_passes_few_files_and_the_docs_list_them(text: TextModel) -> None:
    carriers, asked = listed_files(r"\d+\."), listed_files("-")
    called = await called_files(text)
    assert called == {*carriers, *asked}
    assert len(carriers) == len(set(carriers)) <= MOST_CARRIERS
    assert len(called) <= MOST_FILES
