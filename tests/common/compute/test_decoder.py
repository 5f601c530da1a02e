"""The decoder over the reference operations gives the logits of an independent implementation, transformers'."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from common.block_hash import BLOCK_SIZE
from common.engine.batch import Batch
from common.engine.runner import ModelRunner
from tests.support.checkpoints import make_random_checkpoint
from tests.support.model_tools import chunk, logits_by_chunks, make_runner, random_ids

pytestmark = pytest.mark.slow

KINDS = {
    "as the defaults": {},
    "a head of its own": {"tie_word_embeddings": False},
    "as many kv heads as heads": {"num_heads": 4, "num_kv_heads": 4},
    "one kv head": {"num_heads": 4, "num_kv_heads": 1},
    "more heads a kv head than padding": {"hidden_size": 68, "num_heads": 34, "num_kv_heads": 2, "head_dim": 8},
    "head_dim is not hidden / heads": {"hidden_size": 60, "num_heads": 6, "num_kv_heads": 2, "head_dim": 24},
    "three shards": {"shards": 3, "tie_word_embeddings": False},
    "odd sizes": {"hidden_size": 36, "intermediate_size": 50, "num_heads": 3, "num_kv_heads": 1, "head_dim": 10},
}
LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE + 1, 3, 127, 128, 129, 1]  # crosses blocks, key chunks and query tiles
COUNT = 24  # greedy tokens of an answer
SPARSE = "\n".join(f"The number {i} is followed by" for i in range(12))


def reference_logits(directory: Path, token_ids: list[int]) -> torch.Tensor:
    """[tokens, vocab] in float32."""
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path):
    directory = make_random_checkpoint(tmp_path / "model", **KINDS[kind])
    ids = random_ids(sum(LENGTHS))
    ours = logits_by_chunks(make_runner(directory), ids, LENGTHS)
    theirs = reference_logits(directory, ids)[torch.tensor(LENGTHS).cumsum(0) - 1]
    assert theirs.std() > 0.5
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near(dtype: str, tmp_path: Path):
    directory = make_random_checkpoint(tmp_path / "model", dtype=dtype)
    ids = random_ids(200)
    ours = logits_by_chunks(make_runner(directory, dtype), ids, [150, 49, 1])
    theirs = reference_logits(directory, ids)[[149, 198, 199]]
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().max() < 0.05 * theirs.std() * (8 if dtype == "bfloat16" else 1)


def test_a_checkpoint_converted_to_another_dtype_answers_as_its_own(tmp_path: Path):
    half = make_random_checkpoint(tmp_path / "half", dtype="bfloat16")
    ids = random_ids(40)
    ours = logits_by_chunks(make_runner(half, "float32"), ids, [40])
    torch.testing.assert_close(ours, reference_logits(half, ids)[-1:], atol=1e-4, rtol=0)


@pytest.mark.model
def test_logits_of_the_demo_model_are_those_of_transformers(demo_model: Path):
    ids = AutoTokenizer.from_pretrained(demo_model)(SPARSE * 2)["input_ids"]
    lengths = [1, 20, 130, len(ids) - 152, 1]
    assert len(ids) > 160
    ours = logits_by_chunks(make_runner(demo_model), ids, lengths)
    theirs = reference_logits(demo_model, ids)[torch.tensor(lengths).cumsum(0) - 1]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert ours.argmax(-1).tolist() == theirs.argmax(-1).tolist()


@pytest.mark.model
def test_greedy_answers_of_the_demo_model_are_those_of_transformers(demo_model: Path):
    topics = ("rain", "Paris", "7 times 8")
    tokenizer = AutoTokenizer.from_pretrained(demo_model, padding_side="left")
    chats = [[{"role": "user", "content": f"{verb} {topic}."}] for topic in topics for verb in ("Explain", "Praise")]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    model = LlamaForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    padded = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    theirs = model.generate(**padded, max_new_tokens=COUNT, min_new_tokens=COUNT, do_sample=False)
    ours = greedy(make_runner(demo_model, num_blocks=6 * 10), prompts, COUNT, forbidden=tokenizer.eos_token_id)
    assert ours == theirs[:, padded["input_ids"].shape[1] :].tolist()


def greedy(runner: ModelRunner, prompts: list[list[int]], count: int, *, forbidden: int) -> list[list[int]]:
    """The likeliest `count` tokens after each prompt, all prompts as one batch; `forbidden` is never chosen."""
    sequences, computed = [list(ids) for ids in prompts], [0] * len(prompts)
    for _ in range(count):
        chunks = [
            chunk(ids, done, len(ids) - done, first_block=10 * i)
            for i, (ids, done) in enumerate(zip(sequences, computed, strict=True))
        ]
        computed = [len(ids) for ids in sequences]
        logits = runner.forward(Batch(tuple(chunks))).index_fill(1, torch.tensor([forbidden]), -torch.inf)
        for ids, token_id in zip(sequences, logits.argmax(-1).tolist(), strict=True):
            ids.append(token_id)
    return [ids[-count:] for ids in sequences]
