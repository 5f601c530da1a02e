"""Lengths come from a seed or a trace, and memory is counted as the engine's own block pool takes it."""

import json
import random
import statistics

import pytest

from bench.engines import build, greedy, settings
from bench.step.lengths import OUTPUT, PROMPT, Length, LogNormal, drawn, memory_use, of_trace, paged, preallocated
from common.block_hash import BLOCK_SIZE
from common.engine.sequence import Sequence
from tests.support.checkpoints import make_random_checkpoint


def test_a_log_normal_has_its_median_and_its_bounds():
    random_number = random.Random(0)
    tokens = [LogNormal(50.0, 1.0, 200).draw(random_number) for _ in range(5000)]
    assert statistics.median(tokens) == pytest.approx(50, rel=0.1)
    assert min(tokens) >= 1
    assert max(tokens) == 200


def test_a_seed_gives_the_same_lengths_and_another_gives_others():
    assert drawn(20, 1) == drawn(20, 1) != drawn(20, 2)
    assert all(1 <= one.prompt <= PROMPT.most and 1 <= one.output <= OUTPUT.most for one in drawn(200, 3))


def test_a_trace_gives_lengths_from_any_place_and_starts_over(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = ({"timestamp": i, "input_length": 100 * i, "output_length": 10} for i in (1, 2, 3))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [one.prompt for one in of_trace(path, 4, 0.5, skip=2)] == [150, 50, 100, 150]


@pytest.mark.parametrize(
    ("length", "filled", "paged_held"),
    [
        (Length(15, 1), 15, 16),
        (Length(16, 1), 16, 16),
        (Length(17, 1), 17, 32),
        (Length(15, 3), 16, (16 + 16 + 32) / 3),  # 15, 16 and 17 tokens
    ],
)
def test_memory_is_counted_step_by_step(length, filled, paged_held):
    use = memory_use([length], paged(16))
    assert (use.filled, use.held) == (filled, pytest.approx(paged_held))
    assert memory_use([length], preallocated(100)).unused_share == pytest.approx(1 - filled / 100)


def test_paged_memory_is_what_the_engine_takes(tmp_path):
    """Block by block, over a whole answer."""
    config = settings(str(make_random_checkpoint(tmp_path / "m")), "auto", threads=1, max_model_len=64, max_num_seqs=1)
    built = build(config)
    length = Length(14, 20)
    built.engine.add(Sequence("one", [5] * length.prompt, length.prompt, greedy(length.output + 1)))
    held = []
    for _ in range(length.output):
        output = built.engine.step()
        held.append((output.load.total_blocks - output.load.free_blocks) * BLOCK_SIZE)
    built.engine.abort("one")
    built.pool.close()
    assert statistics.mean(held) == memory_use([length], paged(BLOCK_SIZE)).held
