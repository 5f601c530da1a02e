"""The sampler gives what plain Python arithmetic gives, and a token depends on nothing but its own sequence."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from common.engine.batch import Batch, Sample, ScheduledChunk
from common.engine.sampler import Sampler, adjust, distribution, draw, uniform
from common.engine.sequence import Sequence
from common.sampling import SamplingParams, fork_seed
from tests.support.builders import EOS, sequence

torch.set_num_threads(1)
SETTINGS = settings(max_examples=120, deadline=None)
PEAKED = [0.5, 2.0, -1.0, 3.25, 0.0, 1.5, -4.0, 2.0]  # 8 tokens; 1 and 7 tie
TOP_OF_ROUND = 1 - 2.0**-53  # the largest number that uniform() gives


def sample(logits: list[float], *sequences: Sequence, eos: tuple[int, ...] = (EOS,)) -> list[list[Sample]]:
    """Samples for sequences that all have these logits."""
    chunks = tuple(ScheduledChunk(s, s.num_tokens - 1, (s.token_ids[-1],), (0,), sampled=range(1)) for s in sequences)
    return Sampler(eos)(torch.tensor([logits] * len(sequences)), Batch(chunks))


def token(logits: list[float], one: Sequence, eos: tuple[int, ...] = (EOS,)) -> int:
    return sample(logits, one, eos=eos)[0][0].token_id


# The same arithmetic, in plain Python.


def plain_adjust(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    logits = list(logits)
    for word in params.bad_words:
        if tuple([*output, word[-1]][-len(word) :]) == word:
            logits[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for stop in (EOS, *params.stop_token_ids):
            logits[stop] = -math.inf
    for token_id, bias in params.logit_bias:
        logits[token_id] += bias
    for token_id in {*prompt, *output}:
        value = logits[token_id]
        logits[token_id] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token_id, count in Counter(output).items():
        logits[token_id] -= params.frequency_penalty * count + params.presence_penalty
    return logits


def softmax(logits: list[float]) -> list[float]:
    highest = max(logits)
    weights = [math.exp(value - highest) for value in logits]
    return [weight / sum(weights) for weight in weights]


def plain_distribution(logits: list[float], params: SamplingParams) -> list[float]:
    """Skips the case when a border is too near to tell sides in float32."""
    weights = softmax([value / params.temperature for value in logits])
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    if params.min_p:
        border = params.min_p * weights[order[0]]
        assume(all(abs(weight - border) > 1e-6 for weight in weights))
        order = [i for i in order if weights[i] >= border]
    if params.top_k and len(order) > params.top_k:
        border = weights[order[params.top_k - 1]]
        order = [i for i in order if weights[i] >= border]
    if params.top_p < 1:
        whole, before, kept = sum(weights[i] for i in order), 0.0, []
        for i in order:
            assume(abs(before - params.top_p * whole) > 1e-6)
            if before < params.top_p * whole:
                kept.append(i)
            before += weights[i]
        order = kept
    total = sum(weights[i] for i in order)
    return [weights[i] / total if i in order else 0.0 for i in range(len(weights))]


def normalized(weights: torch.Tensor) -> list[float]:
    return (weights.double() / weights.double().sum()).tolist()


LOGITS = st.lists(st.integers(-16, 16).map(lambda n: n / 4), min_size=8, max_size=8)  # a grid, so that ties come up
PENALTY = st.sampled_from([0.0, 0.0, -2.0, 0.5, 2.0])
IDS = st.lists(st.integers(0, 7), max_size=6)
ADJUSTING = st.fixed_dictionaries(
    {
        "min_tokens": st.integers(0, 7),
        "stop_token_ids": st.lists(st.integers(0, 6), max_size=2).map(tuple),
        "logit_bias": st.lists(st.tuples(st.integers(0, 7), st.sampled_from([-100.0, -1.5, 2.0])), max_size=3).map(
            tuple
        ),
        "bad_words": st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
        "repetition_penalty": st.sampled_from([1.0, 1.25, 0.5, 4.0]),
        "frequency_penalty": PENALTY,
        "presence_penalty": PENALTY,
    }
)
TRUNCATING = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1.0, 0.5, 2.0, 0.2]),  # far from what float32 rounds to 0
        "top_k": st.integers(0, 9),
        "top_p": st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 0.001]),
        "min_p": st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
    }
)


@given(LOGITS, ADJUSTING, IDS, IDS)
@SETTINGS
def test_masks_bias_and_penalties_are_those_of_plain_python(logits, values, prompt, output):
    one = sequence([1, *prompt], output=output, max_tokens=8, **values)
    adjusted = adjust(torch.tensor(logits), one.params, one, (EOS,))
    assert adjusted.tolist() == pytest.approx(plain_adjust(logits, one.params, one.prompt_ids, output), abs=1e-4)


@given(LOGITS, TRUNCATING)
@SETTINGS
def test_truncated_distributions_are_those_of_plain_python(logits, values):
    params = SamplingParams(**values)
    expected = plain_distribution(logits, params)
    weights = normalized(distribution(torch.tensor(logits), params))
    assert [weight > 0 for weight in weights] == [weight > 0 for weight in expected]
    assert weights == pytest.approx(expected, abs=1e-5)


EQUAL = [1.0, 1.0, 1.0, 1.0]
TENTHS = [math.log(tenths) for tenths in (4, 3, 2, 1)]


@pytest.mark.parametrize(
    ("logits", "values", "kept"),
    [
        (EQUAL, {"top_p": 0.5}, {0, 1}),  # ties in token order, the border itself is out
        (EQUAL, {"top_p": 0.51}, {0, 1, 2}),
        (EQUAL, {"top_p": 1e-9}, {0}),  # never empty
        (EQUAL, {"top_k": 1}, {0, 1, 2, 3}),  # ties stay together
        ([2.0, 1.0, 1.0, 0.0], {"top_k": 2}, {0, 1, 2}),
        ([2.0, 1.0, 1.0, 0.0], {"top_k": 3}, {0, 1, 2}),
        ([2.0, 1.0, 1.0, 0.0], {"top_k": 4}, {0, 1, 2, 3}),
        ([2.0, 1.0, 1.0, 0.0], {"top_k": 5}, {0, 1, 2, 3}),
        ([2.0, 1.0, 1.0, 0.0], {"top_k": 0}, {0, 1, 2, 3}),
        (EQUAL, {"min_p": 1.0}, {0, 1, 2, 3}),
        ([2.0, 1.0, 1.0, 0.0], {"min_p": 1.0}, {0}),
        ([2.0, 1.0, 1.0, 0.0], {"min_p": 0.3}, {0, 1, 2}),  # 1/e = 0.37 of the highest
        ([-math.inf, 1.0, -math.inf, 0.0], {"top_k": 3}, {1, 3}),
        ([-math.inf, 1.0, -math.inf, 0.0], {"top_p": 0.9999}, {1, 3}),
        (TENTHS, {"top_k": 3, "top_p": 0.75}, {0, 1}),  # 0.75 of the 0.9 that is left
        (TENTHS, {"min_p": 0.4, "top_p": 0.75}, {0, 1}),
        (TENTHS, {"top_p": 0.75}, {0, 1, 2}),
        (TENTHS, {"top_k": 3, "min_p": 0.7}, {0, 1}),
        ([2.0, 1.0, 1.0, 0.0], {"top_k": 1, "temperature": 1e4}, {0}),
        ([2.0, 1.0, 1.0, 0.0], {"temperature": 1e-5}, {0}),
        (EQUAL, {"top_k": 2, "top_p": 0.5, "min_p": 0.5}, {0, 1}),
    ],
)
def test_ties_and_borders_of_truncation(logits, values, kept):
    weights = distribution(torch.tensor(logits), SamplingParams(**values))
    assert set(weights.nonzero().flatten().tolist()) == kept


@pytest.mark.parametrize(("written", "banned"), [(0, True), (1, True), (2, False), (3, False)])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_eos_and_stop_tokens_cannot_come_before_min_tokens(written, banned, ignore_eos):
    one = sequence([4], output=[5] * written, min_tokens=2, stop_token_ids=(3,), ignore_eos=ignore_eos, temperature=1.0)
    weights = distribution(adjust(torch.tensor(PEAKED), one.params, one, (EOS,)), one.params)
    assert [bool(weights[i] == 0) for i in (EOS, 3, 1)] == [banned, banned, False]


def test_min_tokens_without_any_stop_token_changes_nothing():
    assert token(PEAKED, sequence([4], min_tokens=2), eos=()) == 3


def test_a_bias_cannot_bring_a_banned_token_back():
    one = sequence([4], min_tokens=2, stop_token_ids=(3,), logit_bias=((3, 100.0), (5, 1.0)))
    assert token(PEAKED, one) == 5


def test_repetition_counts_the_prompt_and_the_other_penalties_do_not():
    assert token(PEAKED, sequence([3], repetition_penalty=4.0)) == 1
    assert token(PEAKED, sequence([3, 3, 3], frequency_penalty=2.0, presence_penalty=2.0)) == 3
    assert token(PEAKED, sequence([3], output=[3], frequency_penalty=2.0)) == 1
    assert token(PEAKED, sequence([3], output=[3], presence_penalty=2.0)) == 1


@pytest.mark.parametrize("penalty", [2.0**-126, 1e-38, 1e-30, 1e4])
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0, 1e4])
def test_an_extreme_repetition_penalty_still_draws_a_token_of_the_model(penalty, temperature):
    one = sequence([0, 1, 2, 3, 4], min_tokens=2, repetition_penalty=penalty, temperature=temperature)
    drawn = token([30.0, 29.0, -30.0, 40.0, 1.0, 0.5, -1.0, 2.0], one)
    assert drawn in ((1, 3, 4) if penalty < 1 else range(1, 8))  # those seen whose logit is above zero


def test_a_resumed_output_is_output_not_prompt():
    fresh, resumed = sequence([4, 3], presence_penalty=2.0), sequence([4], output=[3], presence_penalty=2.0)
    assert (token(PEAKED, fresh), token(PEAKED, resumed)) == (3, 1)


# Draws.


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (9e-6, True), (1e-5, False), (1.0, False)])
def test_temperatures_near_zero_are_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


@pytest.mark.parametrize(("logits", "best"), [(PEAKED, 3), (EQUAL, 0), ([0.0, 2.0, 2.0], 1)])
def test_greedy_takes_the_first_of_the_highest(logits, best):
    assert {token(logits, sequence([1], seed=seed)) for seed in range(5)} == {best}


@given(st.lists(st.integers(0, 8), min_size=1, max_size=12).filter(any), st.integers(0, 63))
@SETTINGS
def test_a_draw_is_the_inverse_of_the_cumulated_weights_in_token_order(weights, sixtyfourths):
    number = sixtyfourths / 64
    drawn = draw(torch.tensor(weights, dtype=torch.float32) / 16, number)
    assert sum(weights[:drawn]) <= number * sum(weights) < sum(weights[: drawn + 1])


@pytest.mark.parametrize("number", [0.0, 0.5, TOP_OF_ROUND])
def test_a_token_without_weight_is_never_drawn(number):
    assert draw(torch.tensor([0.0, 0.0, 0.3, 0.0]), number) == 2


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=40).filter(any))
@SETTINGS
def test_the_largest_number_draws_a_token_with_weight(weights):
    assert weights[draw(torch.tensor(weights), TOP_OF_ROUND)] > 0


def philox(key: int, counter: int) -> int:
    """First word of Philox4x64-10, after the paper."""
    words = [counter >> (64 * i) & (2**64 - 1) for i in range(4)]
    k0, k1 = key & (2**64 - 1), key >> 64
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        words = [(b >> 64) ^ words[1] ^ k0, b & (2**64 - 1), (a >> 64) ^ words[3] ^ k1, a & (2**64 - 1)]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) % 2**64, (k1 + 0xBB67AE8584CAA73B) % 2**64
    return words[0]


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 511, 2**20])
def test_uniform_numbers_are_those_of_philox(seed, position):
    number = uniform(seed, position)
    assert number == (philox(seed, position + 1) >> 11) / 2**53
    assert 0 <= number < 1


def chi_squared(drawn: list[int], weights: list[float]) -> float:
    counts = Counter(drawn)
    assert all(weights[i] > 0 for i in counts)
    expected = [(i, weight * len(drawn)) for i, weight in enumerate(weights) if weight > 0]
    return sum((counts[i] - mean) ** 2 / mean for i, mean in expected)


@pytest.mark.parametrize("over", ["positions", "seeds", "forks"])
def test_tokens_come_as_often_as_their_probability_says(over):
    params = SamplingParams(top_k=5, temperature=1.5)
    weights = distribution(torch.tensor(PEAKED), params)
    numbers = {
        "positions": lambda i: uniform(7, i),
        "seeds": lambda i: uniform(i, 3),
        "forks": lambda i: uniform(fork_seed(7, i), 0),
    }[over]
    drawn = [draw(weights, numbers(i)) for i in range(4000)]
    assert chi_squared(drawn, normalized(weights)) < 18.5  # 99.9 % of chi-squared with 4 degrees of freedom


@pytest.mark.parametrize("seed", [0, 5, 2**64 - 1])
def test_fork_zero_has_the_seed_of_the_request_and_all_others_their_own(seed):
    assert fork_seed(seed, 0) == seed
    seeds = [fork_seed(seed, index) for index in range(200)]
    assert len(set(seeds)) == 200
    assert all(0 <= value < 2**64 for value in seeds)


def test_forks_get_what_each_would_get_alone():
    together = sample(PEAKED, sequence([1], forks=(0, 2, 5), temperature=2.0, seed=9))[0]
    alone = [sample(PEAKED, sequence([1], forks=(i,), temperature=2.0, seed=9))[0][0] for i in (0, 2, 5)]
    assert together == alone
    assert [s.token_id for s in alone] == [
        draw(torch.tensor(PEAKED).div(2).softmax(0), uniform(fork_seed(9, i), 0)) for i in (0, 2, 5)
    ]


def test_a_token_does_not_depend_on_who_else_is_in_the_batch():
    company = [
        sequence([1], temperature=2.0, seed=3),
        sequence([1, 2], temperature=0.0, logprobs=2),
        sequence([3], output=[3, 5], temperature=1.0, seed=4, top_p=0.9, frequency_penalty=1.0, logprobs=0),
        sequence([4], forks=(0, 1, 2), temperature=1.5, seed=3, min_p=0.02),
    ]
    logits = torch.tensor([PEAKED, EQUAL * 2, PEAKED[::-1], PEAKED]) * torch.tensor([[1.0], [1.0], [0.5], [2.0]])
    alone = [sample(row.tolist(), one)[0] for row, one in zip(logits, company, strict=True)]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3], [1, 1, 0]):
        chunks = tuple(ScheduledChunk(company[i], 0, (1,), (0,), sampled=range(1)) for i in order)
        assert Sampler((EOS,))(logits[order], Batch(chunks)) == [alone[i] for i in order]


def test_rows_belong_to_the_chunks_that_sample():
    one, other = sequence([1, 2]), sequence([1, 2])
    chunks = (
        ScheduledChunk(one, 0, (1,), (0,), sampled=range(0)),
        ScheduledChunk(other, 1, (2,), (0,), sampled=range(1)),
    )
    assert Sampler(())(torch.tensor([PEAKED]), Batch(chunks)) == [[Sample(3)]]
    assert Sampler(())(torch.empty(0, 8), Batch(chunks[:1])) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_resume_draws_what_the_unbroken_sequence_draws(temperature):
    values = {"temperature": temperature, "seed": 11, "presence_penalty": 0.5, "min_tokens": 2, "max_tokens": 6}
    output: list[int] = []
    while len(output) < 6:
        resumed = sequence([1, 2], output=output, **values)
        going_on = sequence([1, 2], **values)
        going_on.token_ids += output
        going_on.num_computed_tokens = going_on.num_tokens - 1
        assert token(PEAKED, resumed) == token(PEAKED, going_on)
        output.append(token(PEAKED, resumed))


def test_positions_draw_independently():
    drawn = {
        tuple(token(EQUAL, sequence([1], output=[2] * k, temperature=1.0, seed=s)) for k in range(6)) for s in range(9)
    }
    assert len(drawn) == 9


# Log-probabilities.


def plain_logprobs(logits: list[float]) -> list[float]:
    return [math.log(weight) for weight in softmax(logits)]


@pytest.mark.parametrize("temperature", [0.0, 3.0])
@pytest.mark.parametrize("count", [0, 1, 5, 8, 20])
def test_logprobs_are_the_chosen_tokens_and_the_top_ones(temperature, count):
    distinct = [value - i / 64 for i, value in enumerate(PEAKED)]
    expected = plain_logprobs(distinct)
    order = sorted(range(8), key=lambda i: -expected[i])
    chosen, *top = sample(distinct, sequence([1], temperature=temperature, logprobs=count, seed=1))[0][0].logprobs
    assert chosen.token_id == token(distinct, sequence([1], temperature=temperature, seed=1))
    assert (chosen.rank, chosen.logprob) == (order.index(chosen.token_id) + 1, pytest.approx(expected[chosen.token_id]))
    assert [one.token_id for one in top] == order[:count]
    assert [one.rank for one in top] == list(range(1, len(top) + 1))
    assert [one.logprob for one in top] == pytest.approx([expected[i] for i in order[:count]])


def test_no_logprobs_are_given_unasked():
    assert sample(PEAKED, sequence([1]))[0][0].logprobs == ()


@pytest.mark.parametrize(("chosen", "rank"), [(3, 1), (1, 2), (7, 2), (5, 4), (6, 8)])
def test_rank_counts_the_tokens_that_are_more_likely(chosen, rank):
    one = sequence([2], logit_bias=((chosen, 100.0),), logprobs=0)
    assert sample(PEAKED, one)[0][0].logprobs[0].rank == rank


def test_logprobs_are_the_models_own_and_logits_are_left_alone():
    one = sequence(
        [3],
        output=[3],
        temperature=0.5,
        top_k=1,
        logit_bias=((6, 50.0),),
        repetition_penalty=2.0,
        min_tokens=3,
        frequency_penalty=1.0,
        logprobs=8,
    )
    logits = torch.tensor([PEAKED])
    chunk = ScheduledChunk(one, 0, (1,), (0,), sampled=range(1))
    chosen, *_ = Sampler((EOS,))(logits, Batch((chunk,)))[0][0].logprobs
    assert (chosen.token_id, chosen.logprob) == (6, pytest.approx(plain_logprobs(PEAKED)[6]))
    assert logits.tolist() == [PEAKED]
