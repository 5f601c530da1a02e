"""Rows are JSON lines for programs and one table for people."""

import json

import pytest

from bench.report import ResultTable, cell


def test_json_rows_have_everything_and_nothing_else_is_printed(capsys):
    report = ResultTable(["a"], as_json=True)
    report.say("for people")
    report.row({"a": 1.5, "hidden": None})
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [{"a": 1.5, "hidden": None}]


def test_a_table_has_one_header_and_the_named_columns(capsys):
    report = ResultTable(["cores", "ms"], as_json=False)
    report.row({"cores": 1, "ms": 12.3456, "other": 7})
    report.row({"cores": 2})
    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header == ["cores", "ms"]
    assert rows == [["1", "12.35"], ["2", "-"]]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (1234.56, "1235"), (0.123456, "0.1235"), (12, "12"), ("text", "text"), ([0, 1], "[0, 1]")],
)
def test_cells_are_short(value, shown):
    assert cell(value) == shown
