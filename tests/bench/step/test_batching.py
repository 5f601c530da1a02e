"""Each kind of batching computes the answers that it should, and the rows say which came out how much faster."""

import json

import pytest

from bench.engines import build, settings
from bench.options import BatchingOptions
from bench.step.batching import (
    CONTINUOUS,
    PADDED,
    STATIC,
    BatchingRun,
    memory_rows,
    result,
    run,
    run_kind,
    sequences_for,
)
from bench.step.lengths import Length
from common.errors import ConfigError
from common.layout import KVLayout
from tests.support.checkpoints import make_random_checkpoint

LENGTHS = [Length(5, 1), Length(6, 4), Length(7, 2)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_random_checkpoint(tmp_path_factory.mktemp("model"))


def options(directory="m", **changes):
    given = {"max_num_seqs": 2, "requests": 3, "runs": 1, "vocab_size": 288, "json": True}
    return BatchingOptions(model=str(directory), **{**given, **changes})


@pytest.mark.parametrize(("kind", "writes"), [(CONTINUOUS, [1, 4, 2]), (STATIC, [1, 4, 2]), (PADDED, [4, 4, 2])])
def test_a_padded_batch_writes_until_its_longest_has_ended(kind, writes):
    sequences = sequences_for(LENGTHS, kind, 2, 0, 288)
    assert [sequence.params.max_tokens for sequence in sequences] == writes
    assert [sequence.num_prompt_tokens for sequence in sequences] == [5, 6, 7]


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        (CONTINUOUS, 4),  # the third comes in as soon as the first has ended
        (STATIC, 4 + 2),
        (PADDED, 4 + 2),
    ],
)
def test_a_place_is_taken_as_the_kind_of_batching_allows(directory, kind, steps):
    config = settings(str(directory), "auto", threads=1, max_model_len=32, max_num_seqs=2)
    built = build(config)
    measured = run_kind(built, LENGTHS, kind, options(directory), seed=0)
    load = built.engine.load()
    built.pool.close()
    assert measured.running == pytest.approx(sum(length.output for length in LENGTHS) / steps)
    assert measured.tokens_per_s > 0
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, load.total_blocks)


def test_speed_ups_are_over_the_padded_form_of_the_same_run():
    results = {
        CONTINUOUS: [BatchingRun(30.0, 60.0, 2.0), BatchingRun(10.0, 20.0, 2.0)],
        PADDED: [BatchingRun(10.0, 30.0, 1.0), BatchingRun(5.0, 5.0, 1.0)],
    }
    row = result(options(), CONTINUOUS, results)
    assert (row["tokens_per_s"], row["speedup"], row["cpu_speedup"], row["runs"]) == (20.0, 2.5, 3.0, 2)


def test_memory_is_told_for_both_ways():
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=16, dtype="float32")  # 128 bytes a token
    whole, ahead = memory_rows(options(max_model_len=100), [Length(10, 1), Length(30, 1)], layout)
    assert (whole["memory"], whole["unused_share"]) == ("paged", pytest.approx(1 - 40 / 48, rel=1e-3))
    assert (ahead["memory"], ahead["unused_share"], ahead["max_model_len"]) == ("preallocated", 0.8, 100)
    assert ahead["sequences_in_gib"] == pytest.approx(2**30 / (100 * 128), rel=1e-3)


def test_a_whole_run_has_a_row_for_each_kind(directory, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    rows = ({"timestamp": i, "input_length": 10 + i, "output_length": 1 + i} for i in range(3))
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(options(directory, trace=str(trace))) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row.get("batching") or row.get("memory") for row in rows] == [
        CONTINUOUS, STATIC, PADDED, "paged", "preallocated",
    ]  # fmt: skip
    assert rows[0]["speedup"] > 0
    assert rows[2]["speedup"] == 1.0
    assert {row["requests"] for row in rows} == {3}


def test_a_request_longer_than_what_is_set_aside_is_refused(directory):
    with pytest.raises(ConfigError, match="max-model-len") as caught:
        run(options(directory, max_model_len=2))
    assert caught.value.field == "max_model_len"
