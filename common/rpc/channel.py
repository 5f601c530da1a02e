"""What every gRPC server and channel here has in common: limits, keepalive, health and a clean stop."""

import errno
import re
import socket
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.deadlines import Deadlines
from common.errors import AddressInUse, ConfigError

ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s/:\[\]]+):([0-9]{1,5})")  # host:port, IPv6 in brackets
MAX_MESSAGE_BYTES = 64 * 2**20  # a submission of a million tokens has 5 MB
Options = Sequence[tuple[str, int]]
OpenChannel = Callable[[str, Deadlines], grpc.aio.Channel]


def _options(deadlines: Deadlines) -> list[tuple[str, int]]:
    """A peer that hangs is noticed like one that is gone: a ping after suspect_s, given up at dead_s."""
    patience_ms = _milliseconds(max(deadlines.dead_s - deadlines.suspect_s, deadlines.heartbeat_s))
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", _milliseconds(deadlines.suspect_s)),
        ("grpc.keepalive_timeout_ms", patience_ms),
        ("grpc.http2.ping_timeout_ms", patience_ms),  # a minute by default, whatever the timeout above
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def channel_options(deadlines: Deadlines) -> Options:
    """For a channel to a worker: reconnects fast, and shares its connection with no other channel."""
    return [
        *_options(deadlines),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", max(100, _milliseconds(deadlines.suspect_s))),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(deadlines: Deadlines) -> Options:
    """For a worker's server: accepts such pings, and never shares its port with another process."""
    return [
        *_options(deadlines),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ]


def open_channel(address: str, deadlines: Deadlines) -> grpc.aio.Channel:
    """A channel to host:port; it connects with the first call."""
    return grpc.aio.insecure_channel(address, options=channel_options(deadlines))


class GrpcServer:
    """A server with the health service: add servicers to `server`, start(), then set_serving(True)."""

    def __init__(self, host: str, port: int, deadlines: Deadlines) -> None:
        self.server = grpc.aio.server(options=server_options(deadlines))
        self.port = port  # after bind() the one that is bound
        self._host = host
        self._bound = False
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)

    @property
    def address(self) -> str:
        """host:port as bound; to others it may be another."""
        return join_address(self._host, self.port)

    def bind(self) -> None:
        """Takes the port; nothing is answered yet. Raises AddressInUse, or ConfigError for an impossible address."""
        _check_bindable(self._host, self.port)
        try:
            self.port = self.server.add_insecure_port(self.address)
        except RuntimeError as error:  # another process was quicker than the check
            raise AddressInUse(f"can't bind {self.address}", field="port") from error
        self._bound = True

    async def start(self) -> None:
        """Binds, unless that is done, and listens, not serving yet."""
        if not self._bound:
            self.bind()
        await self.set_serving(False)
        await self.server.start()

    async def set_serving(self, serving: bool) -> None:
        """What the health service says of the whole server (service name "")."""
        status = health_pb2.HealthCheckResponse
        await self._health.set("", status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Says not serving for good, takes no new call, and cancels after grace_s what still runs.

        Streams without an end (Relay, health Watch) use up the whole grace: end one's own before.
        """
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def join_address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_address(text: str) -> bool:
    """Whether it is host:port, with a port that something can be reached at."""
    match = ADDRESS.fullmatch(text)
    return match is not None and 0 < int(match[1]) < 2**16


def _check_bindable(host: str, port: int) -> None:
    """Tries plain sockets first: gRPC doesn't say what is wrong, and takes a part of a host's addresses for success."""
    address = join_address(host, port)
    if not 0 <= port < 2**16:
        raise ConfigError(f"port must be in [0, 65536), got {port}", field="port")
    try:
        places = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"can't bind {address}: {error}", field="host") from error
    problems: list[OSError] = []
    for family, kind, protocol, _, place in places:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            problems.append(error)
    if any(problem.errno == errno.EADDRINUSE for problem in problems):
        raise AddressInUse(f"{address} is in use by another process", field="port")
    if len(problems) == len(places):  # some are normal: localhost may have an IPv6 address that the host lacks
        raise ConfigError(f"can't bind {address}: {problems[0].strerror}", field="host")
