"""Rows of results: JSON lines for programs, aligned columns for people."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


class ResultTable:
    """Prints each row as it comes; a table shows the named columns alone."""

    def __init__(self, columns: Sequence[str], *, as_json: bool) -> None:
        self._columns = [(name, max(len(name), 8)) for name in columns]
        self._as_json = as_json
        self._started = False

    def row(self, row: Row) -> None:
        if self._as_json:
            print(json.dumps(row, allow_nan=False), flush=True)
            return
        if not self._started:
            self._started = True
            print("  ".join(name.rjust(width) for name, width in self._columns))
        print("  ".join(cell(row.get(name)).rjust(width) for name, width in self._columns), flush=True)

    def say(self, text: str) -> None:
        """A line for people: what a table alone does not tell."""
        if not self._as_json:
            print(text, flush=True)


def note(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


def cell(value: Any) -> str:
    """A value as a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
