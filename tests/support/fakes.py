"""Stand-ins that several tests share."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from router.pipeline.generation import Delta, Generation, GenerationRequest

Step = Delta | Exception | asyncio.Event | float


class FakePipeline:
    """Plays a script for each generation: yields Deltas, raises Exceptions, waits for Events or some seconds."""

    def __init__(self, *steps: Step, script: Callable[[GenerationRequest], Sequence[Step]] | None = None) -> None:
        self._script = script or (lambda request: steps)
        self.generations: list[Generation] = []
        self.running: set[str] = set()  # request ids
        self.yielded = 0  # deltas

    @property
    def requests(self) -> list[GenerationRequest]:
        return [generation.request for generation in self.generations]

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        request, report = generation.request, generation.report
        self.generations.append(generation)
        self.running.add(request.request_id)
        report.prompt_tokens = len(request.prompt_ids)
        report.cached_tokens = 1
        report.router_queue_s, report.prefill_queue_s, report.prefill_s = 0.25, 0.5, 1.5
        try:
            for step in self._script(request):
                match step:
                    case Delta():
                        report.completion_tokens += len(step.tokens)
                        self.yielded += 1
                        yield step
                    case Exception():
                        raise step
                    case asyncio.Event():
                        await step.wait()
                    case _:
                        await asyncio.sleep(step)
        finally:
            try:
                await asyncio.sleep(0)  # the real one takes a moment, too
            finally:
                self.running.discard(request.request_id)
