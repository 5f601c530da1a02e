"""What crosses the wire comes out as it went in, down to the class of an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.batch import EngineLoad, PromptScores, Sample, TokenOutput
from common.engine.sequence import Sequence
from common.errors import BY_CODE, InvalidRequest, KVRelayError, Overloaded
from common.rpc.convert import (
    error_from_proto,
    error_to_proto,
    finish_reason_from_proto,
    load_to_proto,
    logprob_from_proto,
    logprob_to_proto,
    params_from_proto,
    params_to_proto,
    scores_from_proto,
    scores_to_proto,
    token_to_proto,
)
from common.rpc.pb import types_pb2
from common.sampling import FinishReason, Logprob, SamplingParams

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
float32 = st.floats(width=32, allow_nan=False)
float64 = st.floats(allow_nan=False)
logprobs = st.builds(Logprob, token_id=uint32, logprob=float32, rank=uint32)
SEQUENCE = Sequence("s", [1, 2], 2, SamplingParams())

params = st.builds(
    SamplingParams,
    max_tokens=uint32,
    min_tokens=uint32,
    temperature=float64,
    top_p=float64,
    top_k=st.integers(0, 2**31 - 1),
    min_p=float64,
    presence_penalty=float64,
    frequency_penalty=float64,
    repetition_penalty=float64,
    seed=uint64,
    logit_bias=st.lists(st.tuples(uint32, float64), max_size=3).map(tuple),
    logprobs=st.none() | uint32,
    stop_token_ids=st.lists(uint32, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    bad_words=st.lists(st.lists(uint32, max_size=3).map(tuple), max_size=3).map(tuple),
    prompt_logprobs=st.none() | uint32,
)


def token_from_proto(message, sequence):
    stop_token_id = message.stop_token_id if message.HasField("stop_token_id") else None
    reason = finish_reason_from_proto(message)
    return TokenOutput(sequence, message.fork, message.index, sample_from_proto(message), reason, stop_token_id)


def sample_from_proto(message):
    return Sample(message.token_id, tuple(logprob_from_proto(logprob) for logprob in message.logprobs))


def load_from_proto(message):
    return EngineLoad(
        running=message.running,
        waiting=message.waiting,
        waiting_tokens=message.waiting_tokens,
        total_blocks=message.total_blocks,
        free_blocks=message.free_blocks,
        reserved_blocks=message.reserved_blocks,
        steps=message.progress,
    )


def wired(message):
    """The message as it arrives."""
    return type(message).FromString(message.SerializeToString())


@given(params)
def test_params_come_out_as_they_went_in(sent):
    assert params_from_proto(wired(params_to_proto(sent))) == sent


def test_every_field_of_the_params_is_carried():
    defaults = SamplingParams()
    changed = SamplingParams(
        2, 1, 0.5, 0.25, 3, 0.125, 0.75, -0.5, 1.5, 2**64 - 1, ((1, -1.0),), 0, (7,), True,
        ((3,), (4, 5)), 2,
    )  # fmt: skip
    for name in SamplingParams.__slots__:
        assert getattr(changed, name) != getattr(defaults, name), f"{name} is not tested"
    assert params_from_proto(wired(params_to_proto(changed))) == changed
    assert len(SamplingParams.__slots__) == len(types_pb2.SamplingParams.DESCRIPTOR.fields)


def test_no_logprobs_and_zero_logprobs_are_two_things():
    for logprobs in (None, 0, 5):
        assert params_from_proto(wired(params_to_proto(SamplingParams(logprobs=logprobs)))).logprobs == logprobs


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens"])
@pytest.mark.parametrize("value", [-1, 2**32])
def test_a_count_that_the_wire_cannot_carry_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequest) as caught:
        params_to_proto(SamplingParams(**{name: value}))
    assert caught.value.field == name


@given(uint32, st.lists(st.lists(logprobs, max_size=3).map(tuple), max_size=3).map(tuple))
def test_scores_come_out_as_they_went_in(first, sent):
    key = types_pb2.AttemptKey(request_id="r", attempt=2)
    message = wired(scores_to_proto(PromptScores(SEQUENCE, first, sent), key))
    assert (message.key, message.first, scores_from_proto(message)) == (key, first, list(sent))


@given(logprobs)
def test_logprobs_come_out_as_they_went_in(sent):
    assert logprob_from_proto(wired(logprob_to_proto(sent))) == sent


@given(
    st.builds(
        TokenOutput,
        sequence=st.just(SEQUENCE),
        fork=uint32,
        index=uint32,
        sample=st.builds(Sample, token_id=uint32, logprobs=st.lists(logprobs, max_size=3).map(tuple)),
        finish_reason=st.none() | st.sampled_from(FinishReason),
        stop_token_id=st.none() | uint32,
    )
)
def test_tokens_come_out_as_they_went_in(sent):
    message = wired(token_to_proto(sent))
    assert token_from_proto(message, SEQUENCE) == sent
    assert sample_from_proto(message) == sent.sample
    assert finish_reason_from_proto(message) is sent.finish_reason


def test_an_unknown_finish_reason_is_an_error():
    with pytest.raises(KVRelayError) as caught:
        finish_reason_from_proto(types_pb2.Token(finish_reason="tired"))
    assert caught.value.field == "finish_reason"


@pytest.mark.parametrize("code", sorted(BY_CODE))
@pytest.mark.parametrize("field", [None, "max_tokens"])
def test_every_error_class_survives_the_wire(code, field):
    sent = BY_CODE[code]("what went wrong, ünd where", field=field)
    got = error_from_proto(wired(error_to_proto(sent)))
    assert type(got) is type(sent)
    assert (got.message, got.field, got.code) == (sent.message, sent.field, code)
    assert (got.http_status, got.grpc_status, got.resumable) == (sent.http_status, sent.grpc_status, sent.resumable)


def test_an_error_of_a_newer_peer_is_a_plain_one():
    got = error_from_proto(types_pb2.Error(code="of_the_future", message="m"))
    assert type(got) is KVRelayError
    assert (got.message, got.field) == ("m", None)


def test_an_overload_still_has_its_retry_after():
    got = error_from_proto(wired(error_to_proto(Overloaded("full", retry_after_s=7.0))))
    assert isinstance(got, Overloaded)
    assert got.retry_after_s > 0


@given(
    st.builds(
        EngineLoad,
        running=uint32,
        waiting=uint32,
        waiting_tokens=uint64,
        total_blocks=uint32,
        free_blocks=uint32,
        reserved_blocks=uint32,
    ),
    uint32,
)
def test_a_load_comes_out_as_it_went_in(sent, held):
    message = wired(load_to_proto(sent, held_blocks=held))
    assert load_from_proto(message) == sent
    assert (message.held_blocks, message.reserved_blocks) == (held, sent.reserved_blocks)
