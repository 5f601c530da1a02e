"""What a sequence answers depends, bit for bit, on no chunk border, company, thread count or old content of blocks."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.block_hash import BLOCK_SIZE
from common.compute.ops.cpu.native_attention import prepare as native_prepare
from common.compute.ops.reference.step_plan import KEY_CHUNK, prepare
from common.engine.batch import Batch
from common.engine.runner import ModelRunner, step_input
from tests.common.compute.ops.test_reference_ops import make_config
from tests.support.checkpoints import make_random_checkpoint
from tests.support.model_tools import chunk, logits_by_chunks, make_runner, random_ids, threads

pytestmark = pytest.mark.slow

LENGTH = 2 * KEY_CHUNK + 5
FIRST = random_ids(LENGTH)
OTHER = random_ids(LENGTH, seed=1)
SPLITS = {
    "one": [LENGTH],
    "the last alone": [LENGTH - 1, 1],
    "token by token at first": [*[1] * 20, LENGTH - 20],
    "token by token over a key chunk's border": [KEY_CHUNK - 3, *[1] * 6, LENGTH - KEY_CHUNK - 3],
    "blocks": [*[BLOCK_SIZE] * (LENGTH // BLOCK_SIZE), LENGTH % BLOCK_SIZE],
    "beside blocks": [BLOCK_SIZE - 1, 2, BLOCK_SIZE, LENGTH - 2 * BLOCK_SIZE - 1],
    "key chunks": [KEY_CHUNK, KEY_CHUNK, 5],
    "beside key chunks": [KEY_CHUNK - 1, 2, KEY_CHUNK, LENGTH - 2 * KEY_CHUNK - 1],
}
BLOCKS_EACH = -(-LENGTH // BLOCK_SIZE)
# The second: sizes that fill vector registers in part, and queries scaled by what is no power of two.
SHAPES = [{}, {"hidden_size": 48, "intermediate_size": 80, "num_heads": 3, "num_kv_heads": 1, "head_dim": 48}]


CASES = [(dtype, shape, "torch") for dtype in ("float32", "bfloat16", "float16") for shape in range(len(SHAPES))]
CASES += [("float32", 0, "native"), ("bfloat16", 1, "native")]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    dtype, shape, backend = request.param
    directory = make_random_checkpoint(tmp_path_factory.mktemp("model"), dtype=dtype, **SHAPES[shape])
    return make_runner(directory, dtype, num_blocks=4 * BLOCKS_EACH, backend=backend)


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> torch.Tensor:
    """[vocab], after all tokens in one step, with nobody beside."""
    return logits_by_chunks(runner, FIRST, [LENGTH])[0]


def spoil(runner: ModelRunner) -> None:
    runner._pool.blocks.fill_(torch.nan)


@pytest.mark.parametrize("num_threads", [1, 5])
@pytest.mark.parametrize("split", SPLITS)
def test_chunk_borders_change_no_bit(split: str, num_threads: int, runner: ModelRunner, alone: torch.Tensor):
    spoil(runner)
    with threads(num_threads):
        assert torch.equal(logits_by_chunks(runner, FIRST, SPLITS[split], first_block=BLOCKS_EACH)[-1], alone)


@pytest.mark.parametrize("last", [1, 2, BLOCK_SIZE, KEY_CHUNK + 1])
@pytest.mark.parametrize("others", [[1], [1, 1], [3], [70, 1], [1, KEY_CHUNK, 1]])
def test_company_changes_no_bit(others: list[int], last: int, runner: ModelRunner, alone: torch.Tensor):
    """Others at the start and in the middle of their sequences, before and behind."""
    spoil(runner)
    logits_by_chunks(runner, FIRST, [LENGTH - last])
    logits_by_chunks(runner, OTHER, [KEY_CHUNK], first_block=BLOCKS_EACH)
    rest = chunk(FIRST, LENGTH - last, last)
    company = [
        chunk(OTHER, KEY_CHUNK if i == 0 else 0, length, first_block=(i + 1) * BLOCKS_EACH)
        for i, length in enumerate(others)
    ]
    for place in range(len(others) + 1):
        logits = runner.forward(Batch((*company[:place], rest, *company[place:])))
        assert torch.equal(logits[place], alone)


@given(
    lengths=st.lists(st.integers(1, 3 * BLOCK_SIZE), min_size=2, max_size=4),
    cuts=st.lists(st.integers(1, 12), min_size=1, max_size=3),
)
@settings(max_examples=25, deadline=None)
def test_sequences_run_together_as_alone(lengths: list[int], cuts: list[int], runner: ModelRunner):
    """Every step takes a piece of each sequence; all sampled logits are those of each sequence alone."""
    ids = [random_ids(length, seed=i) for i, length in enumerate(lengths)]
    alone = [logits_by_chunks(runner, ids[i], [length])[0] for i, length in enumerate(lengths)]
    spoil(runner)
    done, step = [0] * len(ids), 0
    while any(done[i] < lengths[i] for i in range(len(ids))):
        chunks, who = [], []
        for i in range(len(ids)):
            length = min(cuts[(step + i) % len(cuts)], lengths[i] - done[i])
            if length:
                chunks.append(chunk(ids[i], done[i], length, first_block=i * BLOCKS_EACH))
                who.append(i)
                done[i] += length
        logits = runner.forward(Batch(tuple(chunks)))
        for row, i in enumerate(who):
            if done[i] == lengths[i]:
                assert torch.equal(logits[row], alone[i])
        step += 1


def test_any_blocks_will_do(runner: ModelRunner, alone: torch.Tensor):
    """In any order, anywhere in the pool."""
    spoil(runner)
    scattered = torch.randperm(4 * BLOCKS_EACH, generator=torch.Generator().manual_seed(0))[:BLOCKS_EACH].tolist()
    for start, length in ((0, 100), (100, LENGTH - 101), (LENGTH - 1, 1)):
        whole = chunk(FIRST, start, length)
        placed = Batch((type(whole)(whole.sequence, start, whole.token_ids, tuple(scattered), whole.sampled),))
        logits = runner.forward(placed)
    assert torch.equal(logits[0], alone)


def test_only_sampling_chunks_have_logits_in_their_order(runner: ModelRunner):
    parts = [chunk(FIRST, 0, 20, sampled=False), chunk(OTHER, 0, 7, first_block=BLOCKS_EACH)]
    parts += [
        chunk(FIRST, 0, 1, first_block=2 * BLOCKS_EACH, sampled=False),
        chunk(FIRST, 0, 5, first_block=3 * BLOCKS_EACH),
    ]
    logits = runner.forward(Batch(tuple(parts)))
    assert logits.shape == (2, 288)
    assert logits.dtype == torch.float32
    for row, index in enumerate((1, 3)):
        assert torch.equal(logits[row], runner.forward(Batch((parts[index],)))[0])


def test_a_step_without_samples_still_writes_its_kv(runner: ModelRunner, alone: torch.Tensor):
    spoil(runner)
    assert runner.forward(Batch((chunk(FIRST, 0, LENGTH - 1, sampled=False),))).shape == (0, 288)
    assert torch.equal(runner.forward(Batch((chunk(FIRST, LENGTH - 1, 1),)))[0], alone)


def test_an_empty_batch_has_no_logits(runner: ModelRunner):
    assert runner.forward(Batch(())).shape == (0, 288)


def test_blocks_are_copied_before_anything_is_computed(runner: ModelRunner):
    """A fork goes on in a copy of its last block; the one it came from stays as it was."""
    length = BLOCK_SIZE + 3
    logits_by_chunks(runner, FIRST, [length])
    kept = runner._pool.blocks[1].clone()
    shared = chunk(FIRST, length, 1)
    fork = Batch((type(shared)(shared.sequence, length, shared.token_ids, (0, 9), shared.sampled),), copies=((1, 9),))
    logits = runner.forward(fork)
    assert torch.equal(runner._pool.blocks[1], kept)
    assert torch.equal(logits, logits_by_chunks(runner, FIRST, [length + 1], first_block=20))


def test_blocks_of_others_stay_as_they_are(runner: ModelRunner):
    runner._pool.blocks.fill_(7)
    logits_by_chunks(runner, FIRST, [BLOCK_SIZE + 1, BLOCK_SIZE, 1], first_block=3)
    untouched = [block for block in range(runner._pool.num_blocks) if block not in (3, 4, 5)]
    assert (runner._pool.blocks[untouched] == 7).all()


@pytest.mark.parametrize(
    ("start", "length", "block", "offset"),
    [
        (0, 1, 0, 0),
        (BLOCK_SIZE - 1, 1, 0, 15),
        (BLOCK_SIZE, 1, 1, 0),
        (3, BLOCK_SIZE, 1, 2),
        (0, 2 * BLOCK_SIZE, 1, 15),
    ],
)
def test_a_token_goes_to_its_block_and_place(start: int, length: int, block: int, offset: int):
    step = step_input(Batch((chunk(FIRST, start, length, first_block=40),)))
    assert (int(step.token_blocks[-1]) - 40, int(step.positions[-1]) % BLOCK_SIZE) == (block, offset)


def test_step_input_has_one_row_a_token():
    step = step_input(Batch((chunk(FIRST, 30, 3), chunk(OTHER, 0, 1, first_block=8, sampled=False))))
    assert step.token_ids.tolist() == [*FIRST[30:33], OTHER[0]]
    assert step.positions.tolist() == [30, 31, 32, 0]
    assert step.token_blocks.tolist() == [1, 1, 2, 8]
    assert (step.row_starts, step.contexts) == ((0, 3, 4), (33, 1))
    assert (step.block_ids.tolist(), step.table_starts) == ([0, 1, 2, 8], (0, 3, 4))
    assert step.sample_rows.tolist() == [2]


def test_a_step_has_as_many_table_entries_as_its_contexts_have_blocks():
    """And not as many as the longest has, for each chunk."""
    long, count = 1000 * BLOCK_SIZE, 63
    short = [chunk(FIRST, 5, 1, first_block=2000 + i) for i in range(count)]
    step = step_input(Batch((chunk([0] * long, long - 1, 1), *short)))
    assert step.block_ids.tolist() == [*range(1000), *range(2000, 2000 + count)]
    assert step.table_starts == (0, *range(1000, 1001 + count))
    config = make_config()
    decode = prepare(step, config, torch.float32).attention[0].decode
    key_chunks = -(-long // KEY_CHUNK) + count
    assert decode.blocks.shape == (key_chunks, config.num_kv_heads * KEY_CHUNK // BLOCK_SIZE)
    assert len(native_prepare(step, config, torch.float32).block_ids) == 1000 + count


SPOILT_AT = BLOCK_SIZE + 3  # a position


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return make_runner(make_random_checkpoint(tmp_path_factory.mktemp("model")), num_blocks=2 * BLOCKS_EACH)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("value", "kind"), [(torch.nan, "nan"), (torch.inf, "inf")])
def test_spoilt_kv_is_named_and_spoils_its_own_sequence_alone(
    layer: int, value: float, kind: str, small: ModelRunner
) -> None:
    alone = logits_by_chunks(small, OTHER, [LENGTH], first_block=BLOCKS_EACH)
    logits_by_chunks(small, FIRST, [40])
    small._pool.blocks[SPOILT_AT // BLOCK_SIZE, layer, 1, 0, SPOILT_AT % BLOCK_SIZE] = value
    next_one = chunk(FIRST, 40, 1)
    last = chunk(OTHER, LENGTH - 1, 1, first_block=BLOCKS_EACH)
    logits = small.forward(Batch((next_one, last)))
    assert not logits[0].isfinite().any()
    assert torch.equal(logits[1:], alone)
    assert small.where_not_finite(next_one) == f"layer {layer}: {kind} in the KV of position {SPOILT_AT}"


@pytest.mark.parametrize(
    ("spoils", "where"),
    [
        ("embedding", "layer 0: nan in the KV of position 40"),
        ("layer 0", "layer 0: nan made of finite KV"),
        ("layer 1", "layer 1 or the LM head: made of finite KV"),
    ],
)
def test_what_a_layer_makes_is_told_from_what_it_reads(spoils: str, where: str, small: ModelRunner) -> None:
    weights = small._decoder.weights
    spoilt = {
        "embedding": weights.embedding.tensors[0][FIRST[40]],
        "layer 0": weights.layers[0].mlp.down.tensors[0],
        "layer 1": weights.layers[1].mlp.down.tensors[0],
    }[spoils]
    logits_by_chunks(small, FIRST, [40])
    before = spoilt.clone()
    try:
        spoilt.fill_(torch.nan)
        assert not small.forward(Batch((chunk(FIRST, 40, 1),))).isfinite().any()
        assert small.where_not_finite(chunk(FIRST, 40, 1)) == where
    finally:
        spoilt.copy_(before)


@pytest.mark.model
def test_the_demo_model_answers_alike_by_any_way(demo_model: Path):
    runner = make_runner(demo_model, "float32", num_blocks=3 * BLOCKS_EACH)
    ids, other = random_ids(LENGTH, vocab_size=49152), random_ids(LENGTH, seed=1, vocab_size=49152)
    alone = logits_by_chunks(runner, ids, [LENGTH])[0]
    assert not alone.isnan().any()
    spoil(runner)
    for lengths in ([*[1] * 6, LENGTH - 6], [KEY_CHUNK - 1, 2, 100, LENGTH - KEY_CHUNK - 102, 1]):
        with threads(2):
            assert torch.equal(logits_by_chunks(runner, ids, lengths, first_block=BLOCKS_EACH)[-1], alone)
    beside = chunk(other, 0, 40, first_block=0), chunk(other, 0, 1, first_block=2 * BLOCKS_EACH)
    last = chunk(ids, LENGTH - 1, 1, first_block=BLOCKS_EACH)
    assert torch.equal(runner.forward(Batch((beside[0], last, beside[1])))[1], alone)
