"""A hand-over between two processes is measured part by part, and leaves nothing behind."""

import json
from itertools import pairwise

import pytest

from bench.handover.handover import SETS, Times, block_sets, figures, run, runs_of
from bench.options import HandoverOptions
from common.errors import ConfigError
from tests.support.checkpoints import make_random_checkpoint


@pytest.mark.parametrize(
    ("pairs", "runs"),
    [
        ([], []),
        ([(3, 7)], [(3, 7, 1)]),
        ([(3, 7), (4, 8), (5, 9)], [(3, 7, 3)]),
        ([(3, 7), (4, 9), (5, 10)], [(3, 7, 1), (4, 9, 2)]),
        ([(5, 1), (4, 2)], [(5, 1, 1), (4, 2, 1)]),
    ],
)
def test_blocks_side_by_side_are_copied_at_once(pairs, runs):
    assert list(runs_of(pairs)) == runs


@pytest.mark.parametrize("kind", ["contiguous", "scattered"])
def test_sets_share_no_block_and_are_what_their_name_says(kind):
    sets = block_sets(kind, 5)
    assert len(sets) == SETS
    assert sorted(block for one in sets for block in one) == list(range(5 * SETS))
    side_by_side = all(b == a + 1 for one in sets for a, b in pairwise(one))
    assert side_by_side is (kind == "contiguous")


def test_rates_follow_from_bytes_and_times():
    times = Times(
        copy=[1.0, 2.0, 4.0], memcpy=[1.0, 1.0, 1.0], socket=[4.0] * 3, handover=[3.0] * 3, step_wait=[5.0] * 3
    )
    row = figures(times, [10.0], size=2 * 10**6)
    assert (row["copy_ms"], row["gb_s"], row["memcpy_gb_s"], row["of_memcpy"]) == (2.0, 1.0, 2.0, 0.5)
    assert (row["socket_ms"], row["socket_gb_s"], row["of_socket"]) == (4.0, 0.5, 2.0)
    assert (row["handover_ms"], row["step_wait_ms"], row["step_ms"], row["runs"]) == (3.0, 5.0, 10.0, 3)


@pytest.mark.parametrize(("batch", "transport"), [(0, "shm"), (2, "shm"), (0, "grpc")])
def test_a_whole_run_has_a_row_for_each_kind_of_blocks(tmp_path, capsys, batch, transport):
    directory = make_random_checkpoint(tmp_path / "model")
    options = HandoverOptions(
        model=str(directory), tokens=33, batch=batch, context=20, runs=2, transport=transport, json=True
    )
    assert run(options) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["blocks_are"] for row in rows] == ["contiguous", "scattered"]
    for row in rows:
        assert (row["tokens"], row["transport"], row["batch"], row["runs"]) == (33, transport, batch, 2)
        assert row["bytes"] == 3 * 2 * 2 * 2 * 16 * 16 * 4  # blocks, layers, K/V, heads, tokens, head dim, float32
        assert 0 < row["copy_ms"] < row["handover_ms"]
        assert row["step_wait_ms"] >= 0
        assert row["socket_ms"] > 0


def test_a_transport_that_there_is_not_is_refused_first():
    with pytest.raises(ConfigError) as caught:
        run(HandoverOptions(model="/no/such/model", transport="pigeon"))
    assert caught.value.field == "transport"
