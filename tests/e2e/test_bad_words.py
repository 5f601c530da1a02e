"""No bad word is in an answer, wherever it was begun and whatever died, and their tokens are those that vLLM bans."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from transformers import AutoTokenizer

from common.errors import InvalidRequest
from common.sampling import SamplingParams
from common.text.bad_words import bad_word_tokens
from common.text.text_model import TextModel
from tests.support.checkpoints import make_random_checkpoint
from tests.support.http_tools import COMPLETION, HELLO, serve
from tests.support.in_process_cluster import LocalCluster, local_cluster
from tests.support.recompute import Recompute, prompt
from tests.support.redis_process import RedisServer
from tests.support.tiny_text import byte_level, model_directory, sentencepiece_directory

pytestmark = pytest.mark.asyncio(loop_scope="module")
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
WORDS = ["the", " the", "  cache", "Paris.", "Über", "zzq", "a", "東京", "x y z"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[1, 0], ids=["split", "unsplit"])
async def cluster(
    request: pytest.FixtureRequest, model: Path, redis_server: RedisServer
) -> AsyncIterator[LocalCluster]:
    async with local_cluster(model, redis_server.url, prefill=request.param) as cluster:
        yield cluster


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("place", [0, 1, 6])
@pytest.mark.parametrize("fails", [None, 1, 4])
async def test_a_word_of_the_answer_is_gone_when_it_is_bad(
    cluster: LocalCluster, model: Path, monkeypatch: pytest.MonkeyPatch, length: int, place: int, fails: int | None
) -> None:
    """The word is what stands in the greedy answer; from its last token on the answer is another."""
    recompute, ids = Recompute.of(model, "float32"), prompt(20, seed=place)
    before = recompute(ids, GREEDY)
    word = tuple(before[place : place + length])
    params = replace(GREEDY, bad_words=(word,))
    steps = 0
    for local in cluster.local:

        def failing(batch: Any, forward: Any = local.worker.engine._runner.forward) -> Any:
            nonlocal steps
            steps += 1
            if steps - 1 == fails:
                raise RuntimeError("broken")
            return forward(batch)

        monkeypatch.setattr(local.worker.engine._runner, "forward", failing)
    answered = await cluster.answer(ids, params, cache_salt=f"{length} {place} {fails}")
    (tokens,) = answered.tokens
    assert word not in [tuple(tokens[at : at + length]) for at in range(len(tokens))]
    assert tokens == recompute(ids, params) != before
    assert answered.report.attempts == 1 + (fails is not None)
    await cluster.assert_all_free()


async def test_words_of_the_prompt_do_not_count(cluster: LocalCluster, model: Path) -> None:
    """A word that begins in the prompt and ends in the answer is none of the answer's."""
    ids = prompt(20)
    before = Recompute.of(model, "float32")(ids, GREEDY)
    answered = await cluster.answer(ids, replace(GREEDY, bad_words=((ids[-1], before[0]),)))
    assert answered.tokens[0][0] == before[0]


@pytest.mark.parametrize("kind", ["plain", "bos", "sentencepiece"])
async def test_tokens_are_those_of_vllm(tmp_path: Path, kind: str) -> None:
    """As its documentation has it: each word as it is and, where that is as long and another word, behind a space."""
    if kind == "sentencepiece":
        directory = sentencepiece_directory(tmp_path)
    else:
        directory = model_directory(tmp_path, tokenizer=byte_level(bos=kind == "bos"))
    reference = AutoTokenizer.from_pretrained(directory)
    wanted: list[tuple[int, ...]] = []
    for word in WORDS:
        bare = tuple(reference.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(reference.encode(" " + word.lstrip(), add_special_tokens=False))
        wanted += [bare] if spaced[0] == bare[0] or len(spaced) != len(bare) else [bare, spaced]
    assert bad_word_tokens(WORDS, TextModel.load(directory)) == tuple(wanted)
    assert len(wanted) > len(WORDS) or kind == "sentencepiece"


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["a", " "], "bad_words[1]"),
        ([""], "bad_words[0]"),
        (["a", 5], "bad_words[1]"),
        ("a", "bad_words"),
        (["a"] * 129, "bad_words"),
        (["a"] * 9000, "bad_words"),
        ([f"w{number}" for number in range(6)], None),
    ],
)
async def test_what_is_no_list_of_words_is_refused(tmp_path: Path, words: Any, field: str | None) -> None:
    async with serve(TextModel.load(model_directory(tmp_path)), *HELLO) as served:
        response, reply = await served.post("/v1/completions", {**COMPLETION, "bad_words": words})
    assert response.status == (400 if field else 200)
    assert field is None or reply["error"]["param"] == field


@pytest.mark.parametrize(
    ("words", "stops", "ok"),
    [
        (((1,),), (), True),
        (((64,),), (), False),
        (((),), (), False),
        (((1,),) * 33, (), False),
        (((1,),), tuple(range(32)), False),
    ],
)
async def test_some_tokens_have_to_be_left(words: Any, stops: tuple[int, ...], ok: bool) -> None:
    params = SamplingParams(bad_words=words, stop_token_ids=stops, min_tokens=1)  # until then stop tokens are banned
    if ok:
        params.validate(64)
        return
    with pytest.raises(InvalidRequest, match="bad_words"):
        params.validate(64)
