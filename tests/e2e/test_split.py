"""Split equals unsplit equals full recompute, token for token: whatever the lengths, hits and company.

In bfloat16 as well as in float32: the reference operations give a row the same bits in any batch.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from common.block_hash import BLOCK_SIZE
from common.sampling import SamplingParams
from tests.support.checkpoints import make_random_checkpoint
from tests.support.in_process_cluster import LocalCluster, local_cluster
from tests.support.recompute import Recompute, prompt
from tests.support.redis_process import RedisServer

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHUNK = 64  # tokens a prefill step may compute
LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK - 5]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(
    max_tokens=12, temperature=0.9, top_p=0.95, top_k=50, seed=7, ignore_eos=True, repetition_penalty=1.1,
    presence_penalty=0.2, frequency_penalty=0.3, min_tokens=2, logit_bias=((5, 1.0),),
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["split float32", "unsplit float32", "split bfloat16"]
)
async def cluster(
    request: pytest.FixtureRequest, model: Path, redis_server: RedisServer
) -> AsyncIterator[LocalCluster]:
    way, dtype = request.param.split()
    async with local_cluster(model, redis_server.url, prefill=1 if way == "split" else 0, dtype=dtype) as cluster:
        yield cluster


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def all_free(cluster: LocalCluster) -> AsyncIterator[None]:
    yield
    await cluster.assert_all_free()


@pytest.fixture
def recompute(model: Path, cluster: LocalCluster) -> Recompute:
    return Recompute.of(model, cluster.local[0].worker.built.layout.dtype)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", LENGTHS)
async def test_tokens_equal_full_recompute(
    cluster: LocalCluster, recompute: Recompute, length: int, params: SamplingParams
) -> None:
    answered = await cluster.answer(prompt(length), params, cache_salt="alone")
    assert answered.tokens == [recompute(prompt(length), params)]
    assert answered.reasons == ["length"]
    if cluster.prefill:
        assert answered.report.transport == "shm"
        assert answered.report.handover_bytes > 0 or answered.report.decode_cached_tokens > 0


@pytest.mark.parametrize("shared", [0, BLOCK_SIZE - 1, 2 * BLOCK_SIZE, 3 * BLOCK_SIZE + 5, 4 * BLOCK_SIZE])
@pytest.mark.parametrize("kept", ["prefill", "decode", "both", "neither"])
async def test_a_prefix_hit_changes_no_token(
    cluster: LocalCluster, recompute: Recompute, shared: int, kept: str
) -> None:
    """The first `shared` tokens were seen before; only the caches named by `kept` still have them."""
    salt = f"hit {shared} {kept}"
    wanted = prompt(4 * BLOCK_SIZE)
    if shared:
        await cluster.answer(prompt(shared), GREEDY, cache_salt=salt)
    for role in {"prefill", "decode"} - {kept}:
        if kept != "both":
            cluster.forget_prefixes(role)
    answered = await cluster.answer(wanted, GREEDY, cache_salt=salt)
    assert answered.tokens == [recompute(wanted, GREEDY)]
    most = (len(wanted) - 1) // BLOCK_SIZE * BLOCK_SIZE
    hits = min(shared // BLOCK_SIZE * BLOCK_SIZE, most)
    if cluster.prefill:
        assert answered.report.cached_tokens == (hits if kept in ("prefill", "both") else 0)
        # all full blocks of the prompt may be here already: its KV need not be computed again
        at_decode = shared // BLOCK_SIZE * BLOCK_SIZE if kept in ("decode", "both") else 0
        assert answered.report.decode_cached_tokens == at_decode
        block_bytes = cluster.local[0].worker.built.layout.block_bytes
        assert answered.report.handover_bytes == (len(wanted) - at_decode) // BLOCK_SIZE * block_bytes
    else:
        assert answered.report.cached_tokens == (hits if kept in ("decode", "both") else 0)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_company_changes_no_token(cluster: LocalCluster, recompute: Recompute, params: SamplingParams) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate([*LENGTHS, *LENGTHS])]
    answers = await asyncio.gather(*(cluster.answer(ids, params) for ids in prompts))
    assert [answered.tokens for answered in answers] == [[recompute(ids, params)] for ids in prompts]


async def test_forks_of_one_prompt_equal_their_own_recompute(cluster: LocalCluster, recompute: Recompute) -> None:
    """Also over a partly filled block, which the forks share until they write to it."""
    for length in (BLOCK_SIZE, BLOCK_SIZE + 3):
        answered = await cluster.answer(prompt(length), SEEDED, n=4)
        assert answered.tokens == [recompute(prompt(length), SEEDED, fork) for fork in range(4)]


async def test_preemption_changes_no_token(
    cluster: LocalCluster, recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More sequences than the decode pool can hold, as several routers may send: some are computed again."""
    if cluster.local[0].worker.built.layout.dtype != "float32":
        pytest.skip("half precision is in the other tests; this one takes long")
    monkeypatch.setattr("router.pipeline.gate.AHEAD", 100.0)
    long = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
    prompts = [prompt(100, seed) for seed in range(12)]
    before = cluster.decode[0].engine._scheduler.num_preemptions
    answers = await asyncio.gather(*(cluster.answer(ids, long) for ids in prompts))
    assert [answered.tokens[0] for answered in answers] == [recompute(ids, long) for ids in prompts]
    assert cluster.decode[0].engine._scheduler.num_preemptions > before


async def test_one_token_needs_no_decode(cluster: LocalCluster, recompute: Recompute) -> None:
    params = SamplingParams(max_tokens=1, temperature=0)
    answered = await cluster.answer(prompt(20), params, cache_salt="one")
    assert answered.tokens == [recompute(prompt(20), params)]
    if cluster.prefill:
        assert answered.report.decode_worker == ""
        assert answered.report.handover_bytes == 0
