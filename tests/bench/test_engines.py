"""Batches are set up at the context that is asked for, and a step's time is told by its parts."""

import pytest
import torch

from bench.engines import Stopwatch, admit, build, greedy, random_ids, run_to_end, settings, timed_step
from common.engine.sequence import Sequence
from common.errors import KVRelayError
from tests.support.checkpoints import make_random_checkpoint


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    directory = make_random_checkpoint(tmp_path_factory.mktemp("model"))
    config = settings(str(directory), "auto", threads=1, max_model_len=64, max_num_seqs=4)
    engine = build(config, max_num_batched_tokens=16)
    yield engine
    engine.pool.close()


def assert_all_free(built):
    load = built.engine.load()
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, load.total_blocks)


def test_admitted_sequences_decode_from_their_context_without_prefill(built):
    sequences = admit(built.engine, batch=3, context=17, max_tokens=2, vocab_size=288)
    output = built.engine.step()
    assert [token.sequence.key for token in output.tokens] == ["running-0", "running-1", "running-2"]
    assert output.num_batched_tokens == 3
    assert [sequence.num_computed_tokens for sequence in sequences] == [18, 18, 18]
    assert timed_step(built.engine) > 0
    assert_all_free(built)


def test_more_sequences_than_there_is_room_for_are_an_error(built):
    with pytest.raises(KVRelayError, match="no room"):
        admit(built.engine, batch=5, context=16, max_tokens=1, vocab_size=288)
    for index in range(5):
        built.engine.abort(f"running-{index}")
    assert_all_free(built)


def test_a_prompt_runs_to_its_end_in_chunks(built):
    ids = random_ids(40, 288, torch.Generator().manual_seed(0))
    assert run_to_end(built.engine, [Sequence("prompt", ids, 40, greedy(1))]) > 0
    assert_all_free(built)


def test_a_stopwatch_splits_a_step_and_leaves_the_engine_as_it_was(built):
    operations = built.engine._runner._decoder.ops
    sampler = built.engine._sampler
    admit(built.engine, batch=2, context=16, max_tokens=3, vocab_size=288)
    with Stopwatch(built) as stopwatch:
        assert built.engine._runner._decoder.ops != operations
        parts = stopwatch.steps(3)
    for part in parts:
        assert min(part.kernels, part.prepare, part.sampler) > 0
        assert part.kernels + part.prepare + part.sampler <= part.total
        assert part.outside_kernels == pytest.approx(1 - part.kernels / part.total)
    assert built.engine._runner._decoder.ops is operations
    assert built.engine._sampler is sampler
    assert_all_free(built)


@pytest.mark.parametrize(("vocab_size", "first"), [(288, 256), (64, 0)])
def test_random_ids_stay_within_the_vocabulary(vocab_size, first):
    ids = random_ids(500, vocab_size, torch.Generator().manual_seed(1))
    assert first <= min(ids)
    assert max(ids) < vocab_size
