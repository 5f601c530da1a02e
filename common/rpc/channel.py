"""What every gRPC server and channel here has in common: limits, keepalive, health and a clean stop."""

from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.address import join_address
from common.deadlines import Deadlines
from common.errors import AddressInUse
from common.listening import check_bindable

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
        ("grpc.enable_http_proxy", 0),  # proxies of the environment are for the world outside
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
        check_bindable(self._host, self.port)  # gRPC doesn't say what is wrong, and takes a part for success
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
