"""Split equals full recompute over the network's transport, too: a few cases of test_split, without shared memory."""

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
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
LENGTHS = [1, BLOCK_SIZE, 5 * BLOCK_SIZE + 3, 11 * BLOCK_SIZE - 1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path, redis_server: RedisServer) -> AsyncIterator[LocalCluster]:
    async with local_cluster(model, redis_server.url, transport="grpc") as cluster:
        yield cluster


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def all_free(cluster: LocalCluster) -> AsyncIterator[None]:
    yield
    await cluster.assert_all_free()


@pytest.fixture
def recompute(model: Path) -> Recompute:
    return Recompute.of(model, "float32")


@pytest.mark.parametrize("length", LENGTHS)
async def test_tokens_equal_full_recompute(cluster: LocalCluster, recompute: Recompute, length: int) -> None:
    answered = await cluster.answer(prompt(length), GREEDY, cache_salt="alone")
    assert answered.tokens == [recompute(prompt(length), GREEDY)]
    assert answered.report.transport == "grpc"
    assert answered.report.handover_bytes > 0 or answered.report.decode_cached_tokens > 0


async def test_company_changes_no_token(cluster: LocalCluster, recompute: Recompute) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS * 2)]
    answers = await asyncio.gather(*(cluster.answer(ids, GREEDY) for ids in prompts))
    assert [answered.tokens for answered in answers] == [[recompute(ids, GREEDY)] for ids in prompts]
    assert {answered.report.transport for answered in answers} == {"grpc"}


async def test_forks_of_one_prompt_equal_their_own_recompute(cluster: LocalCluster, recompute: Recompute) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=7, ignore_eos=True)
    answered = await cluster.answer(prompt(BLOCK_SIZE + 3), params, n=3)
    assert answered.tokens == [recompute(prompt(BLOCK_SIZE + 3), params, fork) for fork in range(3)]
