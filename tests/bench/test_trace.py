"""Traces are read as they are, scaled by given factors, and keep which prompts begin alike."""

import json

import pytest

from bench.trace import TraceRow, prompt_ids, rate, read, scaled
from common.errors import ConfigError

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"


def mooncake(tmp_path, *rows):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(at_ms=0, prompt=1000, output=10, hash_ids=(0, 1)):
    return {"timestamp": at_ms, "input_length": prompt, "output_length": output, "hash_ids": list(hash_ids)}


def ids_of(trace_row, number=0, seed=0):
    return prompt_ids(trace_row, number, seed, 256, 8192)


def test_mooncake_rows_are_in_order_of_time_from_zero(tmp_path):
    rows = read(mooncake(tmp_path, row(9000, 700), row(6000, 600)))
    assert rows == [TraceRow(0.0, 600, 10, (0, 1)), TraceRow(3.0, 700, 10, (0, 1))]


def test_azure_rows_have_times_and_lengths(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(AZURE + "2023-11-16 18:15:50.9951690,396,109\r\n")
    first, second = read(path)
    assert (first.at_s, first.prompt_tokens, first.output_tokens, first.hash_ids) == (0.0, 374, 44, ())
    assert second.at_s == pytest.approx(4.314579)


def test_only_the_first_rows_are_read(tmp_path):
    path = mooncake(tmp_path, row(), row(1000))
    with path.open("a") as file:
        file.write("not JSON\n")
    assert len(read(path, limit=2)) == 2


def test_requests_without_anything_to_ask_or_answer_are_left_out(tmp_path):
    path = mooncake(tmp_path, row(prompt=0), row(output=0), row(prompt=5, hash_ids=[3]))
    assert [one.prompt_tokens for one in read(path)] == [5]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("trace.txt", "", "must end in"),
        ("trace.jsonl", "", "has no requests"),
        ("trace.jsonl", '{"timestamp": 1}\n', "line 1 of"),
        ("trace.jsonl", "[]\n", "line 1 of"),
        ("trace.csv", AZURE + "2023-11-16,1\n", "line 3 of"),
        ("trace.csv", AZURE + "yesterday,1,2\n", "line 3 of"),
        ("trace.csv", b"\xff\xfe\x00", "can't read"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_place(tmp_path, name, content, problem):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=problem) as caught:
        read(path)
    assert caught.value.field == "trace"
    assert str(path) in caught.value.message


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="can't read"):
        read(tmp_path / "none.jsonl")


def test_lengths_and_times_are_scaled_each_by_its_factor():
    (one,) = scaled([TraceRow(8.0, 1000, 100, (1, 2))], lengths=0.25, times=0.5)
    assert one == TraceRow(4.0, 250, 25, (1, 2), block_tokens=128.0)


def test_nothing_is_scaled_to_nothing():
    (one,) = scaled([TraceRow(1.0, 3, 2)], lengths=0.01, times=0.01)
    assert (one.prompt_tokens, one.output_tokens) == (1, 1)


@pytest.mark.parametrize("factor", [1.0, 0.25, 0.1, 1 / 3, 0.03])
def test_equal_hash_ids_are_equal_prefixes_and_others_are_not(factor):
    same = 2 * 512 + 100  # tokens: two whole blocks and a part of the third
    rows = [
        TraceRow(0.0, same, 10, (7, 8, 9)),
        TraceRow(0.0, 3 * 512, 10, (7, 8, 9)),
        TraceRow(0.0, 3 * 512, 10, (7, 8, 10)),
        TraceRow(0.0, 3 * 512, 10, (11, 12, 13)),
    ]
    part, whole, sibling, stranger = (ids_of(one, number) for number, one in enumerate(scaled(rows, factor, 1.0)))
    two_blocks = round(2 * 512 * factor)
    assert whole[: len(part)] == part
    assert whole[:two_blocks] == sibling[:two_blocks]
    assert whole[two_blocks:] != sibling[two_blocks:]
    assert stranger[0:8] != whole[0:8]
    assert len(whole) == round(3 * 512 * factor)


@pytest.mark.parametrize("hash_ids", [(), (1,), (1, 2), (1, 2, 3)])
def test_prompts_are_as_long_as_the_trace_says_whatever_its_hash_ids_cover(hash_ids):
    ids = ids_of(TraceRow(0.0, 900, 1, hash_ids))
    assert len(ids) == 900
    assert all(256 <= token_id < 8192 for token_id in ids)


def test_without_hash_ids_no_two_prompts_begin_alike():
    one = TraceRow(0.0, 64, 1)
    assert ids_of(one, 0)[:8] != ids_of(one, 1)[:8]


def test_a_seed_gives_the_same_prompts_and_another_gives_others():
    one = TraceRow(0.0, 64, 1, (5,))
    assert ids_of(one, seed=3) == ids_of(one, seed=3) != ids_of(one, seed=4)


def test_the_rate_is_of_the_pauses_between_requests():
    rows = [TraceRow(at, 1, 1) for at in (0.0, 1.0, 4.0)]
    assert rate(rows) == pytest.approx(0.5)
    assert rate(rows[:1]) is None
