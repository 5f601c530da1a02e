"""Over HTTP and a real cluster: echo, prompts' log-probabilities and max_tokens 0 agree with transformers."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI
from transformers import LlamaForCausalLM

from common.text.text_model import TextModel
from tests.support.checkpoints import make_random_checkpoint
from tests.support.http_over import NAME, Over, http_over
from tests.support.in_process_cluster import LocalCluster, local_cluster
from tests.support.recompute import prompt
from tests.support.redis_process import RedisServer

pytestmark = pytest.mark.asyncio(loop_scope="module")
LENGTHS = [1, 17, 150]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path, redis_server: RedisServer) -> AsyncIterator[LocalCluster]:
    async with local_cluster(model, redis_server.url) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def over(cluster: LocalCluster, model: Path) -> AsyncIterator[Over]:
    async with http_over(cluster.pipeline, TextModel.load(model), max_model_len=256) as over:
        yield over
    await cluster.assert_all_free()


def reference(model: Path, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [tokens, vocab]."""
    llama = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return llama(torch.tensor([ids])).logits[0].log_softmax(-1)


def check(logprobs: list[float | None], ids: list[int], model: Path) -> None:
    rows = reference(model, ids)
    wanted = [float(rows[place - 1, ids[place]]) for place in range(1, len(ids))]
    assert logprobs[0] is None
    assert logprobs[1:] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("max_tokens", [0, 4])
async def test_echo_with_logprobs(over: Over, model: Path, length: int, max_tokens: int) -> None:
    """Log-probabilities of prompt and answer are those of a forward pass over both."""
    async with AsyncOpenAI(base_url=f"{over.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        fields: dict[str, Any] = {
            "model": NAME,
            "prompt": prompt(length),
            "echo": True,
            "logprobs": 1,
            "temperature": 0,
        }
        fields |= {"max_tokens": max_tokens, "extra_body": {"ignore_eos": True}}
        whole = (await client.completions.create(**fields)).choices[0]
        parts = [chunk.choices[0] async for chunk in await client.completions.create(**fields, stream=True)]
    assert whole.logprobs is not None
    assert whole.finish_reason == parts[-1].finish_reason == "length"
    text = TextModel.load(model)
    assert whole.text.startswith(text.decode(prompt(length)))
    rows = reference(model, prompt(length))
    ids = prompt(length)
    for _ in range(max_tokens):
        ids.append(int(rows[-1].argmax()))
        rows = reference(model, ids)
    assert len(whole.logprobs.tokens or []) == length + max_tokens
    check(list(whole.logprobs.token_logprobs or []), ids, model)
    assert "".join(part.text for part in parts) == whole.text
    streamed = [value for part in parts if part.logprobs for value in part.logprobs.token_logprobs or []]
    assert streamed == whole.logprobs.token_logprobs


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("n", [1, 2])
async def test_prompt_logprobs(over: Over, model: Path, length: int, n: int) -> None:
    body = {"model": NAME, "prompt": [prompt(length), prompt(5, seed=1)], "n": n, "max_tokens": 2, "prompt_logprobs": 1}
    status, reply = await over.ask("/v1/completions", body)
    assert status == 200
    for choice in reply["choices"]:
        ids = prompt(length) if choice["index"] < n else prompt(5, seed=1)
        entries = choice["prompt_logprobs"]
        check([entry and entry[str(one)]["logprob"] for entry, one in zip(entries, ids, strict=True)], ids, model)
        assert all(any(token["rank"] == 1 for token in entry.values()) for entry in entries[1:])


async def test_max_tokens_0_without_logprobs_reaches_no_worker(over: Over, cluster: LocalCluster) -> None:
    before = [one.worker.engine.load().steps for one in cluster.local]
    body = {"model": NAME, "prompt": prompt(20), "echo": True, "max_tokens": 0}
    status, reply = await over.ask("/v1/completions", body)
    assert (status, reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (200, 20, 0)
    assert [one.worker.engine.load().steps for one in cluster.local] == before


async def test_max_tokens_0_with_logprobs_hands_nothing_over(over: Over, cluster: LocalCluster) -> None:
    decode = next(one for one in cluster.local if one.worker.info.role == "decode")
    prefill = next(one for one in cluster.local if one.worker.info.role == "prefill")
    before = decode.worker.engine.load().steps, prefill.worker.engine.load().steps
    body = {"model": NAME, "prompt": prompt(200, seed=9), "echo": True, "max_tokens": 0, "logprobs": 0}
    status, _ = await over.ask("/v1/completions", body, headers={"X-KVRelay-Report": "1"})
    assert status == 200
    assert prefill.worker.engine.load().steps > before[1]
    assert decode.worker.engine.load().steps == before[0]
