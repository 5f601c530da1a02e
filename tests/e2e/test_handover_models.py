"""Proves with real workers of two models that no KV goes from one to the other, and when an answer may."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.deadlines import Deadlines
from common.sampling import SamplingParams
from kvtransfer.holder import KVHolder
from router.pipeline.generation import Generation, GenerationRequest
from tests.support.checkpoints import make_random_checkpoint
from tests.support.in_process_cluster import LocalCluster, local_cluster
from tests.support.interruptions import cut_before
from tests.support.recompute import Recompute, prompt
from tests.support.redis_process import RedisServer
from tests.support.redis_tools import eventually
from tests.support.worker_stream import held_step

PROMPT = prompt(70)
SEEDED = SamplingParams(max_tokens=8, temperature=1.5, seed=21, ignore_eos=True, repetition_penalty=1.1)
DEADLINES = Deadlines(heartbeat_s=0.05, drain_s=0.2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same shape."""
    return make_random_checkpoint(tmp_path_factory.mktemp("other"), seed=1)


async def test_a_rolling_update_pairs_workers_of_one_model_only(
    model: Path, other: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every answer is wholly one model's; no reader connects to, or reads from, a holder of the other's."""
    models = {0: Recompute.of(model, "float32"), 1: Recompute.of(other, "float32")}
    prompts = [prompt(70, seed) for seed in range(8)]
    met: list[tuple[str, str]] = []
    connect = KVHolder.Connect

    async def noted(holder: KVHolder, request: Any, context: Any) -> Any:
        met.append((holder._fingerprint, request.fingerprint))
        return await connect(holder, request, context)

    monkeypatch.setattr(KVHolder, "Connect", noted)

    async def serve(cluster: LocalCluster, generations: set[int]) -> None:
        """Names of workers end with their generation."""
        for ids, answered in zip(
            prompts, await asyncio.gather(*(cluster.answer(ids, SEEDED) for ids in prompts)), strict=True
        ):
            report = answered.report
            generation = int(report.decode_worker[-1])
            assert generation in generations
            assert int(report.prefill_worker[-1]) == generation
            assert answered.tokens == [models[generation](ids, SEEDED)]
            assert report.attempts == 1
        cluster.forget_prefixes("decode")
        await cluster.assert_all_free()

    async def ready(cluster: LocalCluster) -> None:
        names = sorted(one.worker.info.worker_id for one in cluster.local)
        usable = cluster.workers.usable
        await eventually(lambda: sorted(c.record.worker_id for r in ("prefill", "decode") for c in usable(r)) == names)

    async with local_cluster(model, redis_server.url, deadlines=DEADLINES) as cluster:
        await serve(cluster, {0})
        [old_prefill, old_decode] = cluster.local
        new_decode = await cluster.start("decode", "decode-1", model=other)
        assert new_decode.worker.info.fingerprint != old_decode.worker.info.fingerprint
        await ready(cluster)
        await serve(cluster, {0, 1})
        await cluster.start("prefill", "prefill-1", model=other)
        await ready(cluster)
        await serve(cluster, {0, 1})
        await cluster.stop(old_prefill)
        await cluster.stop(old_decode)
        await ready(cluster)
        await serve(cluster, {1})
    assert {holders for holders, _ in met} == {readers for _, readers in met}
    assert len(set(met)) == 2
    assert all(holder == reader for holder, reader in met)


async def test_an_answer_resumes_on_the_model_that_has_begun_it(
    model: Path, other: Path, redis_server: RedisServer
) -> None:
    """Though workers of another one could take it at once."""
    params = replace(SEEDED, max_tokens=12)
    models = [Recompute.of(one, "float32") for one in (model, other)]
    async with local_cluster(model, redis_server.url, deadlines=DEADLINES) as cluster:
        for role in ("prefill", "decode"):
            await cluster.start(role, f"{role}-1", model=other)
        await eventually(lambda: len(cluster.workers.usable("decode")) == len(cluster.workers.usable("prefill")) == 2)
        for seed in range(4):
            ids = prompt(70, seed)
            with cut_before(cluster.decode[0], 3), cut_before(cluster.decode[1], 3):
                answered = await cluster.answer(ids, params)
            assert answered.report.attempts == 2
            assert answered.tokens == [models[int(answered.report.decode_worker[-1])](ids, params)]
            await cluster.assert_all_free()


@pytest.mark.parametrize("returns", [True, False])
async def test_another_model_goes_on_only_when_nobody_has_the_first_any_more(
    model: Path, other: Path, redis_server: RedisServer, returns: bool
) -> None:
    """The last workers of a model go in the middle of an answer: it waits for another of them, for dead_s."""
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    models = {0: model, 1: other}
    deadlines = replace(DEADLINES, dead_s=20.0 if returns else 0.5)
    async with local_cluster(model, redis_server.url, deadlines=deadlines) as cluster:
        for role in ("prefill", "decode"):
            await cluster.start(role, f"{role}-1", model=other)
        generation = Generation(GenerationRequest("begun", tuple(PROMPT), params))
        tokens: list[int] = []

        async def read() -> None:
            async with aclosing(cluster.pipeline.generate(generation)) as deltas:
                async for delta in deltas:
                    tokens.extend(token.token_id for token in delta.tokens)
                    if len(tokens) == 2:
                        await kill(generation.report.decode_worker[-1])

        async def kill(name: str) -> None:
            old = [one for one in cluster.local if one.worker.info.worker_id.endswith(name)]
            with held_step(old[1].worker.engine):  # else the answer might be complete before
                for one in old:
                    await one.worker.server.stop()
            for one in old:
                await cluster.stop(one)

        reading = asyncio.create_task(read())
        await eventually(lambda: len(cluster.local) == 2)
        begun = int(generation.report.decode_worker[-1])
        wanted = Recompute.of(models[begun], "float32")(PROMPT, params)
        if returns:
            await cluster.start("decode", "decode-2", model=models[begun])
        await reading
        if returns:
            assert tokens == wanted
            assert generation.report.decode_worker == "decode-2"
        else:
            assert tokens[:2] == wanted[:2]
            assert len(tokens) == len(wanted)
            assert generation.report.decode_worker == f"decode-{1 - begun}"
        await cluster.assert_all_free()
