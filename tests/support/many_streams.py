"""Many streams at once through one router over scripted workers: each answer depends on its prompt and is compared.

`python -m tests.support.many_streams --streams 1000` prints what became of them, what the process took,
and how late its event loop was. Clients, router and scripted workers share the process, so both are upper bounds.
"""

import argparse
import asyncio
import json
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.rpc.pb import types_pb2
from common.text.text_model import TextModel
from tests.support.fake_cluster import fake_cluster
from tests.support.fake_turns import EOS, Words, a_token
from tests.support.http_over import NAME, Over, http_over
from tests.support.tiny_text import model_directory

PATH = "/v1/completions"
TICK_S = 0.01
PATIENT = {"router_queue_s": 120.0, "request_s": 300.0, "prefill_s": 120.0, "decode_token_s": 120.0, "dead_s": 60.0}


class WordsOfPrompts(Words):
    """An answer is drawn by its prompt; nobody else's prompt draws the same."""

    def token(self, submission: types_pb2.Submission, fork: int, index: int) -> types_pb2.Token:
        answer = answer_to(tuple(submission.prompt_ids), fork)
        last = index == len(answer) - 1
        return a_token(fork, index, answer[index], "stop" if last else "")


def answer_to(prompt_ids: tuple[int, ...], fork: int) -> list[int]:
    """Bytes in any order, so that characters are split, joined and broken."""
    draw = random.Random(f"{prompt_ids} {fork}")
    return [*(draw.randrange(4, 390) for _ in range(draw.randrange(4, 40))), EOS]


@dataclass
class Outcome:
    streams: int
    complete: int = 0
    lost: int = 0  # without [DONE], or refused
    mixed_up: int = 0  # with another text than their own
    seconds: float = 0.0
    tokens: int = 0
    peak_mib: int = 0
    lag_p50_ms: float = 0.0
    lag_p99_ms: float = 0.0
    lag_max_ms: float = 0.0


@contextmanager
def watched(late: list[float]) -> Iterator[None]:
    """Collects how much later than due the event loop comes to a task that only sleeps."""

    async def tick() -> None:
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            late.append(time.perf_counter() - due)

    task = asyncio.create_task(tick())
    try:
        yield
    finally:
        task.cancel()


async def run(directory: Path, streams: int) -> Outcome:
    """All at the same time; every fourth has two answers."""
    text = TextModel.load(model_directory(directory))
    outcome = Outcome(streams)
    late: list[float] = []
    async with fake_cluster(text, prefill=2, decode=2, **PATIENT) as cluster:
        words = WordsOfPrompts(held=cluster.words.held)
        for worker in cluster.fakes:
            worker.words = words
            worker.load.total_blocks = worker.load.free_blocks = streams * 100
        async with http_over(cluster.pipeline, text, max_model_len=512, deadlines=cluster.deadlines) as http:
            began = time.perf_counter()
            with watched(late):
                await asyncio.gather(*(one(http, text, number, outcome) for number in range(streams)))
            outcome.seconds = round(time.perf_counter() - began, 2)
    late.sort()
    for name, share in (("lag_p50_ms", 0.5), ("lag_p99_ms", 0.99), ("lag_max_ms", 1.0)):
        setattr(outcome, name, round(late[min(int(share * len(late)), len(late) - 1)] * 1e3, 1))
    outcome.peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return outcome


async def one(http: Over, text: TextModel, number: int, outcome: Outcome) -> None:
    prompt = (10, *(4 + int(digit) for digit in f"{number:05d}"), 11)
    n = 2 if number % 4 == 0 else 1
    body: dict[str, Any] = {"model": NAME, "prompt": list(prompt), "n": n, "max_tokens": 60}
    streamed = None
    with suppress(OSError, TimeoutError, AssertionError):
        streamed = await http.stream(PATH, body)
    if streamed is None or not streamed.done:
        outcome.lost += 1
        return
    for fork in range(n):
        ids = answer_to(prompt, fork)
        decoder = text.detokenizer(skip_special_tokens=True)
        wanted = decoder.push(ids[:-1]) + decoder.finish()
        outcome.tokens += len(ids)
        if (streamed.text(fork), streamed.ends(fork)) != (wanted, ["stop"]):
            outcome.mixed_up += 1
            return
    outcome.complete += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(asdict(asyncio.run(run(Path(directory), arguments.streams))), indent=1))


if __name__ == "__main__":
    main()
