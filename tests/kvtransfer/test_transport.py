"""Transports are found by name, in order of preference, and a pool is offered only in ways that work."""

import pytest

from common.errors import ConfigError, TransportUnavailable
from kvtransfer.transport import MODULES, Transport, choose, holders
from kvtransfer.transports.shm import TRANSPORT
from tests.support.kv_fakes import FakePool, GateHolder


class UnsharedPool(FakePool):
    fd = None

    def __init__(self) -> None:
        self.num_blocks, self.block_bytes, self.nonce = 4, 8, b""


def refuse(pool):
    raise TransportUnavailable("no such hardware")


def test_every_registered_transport_has_the_name_it_is_registered_under():
    assert [transport.name for transport in choose()] == list(MODULES)


@pytest.mark.parametrize("setting", ["shm", " shm ", "shm,shm", "shm, shm"])
def test_a_list_of_names_is_taken_once_each(setting):
    assert choose(setting) == (TRANSPORT,)


@pytest.mark.parametrize("setting", ["shm,grpc", "grpc,shm", "grpc, shm,grpc"])
def test_a_list_of_names_is_in_the_order_of_preference(setting):
    names = [transport.name for transport in choose(setting)]
    assert names == list(dict.fromkeys(name.strip() for name in setting.split(",")))


@pytest.mark.parametrize("setting", ["", "pigeon", "shm,", "shm,pigeon", "auto,shm", "SHM"])
def test_an_unknown_name_is_a_config_error(setting):
    with pytest.raises(ConfigError) as caught:
        choose(setting)
    assert caught.value.field == "transport"
    assert "shm" in caught.value.message


def test_a_transport_that_the_pool_does_not_allow_is_left_out():
    gate = Transport("gate", lambda pool: GateHolder(), lambda executor, channel: None)
    usable = holders([Transport("rdma", refuse, lambda executor, channel: None), TRANSPORT, gate], UnsharedPool())
    assert [transport.name for transport in usable] == ["gate"]


def test_no_usable_transport_is_an_error_that_says_why():
    with pytest.raises(TransportUnavailable, match="not shared memory"):
        holders([TRANSPORT], UnsharedPool())


def test_a_shared_pool_is_offered_by_all_and_another_by_grpc_alone():
    pool = FakePool(2)
    assert [holder.name for holder in holders(choose(), pool)] == list(MODULES)
    assert [holder.name for holder in holders(choose(), UnsharedPool())] == ["grpc"]
    pool.close()
