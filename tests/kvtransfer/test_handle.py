"""A handle crosses the wire unchanged, and one with a field that can't be right is refused by that field's name."""

from dataclasses import replace

import pytest

from common.errors import HandoverError
from common.rpc.pb import kv_pb2
from kvtransfer.handle import KVHandle


def handle(**changes) -> KVHandle:
    fields = {
        "id": bytes(range(16)),
        "address": "127.0.0.1:4000",
        "epoch": 2**64 - 1,
        "fingerprint": "model-a",
        "layout_id": "v1",
        "block_ids": (7, 0, 2**32 - 1),
        "num_tokens": 40,
        "lease_s": 30.0,
        "request_id": "r1",
        "attempt": 2,
    }
    return KVHandle(**(fields | changes))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:65535", "[::1]:4000", "pod-1.prefill.svc:4000"])
def test_a_handle_crosses_the_wire_unchanged(address):
    sent = handle(address=address)
    wire = sent.to_proto().SerializeToString()
    assert KVHandle.from_proto(kv_pb2.KVHandle.FromString(wire)) == sent


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_as_many_blocks_as_the_tokens_take_no_more_no_fewer(num_tokens, num_blocks):
    assert handle(num_tokens=num_tokens, block_ids=tuple(range(num_blocks))).num_tokens == num_tokens
    for wrong in (num_blocks - 1, num_blocks + 1):
        with pytest.raises(HandoverError) as caught:
            handle(num_tokens=num_tokens, block_ids=tuple(range(wrong)))
        assert caught.value.field == "handle.block_ids"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("id", b""),
        ("id", bytes(15)),
        ("id", bytes(17)),
        ("address", ""),
        ("address", "localhost"),
        ("address", ":4000"),
        ("address", "localhost:"),
        ("address", "localhost:0"),
        ("address", "localhost:65536"),
        ("address", "localhost:+80"),
        ("address", "::1:4000"),
        ("address", "unix:/tmp/socket:1"),
        ("address", "dns:///elsewhere:80"),
        ("address", "two words:80"),
        ("address", "localhost:80\n"),
        ("epoch", 0),
        ("epoch", 2**64),
        ("fingerprint", ""),
        ("fingerprint", "x" * 513),
        ("layout_id", ""),
        ("request_id", ""),
        ("num_tokens", 0),
        ("num_tokens", -1),
        ("num_tokens", 2**32),
        ("block_ids", (1, 2, 1)),
        ("block_ids", (1, 2, -1)),
        ("block_ids", (1, 2, 2**32)),
        ("lease_s", 0.0),
        ("lease_s", -1.0),
        ("lease_s", float("nan")),
        ("lease_s", float("inf")),
        ("attempt", -1),
    ],
)
def test_a_wrong_field_is_refused_by_name(name, value):
    with pytest.raises(HandoverError) as caught:
        handle(**{name: value})
    assert caught.value.field == f"handle.{name}"
    assert name in caught.value.message


def test_an_empty_message_is_refused():
    with pytest.raises(HandoverError):
        KVHandle.from_proto(kv_pb2.KVHandle())


def test_the_id_is_not_in_the_repr_nor_in_errors():
    secret = bytes(range(65, 81))
    assert secret.decode() not in repr(handle(id=secret))
    with pytest.raises(HandoverError) as caught:
        replace(handle(id=secret), num_tokens=0)
    assert secret.decode() not in str(caught.value)
