"""What a TCP connection of this host alone carries: byte ranges of one process's memory, with nothing around them."""

import json
import socket
import time
from collections.abc import Sequence

from common.errors import KVRelayError

Ranges = Sequence[tuple[int, int]]  # (start, length), bytes


def serve(listener: socket.socket, memory: memoryview) -> None:
    """Sends the ranges that a line of JSON names, for as long as one peer asks; for a thread."""
    connection, _ = listener.accept()
    with listener, connection, connection.makefile("r") as requests:
        for line in requests:
            for start, length in json.loads(line):
                connection.sendall(memory[start : start + length])


class Loopback:
    """One connection to such a thread in another process."""

    def __init__(self, port: int, timeout_s: float) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout_s)

    def fetch_ms(self, sources: Ranges, memory: memoryview, targets: Ranges) -> float:
        """Milliseconds from the question to the last byte in its place."""
        question = json.dumps(sources).encode() + b"\n"
        began = time.perf_counter()
        self._socket.sendall(question)
        for start, length in targets:
            place = memory[start : start + length]
            while place:
                received = self._socket.recv_into(place)
                if not received:
                    raise KVRelayError("the holder's process has ended")
                place = place[received:]
        return (time.perf_counter() - began) * 1e3

    def close(self) -> None:
        self._socket.close()
