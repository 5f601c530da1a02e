"""What crosses the wire comes out as it went in, down to the class of an error."""

import pytest
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from common.errors import BY_CODE, InvalidRequest, KVRelayError, Overloaded
from common.rpc.convert import (
    FINISH_REASONS,
    content_of,
    envelopes,
    error_from_proto,
    error_to_proto,
    finish_reason_from_proto,
    finish_reason_to_proto,
    logprob_from_proto,
    logprob_to_proto,
    params_from_proto,
    params_to_proto,
)
from common.rpc.pb import decode_pb2, prefill_pb2, types_pb2
from common.sampling import FinishReason, Logprob, SamplingParams

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
float32 = st.floats(width=32, allow_nan=False)
float64 = st.floats(allow_nan=False)
logprobs = st.builds(Logprob, token_id=uint32, logprob=float32, rank=uint32)

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


@given(logprobs)
def test_logprobs_come_out_as_they_went_in(sent):
    assert logprob_from_proto(wired(logprob_to_proto(sent))) == sent


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_every_way_to_end_is_carried(reason):
    message = wired(types_pb2.Token(finish_reason=finish_reason_to_proto(reason)))
    assert finish_reason_from_proto(message) is reason


def test_the_wire_has_no_other_way_to_end():
    assert set(types_pb2.FinishReason.values()) == {0, *FINISH_REASONS.values()}


ENVELOPES = [prefill_pb2.PrefillCommand, prefill_pb2.PrefillEvent, decode_pb2.DecodeCommand, decode_pb2.DecodeEvent]


@pytest.mark.parametrize("kind", ENVELOPES)
def test_a_message_comes_out_of_its_envelope_with_its_type(kind):
    wrap, [oneof] = envelopes(kind), kind.DESCRIPTOR.oneofs
    for field in oneof.fields:
        sent = GetMessageClass(field.message_type)()
        envelope = wired(wrap(sent))
        assert envelope.WhichOneof(oneof.name) == field.name
        assert type(content_of(envelope)) is type(sent)


def test_an_envelope_takes_only_what_it_has_a_field_for():
    with pytest.raises(KeyError):
        envelopes(prefill_pb2.PrefillEvent)(decode_pb2.Admitted())


@pytest.mark.parametrize("data", [b"", b"\xfa\x07\x00"], ids=["a heartbeat", "a newer peer's event"])
def test_an_envelope_without_a_message_that_is_known_is_empty(data):
    assert content_of(prefill_pb2.PrefillEvent.FromString(data)) is None


def test_an_unknown_finish_reason_is_an_error():
    with pytest.raises(KVRelayError) as caught:
        finish_reason_from_proto(types_pb2.Token(finish_reason=99))
    assert caught.value.field == "finish_reason"


@pytest.mark.parametrize("code", sorted(BY_CODE))
@pytest.mark.parametrize("field", [None, "max_tokens"])
def test_every_error_class_survives_the_wire(code, field):
    sent = BY_CODE[code]("what went wrong, ünd where", field=field)
    got = error_from_proto(wired(error_to_proto(sent)))
    assert type(got) is type(sent)
    assert (got.message, got.field, got.code) == (sent.message, sent.field, code)
    assert (got.http_status, got.resumable) == (sent.http_status, sent.resumable)


def test_an_error_of_a_newer_peer_is_a_plain_one():
    got = error_from_proto(types_pb2.Error(code="of_the_future", message="m"))
    assert type(got) is KVRelayError
    assert (got.message, got.field) == ("m", None)


def test_an_overload_still_has_its_retry_after():
    got = error_from_proto(wired(error_to_proto(Overloaded("full", retry_after_s=7.0))))
    assert isinstance(got, Overloaded)
    assert got.retry_after_s > 0
