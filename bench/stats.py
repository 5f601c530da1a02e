"""Medians and their spread: a figure without both says little on a machine that others use, too."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def percentile(values: Iterable[float], percent: float) -> float:
    """Linear between neighbours, as numpy's default. Not-a-number for no values."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def median(values: Iterable[float]) -> float:
    return percentile(values, 50)


def rounded(value: float | None, digits: int = 4) -> float | None:
    """To significant digits; JSON has no not-a-number, so that becomes None."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def summary(figures: Mapping[str, Sequence[float | None]]) -> dict[str, Any]:
    """Each figure's median over its runs, and `spread`, its quartiles [25 %, 75 %]. None stands for not measured."""
    known = {name: [value for value in values if value is not None] for name, values in figures.items()}
    row: dict[str, Any] = {name: rounded(median(values)) for name, values in known.items()}
    row["spread"] = {
        name: [rounded(percentile(values, 25)), rounded(percentile(values, 75))]
        for name, values in known.items()
        if values
    }
    return row
