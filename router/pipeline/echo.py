"""max_tokens 0: answers that are their prompts' echo and nothing more."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from router.pipeline.generation import Delta, Generation


async def echo_alone(generation: Generation, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
    """Every answer ends before its first token. `deltas` runs only if the prompt's log-probabilities are asked for.

    A worker then draws one token an answer, as vLLM does, which is dropped here and counted nowhere.
    """
    generation.report.prompt_tokens = len(generation.request.prompt_ids)
    if generation.request.params.prompt_logprobs is None:
        for index in range(generation.request.n):
            yield Delta(index, "", finish_reason="length")
        return
    async with aclosing(deltas):
        async for delta in deltas:
            generation.report.completion_tokens = 0
            yield Delta(delta.index, "", finish_reason="length")
