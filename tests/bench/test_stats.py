"""Percentiles are numpy's, and a summary says median and quartiles of what was measured."""

import math

import numpy as np
import pytest

from bench.stats import median, percentile, rounded, summary


@pytest.mark.parametrize("percent", [0, 1, 25, 50, 90, 99, 100])
@pytest.mark.parametrize("values", [[3.0], [2.0, 1.0], [5.0, 1.0, 4.0, 1.0], list(range(101))])
def test_percentiles_are_numpys(values, percent):
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_no_values_have_no_percentile():
    assert math.isnan(percentile([], 50))
    assert math.isnan(median([]))


@pytest.mark.parametrize(
    ("value", "shown"), [(123456.0, 123500.0), (0.00012345, 0.0001234), (0.0, 0.0), (math.nan, None), (None, None)]
)
def test_figures_have_four_digits_and_nothing_that_json_lacks(value, shown):
    assert rounded(value) == shown


def test_a_summary_has_medians_and_quartiles():
    assert summary({"a": [1.0, 2.0, 3.0, 4.0, 5.0]}) == {"a": 3.0, "spread": {"a": [2.0, 4.0]}}


def test_what_was_not_measured_is_none_and_has_no_spread():
    assert summary({"a": [], "b": [None, 2.0]}) == {"a": None, "b": 2.0, "spread": {"b": [2.0, 2.0]}}
