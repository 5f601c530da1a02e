"""Log-probabilities of prompt tokens are transformers', once each, whatever the chunks, the pools and what fails."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM

from common.block_hash import BLOCK_SIZE
from common.sampling import SamplingParams
from router.pipeline.generation import Generation, GenerationRequest
from tests.support.checkpoints import make_random_checkpoint
from tests.support.in_process_cluster import LocalCluster, local_cluster
from tests.support.recompute import Recompute, prompt
from tests.support.redis_process import RedisServer

pytestmark = pytest.mark.asyncio(loop_scope="module")
PARAMS = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, prompt_logprobs=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[1, 0], ids=["split", "unsplit"])
async def cluster(
    request: pytest.FixtureRequest, model: Path, redis_server: RedisServer
) -> AsyncIterator[LocalCluster]:
    async with local_cluster(model, redis_server.url, prefill=request.param, prefill_tokens=200) as cluster:
        yield cluster


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def all_free(cluster: LocalCluster) -> AsyncIterator[None]:
    yield
    await cluster.assert_all_free()


async def run(cluster: LocalCluster, ids: list[int], params: SamplingParams = PARAMS, **more: Any) -> Generation:
    generation = Generation(GenerationRequest(f"r{len(ids)}-{more}"[:40], tuple(ids), params, **more))
    complete = []
    async for delta in cluster.pipeline.generate(generation):
        complete.append(len(generation.prompt_logprobs) == len(ids) - 1)
        assert delta.tokens
    assert all(complete)
    return generation


def check(generation: Generation, reference: LlamaForCausalLM) -> None:
    ids, top = list(generation.request.prompt_ids), generation.request.params.prompt_logprobs
    with torch.inference_mode():
        wanted = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert len(generation.prompt_logprobs) == len(ids) - 1
    for position, (chosen, *best) in enumerate(generation.prompt_logprobs, 1):
        row = wanted[position - 1]
        assert chosen.token_id == ids[position]
        assert chosen.logprob == pytest.approx(float(row[chosen.token_id]), abs=1e-4)
        assert float(row.sort(descending=True).values[chosen.rank - 1]) == pytest.approx(chosen.logprob, abs=1e-4)
        assert [entry.rank for entry in best] == list(range(1, top + 1))
        assert [entry.logprob for entry in best] == pytest.approx(row.topk(top).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("length", [1, 2, BLOCK_SIZE + 1, 127, 128, 129, 130, 190])
async def test_are_those_of_transformers(cluster: LocalCluster, reference: LlamaForCausalLM, length: int) -> None:
    check(await run(cluster, prompt(length, seed=length)), reference)


@pytest.mark.parametrize("top", [0, 5])
async def test_have_as_many_alternatives_as_asked_for(
    cluster: LocalCluster, reference: LlamaForCausalLM, top: int
) -> None:
    check(await run(cluster, prompt(20, seed=top), replace(PARAMS, prompt_logprobs=top)), reference)


async def test_ignore_what_is_cached_and_change_no_token(
    cluster: LocalCluster, model: Path, reference: LlamaForCausalLM
) -> None:
    ids, plain = prompt(100, seed=5), replace(PARAMS, prompt_logprobs=None)
    await cluster.answer(ids, plain)
    hit = await cluster.answer(ids, plain)
    generation = await run(cluster, ids, n=2)
    check(generation, reference)
    assert (hit.report.cached_tokens, generation.report.cached_tokens) == (96, 0)
    answered = await cluster.answer(ids, PARAMS, n=2)
    assert answered.tokens == [Recompute.of(model, "float32")(ids, PARAMS)] * 2


def fail(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, step: int) -> list[range]:
    """Makes that forward pass fail, whosever it is; what the others score, as they do."""
    steps = 0
    scored: list[range] = []
    for local in cluster.local:

        def failing(batch: Any, forward: Any = local.worker.engine._runner.forward) -> Any:
            nonlocal steps
            steps += 1
            if steps == step + 1:
                raise RuntimeError("broken")
            scored.extend(chunk.scored for chunk in batch.chunks if chunk.scored)
            return forward(batch)

        monkeypatch.setattr(local.worker.engine._runner, "forward", failing)
    return scored


@pytest.mark.parametrize("step", [0, 1, 2, 3])
async def test_survive_a_failed_step(
    cluster: LocalCluster, reference: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Of whichever worker takes it: in the middle of the prompt, or when the scores are here already."""
    scored = fail(cluster, monkeypatch, step)
    generation = await run(cluster, prompt(150, seed=step))
    check(generation, reference)
    assert generation.report.attempts == 2
    assert max(map(len, scored)) <= 128


async def test_are_not_computed_again_once_they_are_here(
    cluster: LocalCluster, reference: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = fail(cluster, monkeypatch, step=3 if cluster.prefill else 6)  # the last one
    generation = await run(cluster, prompt(150, seed=6))
    check(generation, reference)
    assert generation.report.attempts == 2
    assert sum(map(len, scored)) == 149
