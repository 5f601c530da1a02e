"""Lists of numbers are read in order, and what is none names its flag."""

import pytest

from bench.options import counts
from common.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "least", "values"), [("1", 1, (1,)), ("32,1, 8", 1, (32, 1, 8)), ("0,7", 0, (0, 7)), ("2,2,1", 1, (2, 1))]
)
def test_numbers_keep_their_order_and_come_once(text, least, values):
    assert counts(text, "cores", least=least) == values


@pytest.mark.parametrize("text", ["", "1,", "a", "1;2", "0", "-1", "1.5"])
def test_what_is_no_such_list_names_its_flag(text):
    with pytest.raises(ConfigError, match="--cores") as caught:
        counts(text, "cores")
    assert caught.value.field == "cores"
