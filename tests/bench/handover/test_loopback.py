"""Ranges arrive through the socket in their places, and nowhere else."""

import os
import socket
import threading

import pytest

from bench.handover.loopback import Loopback, serve
from common.errors import KVRelayError

TIMEOUT_S = 10


@pytest.fixture
def memory():
    return memoryview(os.urandom(3_000_000))


@pytest.fixture
def loopback(memory):
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve, args=(listener, memory))
    thread.start()
    loopback = Loopback(listener.getsockname()[1], TIMEOUT_S)
    yield loopback
    loopback.close()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_ranges_are_fetched_again_and_again(memory, loopback):
    target = bytearray(3_000_000)
    assert loopback.fetch_ms([(5, 10), (2_000_000, 900_000)], memoryview(target), [(100, 10), (7_000, 900_000)]) > 0
    assert loopback.fetch_ms([(0, 1)], memoryview(target), [(0, 1)]) > 0
    expected = bytearray(3_000_000)
    expected[100:110], expected[7_000:907_000], expected[0] = memory[5:15], memory[2_000_000:2_900_000], memory[0]
    assert target == expected


def test_a_sender_that_goes_is_noticed():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        loopback = Loopback(listener.getsockname()[1], TIMEOUT_S)
        connection, _ = listener.accept()
        connection.sendall(b"x")
        connection.shutdown(socket.SHUT_WR)
        with pytest.raises(KVRelayError, match="has ended"):
            loopback.fetch_ms([(0, 2)], memoryview(bytearray(2)), [(0, 2)])
        loopback.close()
        connection.close()
