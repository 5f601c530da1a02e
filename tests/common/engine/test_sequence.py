"""Sampling parameters out of range are refused by name, and a fork's sequence shares nothing that changes."""

import math
from dataclasses import fields

import pytest

from common.errors import InvalidRequest
from common.sampling import SamplingParams
from tests.support.builders import sequence

NAN, INF = math.nan, math.inf
VOCAB = 100


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("max_tokens", [1, 2**31], [0, -1]),
        ("min_tokens", [0, 16], [-1, 17]),  # max_tokens is 16
        ("temperature", [0.0, 1e-6, 1e4], [-0.1, 1.1e4, NAN, INF]),
        ("top_p", [1e-9, 1.0], [0.0, -0.1, 1.01, NAN, INF]),
        ("top_k", [0, 1, VOCAB + 1, 2**31 - 1], [-1, 2**31]),
        ("min_p", [0.0, 1.0], [-0.01, 1.01, NAN]),
        ("presence_penalty", [-2.0, 2.0], [-2.01, 2.01, NAN]),
        ("frequency_penalty", [-2.0, 2.0], [-2.01, 2.01, NAN]),
        ("repetition_penalty", [1e-3, 1e4], [0.0, -1.0, 1.1e4, NAN, INF]),
        ("seed", [0, 2**64 - 1], [-1, 2**64]),
        ("logprobs", [None, 0, 20], [-1, 21]),
        ("logit_bias", [(), ((0, -100.0), (99, 100.0))], [((100, 1.0),), ((-1, 1.0),), ((1, 100.1),), ((1, NAN),)]),
        ("stop_token_ids", [(), (0, 99)], [(100,), (-1,), (5, 100)]),
        ("ignore_eos", [True, False], []),
    ],
)
def test_parameters_are_held_to_their_bounds(field, good, bad):
    for value in good:
        SamplingParams(**{field: value}).validate(VOCAB)
    for value in bad:
        with pytest.raises(InvalidRequest, match=field) as caught:
            SamplingParams(**{field: value}).validate(VOCAB)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("banned", "field"),
    [
        ({"bad_words": tuple((word,) for word in range(51))}, "bad_words"),
        ({"stop_token_ids": tuple(range(51)), "min_tokens": 1}, "stop_token_ids"),
        ({"bad_words": ((1,),), "stop_token_ids": tuple(range(50)), "min_tokens": 1}, "bad_words"),
    ],
)
def test_bans_that_leave_few_tokens_to_draw_are_refused(banned, field):
    with pytest.raises(InvalidRequest, match="too few tokens") as caught:
        SamplingParams(**banned).validate(VOCAB)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "banned", [{"stop_token_ids": tuple(range(100))}, {"stop_token_ids": (1,) * 99, "min_tokens": 1}]
)
def test_stop_tokens_are_only_banned_before_min_tokens_and_count_once(banned):
    SamplingParams(**banned).validate(VOCAB)


def test_defaults_are_valid_and_change_nothing_but_length():
    SamplingParams().validate(VOCAB)
    assert (SamplingParams().temperature, SamplingParams().top_p, SamplingParams().repetition_penalty) == (1, 1, 1)


def test_prompt_and_output_are_the_tokens():
    one = sequence([1, 2, 3], output=[4, 5])
    assert (one.prompt_ids, one.output_ids, one.token_ids) == ([1, 2, 3], [4, 5], [1, 2, 3, 4, 5])
    assert (one.num_tokens, one.num_output_tokens) == (5, 2)


def test_a_fork_has_its_own_lists_and_all_else_in_common():
    one = sequence(5, forks=(0, 3))
    one.block_ids, one.block_hashes, one.arrived_s = [7], [b"h"], 1.5
    fork = one.split(3)
    assert fork.forks == (3,)
    for item in fields(one):
        if item.name != "forks":
            assert getattr(fork, item.name) == getattr(one, item.name)
    for name in ("token_ids", "block_ids", "block_hashes"):
        assert getattr(fork, name) is not getattr(one, name)


def test_sequences_with_the_same_tokens_are_not_the_same():
    assert sequence(5) != sequence(5)
