"""Requests without router and wire: python -m bench.router.inprocess, with Streams as JSON on standard input.

A step loop in its thread, as on a worker. Each stream's next request is added as soon as its last one ends.
"""

import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass, field

from bench.cpu_times import process_time
from bench.engines import build, greedy, settings
from bench.pinned import run_child
from common.deadlines import Deadlines
from common.engine.batch import StepOutput
from common.engine.config import DECODE_TOKENS
from common.engine.engine import Engine, EngineLoop
from common.engine.sequence import Sequence as EngineSequence
from common.errors import EngineFailure

LONGEST_S = 3600.0


@dataclass(frozen=True, slots=True)
class InprocessStreams:
    """What to run; prompts[stream][number]."""

    model: str
    dtype: str
    threads: int
    output_tokens: int
    prompts: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(slots=True)
class InprocessAnswer:
    """Seconds of time.perf_counter."""

    sent_s: float
    token_s: list[float] = field(default_factory=list)


class Driver:
    """Runs all streams; its callbacks run in the loop's thread."""

    def __init__(self, engine: Engine, wanted: InprocessStreams) -> None:
        self._engine = engine
        self._wanted = wanted
        self._answers: dict[tuple[int, int], InprocessAnswer] = {}
        self._open = len(wanted.prompts)
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> list[InprocessAnswer]:
        """In the order of streams."""
        loop = EngineLoop(self._engine, [self._take], self._fail, idle_s=Deadlines().heartbeat_s)
        for stream in range(len(self._wanted.prompts)):
            self._send(stream, 0)
        loop.start()
        finished = self._ended.wait(LONGEST_S)
        loop.stop(LONGEST_S)
        if self._error is not None or not finished:
            raise EngineFailure(f"the step loop failed: {self._error or 'it is too slow'}")
        return [answer for _, answer in sorted(self._answers.items())]

    def _send(self, stream: int, number: int) -> None:
        ids = list(self._wanted.prompts[stream][number])
        sequence = EngineSequence(f"{stream}/{number}", ids, len(ids), greedy(self._wanted.output_tokens))
        self._answers[stream, number] = InprocessAnswer(time.perf_counter())
        self._engine.add(sequence)

    def _take(self, output: StepOutput) -> None:
        now_s = time.perf_counter()
        if output.failed:
            self._fail(output.failed[0][1])
        for token in output.tokens:
            stream, number = map(int, token.sequence.key.split("/"))
            self._answers[stream, number].token_s.append(now_s)
            if token.finish_reason is not None:
                if number + 1 < len(self._wanted.prompts[stream]):
                    self._send(stream, number + 1)
                else:
                    self._open -= 1
        if not self._open:
            self._ended.set()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._ended.set()


def main() -> None:
    wanted = InprocessStreams(**json.load(sys.stdin))
    longest = max(len(prompt) for prompts in wanted.prompts for prompt in prompts) + wanted.output_tokens + 1
    config = settings(
        wanted.model,
        wanted.dtype,
        threads=wanted.threads,
        max_model_len=longest,
        max_num_seqs=len(wanted.prompts),
        caching=True,
    )
    built = build(config, DECODE_TOKENS)
    before = process_time(os.getpid())
    answers = Driver(built.engine, wanted).run()
    # one line for all, then one a request
    print(json.dumps({"cpu_s": (process_time(os.getpid()) - before).total_s}))
    for answer in answers:
        print(json.dumps(asdict(answer)))


if __name__ == "__main__":
    run_child(main)
