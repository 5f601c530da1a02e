"""Proves on real engines that a resumed answer is the undisturbed one in every field, wherever it was cut."""

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import pytest_asyncio

from common.block_hash import BLOCK_SIZE
from common.sampling import SamplingParams
from tests.support.checkpoints import make_random_checkpoint
from tests.support.in_process_cluster import Answered, LocalCluster, local_cluster
from tests.support.interruptions import cut_before
from tests.support.recompute import Recompute, prompt
from tests.support.redis_process import RedisServer

pytestmark = pytest.mark.asyncio(loop_scope="module")
EOS = 2
CHUNK = 64
PROMPT = prompt(70)
ALL = SamplingParams(
    max_tokens=14, min_tokens=9, temperature=0.9, top_p=0.95, top_k=60, min_p=0.01, seed=11, repetition_penalty=1.2,
    presence_penalty=0.5, frequency_penalty=0.5, logit_bias=((5, 2.0), (40, 3.0), (EOS, 4.0)), logprobs=3,
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True, logprobs=2)
CUTS = [(1,), (2,), (7,), (13,), (1, 2, 3), (4, 9)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path, redis_server: RedisServer) -> AsyncIterator[LocalCluster]:
    async with local_cluster(model, redis_server.url, prefill_tokens=CHUNK) as cluster:
        yield cluster


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def all_free(cluster: LocalCluster) -> AsyncIterator[None]:
    forget(cluster)
    yield
    await cluster.assert_all_free()


@pytest.fixture
def recompute(model: Path) -> Recompute:
    return Recompute.of(model, "float32")


@pytest.fixture
def letters(cluster: LocalCluster) -> SamplingParams:
    """An answer of letters only, each a token."""
    ids = [token_id for letter in ascii_lowercase for token_id in cluster.pipeline._text.encode(letter)]
    bias = tuple((token_id, 100.0) for token_id in ids)
    return SamplingParams(max_tokens=14, temperature=1.0, seed=5, logit_bias=bias, ignore_eos=True)


def forget(cluster: LocalCluster) -> None:
    cluster.forget_prefixes("prefill")
    cluster.forget_prefixes("decode")


def facts(answered: Answered) -> list[Any]:
    """All that a client can see but the time: each answer's deltas and the usage."""
    report, forks = answered.report, range(len(answered.tokens))
    usage = (report.prompt_tokens, report.completion_tokens, report.cached_tokens)
    return [usage, *([delta for delta in answered.deltas if delta.index == fork] for fork in forks)]


async def cut(
    cluster: LocalCluster, params: SamplingParams, decode: Sequence[int] = (), prefill: Sequence[int] = (), **asked: Any
) -> Answered:  # fmt: skip
    """The answer on cold caches, with streams that break before these tokens; all of those must have been met."""
    await cluster.assert_all_free()  # else an earlier answer's last steps are met
    forget(cluster)
    with ExitStack() as stack:
        left = [stack.enter_context(cut_before(cluster.decode[0], *decode))]
        left.append(stack.enter_context(cut_before(cluster.prefill[0], *prefill)))
        answered = await cluster.answer(PROMPT, params, **asked)
    assert left == [[], []]
    assert answered.report.attempts == 1 + (len(decode) + len(prefill)) * len(answered.tokens)
    return answered


@pytest.mark.parametrize("params", [GREEDY, ALL], ids=["greedy", "all parameters"])
async def test_the_undisturbed_answer_is_the_full_recompute_with_its_logprobs(
    cluster: LocalCluster, recompute: Recompute, params: SamplingParams
) -> None:
    """What all others here are compared with."""
    answered = await cluster.answer(PROMPT, params, n=2)
    for fork in range(2):
        wanted = recompute.samples(PROMPT, params, fork)
        ended = [number for number, one in enumerate(wanted) if one.token_id == EOS and not params.ignore_eos]
        wanted = wanted[: ended[0] + 1 if ended else None]
        got = [token for delta in answered.deltas if delta.index == fork for token in delta.tokens]
        assert [(one.token_id, one.logprobs) for one in got] == [(one.token_id, one.logprobs) for one in wanted]


@pytest.mark.parametrize("decode", CUTS, ids=str)
@pytest.mark.parametrize("params", [GREEDY, ALL], ids=["greedy", "all parameters"])
async def test_tokens_logprobs_and_usage_stay(
    cluster: LocalCluster, params: SamplingParams, decode: tuple[int, ...]
) -> None:
    whole = await cut(cluster, params)
    decode = tuple(index for index in decode if index < whole.report.completion_tokens)
    assert facts(await cut(cluster, params, decode)) == facts(whole)


@pytest.mark.parametrize(("prefill", "decode"), [((0,), ()), ((3,), (3,)), ((0,), (5,))], ids=str)
async def test_a_prefill_worker_that_is_lost_in_the_first_or_a_later_attempt_changes_nothing(
    cluster: LocalCluster, prefill: tuple[int, ...], decode: tuple[int, ...]
) -> None:
    whole = await cut(cluster, ALL)
    assert facts(await cut(cluster, ALL, decode, prefill)) == facts(whole)


@pytest.mark.parametrize("decode", [(1,), (6,), (2, 8)], ids=str)
async def test_forks_resume_each_with_its_own_tokens(cluster: LocalCluster, decode: tuple[int, ...]) -> None:
    params = replace(ALL, min_tokens=14)
    whole = await cut(cluster, params, n=3)
    assert len({tuple(tokens) for tokens in whole.tokens}) == 3
    assert facts(await cut(cluster, params, decode, n=3)) == facts(whole)


async def test_cached_tokens_are_what_the_first_attempt_found(cluster: LocalCluster) -> None:
    """A resume finds nearly all cached: that is no gift to the client."""
    await cluster.answer(PROMPT[: 2 * BLOCK_SIZE], GREEDY)
    with cut_before(cluster.decode[0], 3) as left:
        answered = await cluster.answer(PROMPT, GREEDY)
    assert left == []
    assert answered.report.attempts == 2
    assert answered.report.cached_tokens == 2 * BLOCK_SIZE


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("decode", range(4, 10))
async def test_a_stop_string_is_met_across_the_cut(
    cluster: LocalCluster, letters: SamplingParams, decode: int, include: bool
) -> None:
    """Tokens 5 to 7 spell it."""
    [text] = (await cluster.answer(PROMPT, letters)).texts
    stop = text[5:8]
    asked = {"stop": (stop,), "include_stop_str_in_output": include}
    whole = await cut(cluster, letters, **asked)
    assert whole.texts == [text[: text.index(stop) + (3 if include else 0)]]
    assert (whole.reasons, whole.deltas[-1].stop_reason) == (["stop"], stop)
    if decode < whole.report.completion_tokens:
        assert facts(await cut(cluster, letters, (decode,), **asked)) == facts(whole)


@pytest.mark.parametrize("decode", [(2,), (6,), (8,), (9,), (3, 9)], ids=str)
async def test_min_tokens_hides_an_early_stop_string_and_not_a_later_one(
    cluster: LocalCluster, letters: SamplingParams, decode: tuple[int, ...]
) -> None:
    params = replace(letters, min_tokens=7)
    [text] = (await cluster.answer(PROMPT, params)).texts
    early, late = text[2:5], text[9:11]
    assert early not in text[5:]
    whole = await cut(cluster, params, stop=(early, late))
    assert whole.texts == [text[: text.index(late, 7)]]
    assert whole.deltas[-1].stop_reason == late
    assert facts(await cut(cluster, params, decode, stop=(early, late))) == facts(whole)


@pytest.mark.parametrize("decode", [(1,), (6,), (7,), (2, 7)], ids=str)
async def test_min_tokens_counts_over_a_resume(cluster: LocalCluster, decode: tuple[int, ...]) -> None:
    """The end token is as likely as can be, and forbidden up to token 7."""
    params = SamplingParams(max_tokens=14, min_tokens=7, temperature=0.7, seed=3, logit_bias=((EOS, 100.0),))
    whole = await cut(cluster, params)
    assert (len(whole.tokens[0]), whole.tokens[0][-1], whole.reasons) == (8, EOS, ["stop"])
    assert facts(await cut(cluster, params, decode)) == facts(whole)


@pytest.mark.parametrize("decode", [(4,), (8,), (5, 8)], ids=str)
async def test_a_stop_token_behind_the_cut_is_named(cluster: LocalCluster, decode: tuple[int, ...]) -> None:
    endless = replace(ALL, ignore_eos=True, min_tokens=0)
    [tokens] = (await cut(cluster, endless)).tokens
    params = replace(endless, stop_token_ids=(tokens[8],))
    whole = await cut(cluster, params)
    assert (whole.reasons, whole.deltas[-1].stop_reason) == (["stop"], tokens[8])
    at = len(whole.tokens[0]) - 1
    assert facts(await cut(cluster, params, tuple(index - 8 + at for index in decode))) == facts(whole)


@pytest.mark.parametrize(
    "length", [1, *(border + off for border in (BLOCK_SIZE, CHUNK, 2 * CHUNK) for off in (-1, 0, 1))]
)
async def test_at_the_borders_of_blocks_and_chunks_only_what_is_missing_moves(
    cluster: LocalCluster, recompute: Recompute, length: int
) -> None:
    """Of a resume the decode worker has all full blocks; a block that is not full never stays."""
    cuts = (1, 5)
    with cut_before(cluster.decode[0], *cuts) as left:
        answered = await cluster.answer(prompt(length), GREEDY)
    assert left == []
    assert answered.tokens == [recompute(prompt(length), GREEDY)]
    moved = -(-length // BLOCK_SIZE) + sum((length + known) % BLOCK_SIZE != 0 for known in cuts)
    assert answered.report.handover_bytes == moved * cluster.local[1].worker.built.layout.block_bytes
