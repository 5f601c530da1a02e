"""A row of `bench step` is all its rounds: medians, the floor from the best limits, the peer's ratio by round."""

import json
import sys

import pytest

from bench.options import StepOptions
from bench.step.step import Samples, measure, peer_command, peer_key, result
from common.errors import ConfigError, KVRelayError
from tests.support.checkpoints import make_random_checkpoint

REQUIRED = {"cores", "weights", "phase", "batch", "context", "tokens_per_s", "ms", "floor_ms", "ratio"}


def head(stream=10.0, matmul=100.0, stream_by="probe", matmul_by="probe fp32"):
    probe = {
        "cores": 1,
        "stream_gb_s": stream,
        "matmul_gflop_s": matmul,
        "stream_by": stream_by,
        "matmul_by": matmul_by,
    }
    return {"weights": "bfloat16", "ops": "reference", "probe": probe}


def line(*ms, phase="decode", batch=8, context=128, size=10**8, flops=10**6, **more):
    return {"phase": phase, "batch": batch, "context": context, "bytes": size, "flops": flops, "ms": list(ms),
            "others": 0.0, **more}  # fmt: skip


def samples(*rounds, peers=()):
    """rounds: (head, line)."""
    made = Samples()
    for lines in rounds:
        made.take(lines)
    for peer in peers:
        made.take_peer(peer)
    return made


def test_ms_is_the_median_of_all_steps_and_tokens_follow_from_it():
    row = result(samples((head(), line(30.0, 10.0)), (head(), line(20.0, 40.0, 20.0))), ("decode", 8, 128), 1)
    assert (row["ms"], row["tokens_per_s"], row["runs"], row["rounds"]) == (20.0, 400.0, 5, 2)
    assert row["spread"]["ms"] == [20.0, 30.0]


def test_a_prompt_has_as_many_tokens_as_it_is_long():
    row = result(samples((head(), line(500.0, phase="prefill", batch=1, context=512))), ("prefill", 1, 512), 1)
    assert row["tokens_per_s"] == 1024.0


def test_the_floor_is_from_the_best_round_and_says_who_measured_it():
    rounds = ((head(10.0, 50.0), line(30.0)), (head(20.0, 40.0, stream_by="torch sum"), line(30.0)))
    row = result(samples(*rounds), ("decode", 8, 128), 2)
    assert (row["cores"], row["stream_gb_s"], row["stream_by"], row["matmul_gflop_s"]) == (2, 20.0, "torch sum", 50.0)
    assert (row["floor_ms"], row["ratio"], row["floor_by"]) == (5.0, 6.0, "bytes")


def test_the_peers_ratio_is_taken_round_by_round():
    ours = [(head(), line(ms)) for ms in (10.0, 30.0, 20.0)]  # the machine's speed changes, the ratio does not
    peers = [[{"phase": "decode", "batch": 8, "context": 128, "ms": ms}] for ms in (20.0, 60.0, 40.0)]
    row = result(samples(*ours, peers=peers), ("decode", 8, 128), 1)
    assert (row["peer_ms"], row["peer_ratio"], row["spread"]["peer_ratio"]) == (40.0, 0.5, [0.5, 0.5])


def test_without_a_peer_its_figures_are_none():
    row = result(samples((head(), line(1.0))), ("decode", 8, 128), 1)
    assert (row["peer_ms"], row["peer_ratio"]) == (None, None)


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"phase": "prefill", "tokens": 512, "ms": 1.0}, ("prefill", 1, 512)),
        ({"phase": "decode", "batch": 8, "context": 128, "ms": 1.0}, ("decode", 8, 128)),
        ({"phase": "decode", "batch": 8, "ms": 1.0}, None),
        ({"phase": "prefill", "tokens": 512}, None),
        ({"phase": "prefill", "tokens": 512, "ms": 0}, None),
        ({"start_s": 1.0}, None),
    ],
)
def test_a_peers_row_finds_ours(row, key):
    assert peer_key(row) == key


def test_a_peers_command_gets_model_and_cores():
    command = peer_command("python 'a b.py' {model} --threads={cores} {other}", "/models/m", 2)
    assert command == ["python", "a b.py", "/models/m", "--threads=2", "{other}"]


@pytest.mark.parametrize("text", ["", "python 'unclosed"])
def test_what_is_no_command_is_refused(text):
    with pytest.raises(ConfigError) as caught:
        peer_command(text, "m", 1)
    assert caught.value.field == "peer"


def options(directory, **changes):
    tiny = {"cores": "1", "prefill": "20", "batches": "1,2", "contexts": "17", "rounds": 1, "prefill_steps": 1}
    return StepOptions(model=str(directory), decode_steps=2, json=True, **{**tiny, **changes})


async def test_a_whole_run_has_a_row_for_each_shape(tmp_path, capsys):
    directory = make_random_checkpoint(tmp_path / "model")
    its_row = json.dumps({"phase": "decode", "batch": 2, "context": 17, "ms": 1.0})
    peer = f"{sys.executable} -c 'print({json.dumps(its_row)})'"
    assert await measure(options(directory, peer=peer)) == 0
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    shapes = [(row["phase"], row["batch"], row["context"]) for row in rows]
    assert shapes == [("prefill", 1, 20), ("decode", 1, 17), ("decode", 2, 17)]
    for row in rows:
        assert row.keys() >= REQUIRED
        assert (row["cores"], row["weights"]) == (1, "float32")
        assert min(row["ms"], row["tokens_per_s"], row["floor_ms"], row["ratio"]) > 0
    assert [row["peer_ratio"] is not None for row in rows] == [False, False, True]
    assert [row["outside_kernels"] is not None for row in rows] == [False, True, True]


async def test_a_model_that_is_not_there_fails_the_run(tmp_path):
    with pytest.raises(KVRelayError, match="there is no"):
        await measure(options(tmp_path / "none"))
