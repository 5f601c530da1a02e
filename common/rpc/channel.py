"""What every gRPC server and channel here has in common: limits, keepalive, health and a clean stop."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.address import join_address
from common.deadlines import Deadlines
from common.errors import AddressInUse
from common.listening import check_bindable
from common.rpc.keyed_channel import KeyedChannel
from common.rpc.keyed_server import KeyedServer
from common.rpc.pb import cluster_pb2_grpc
from common.rpc.security import OPEN, Security

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


def open_channel(address: str, deadlines: Deadlines, security: Security = OPEN) -> grpc.aio.Channel:
    """A channel to host:port; it connects with the first call."""
    channel = _plain_channel(address, deadlines, security)
    return channel if security.key is None else KeyedChannel(channel, address, security.key, deadlines)


def channel_opener(security: Security) -> OpenChannel:
    """open_channel for a process that was told how to prove and protect its calls."""
    return partial(open_channel, security=security)


def _plain_channel(address: str, deadlines: Deadlines, security: Security) -> grpc.aio.Channel:
    if security.tls is None:
        return grpc.aio.insecure_channel(address, options=channel_options(deadlines))
    options: list[tuple[str, Any]] = [*channel_options(deadlines), *security.tls.channel_options()]
    return grpc.aio.secure_channel(address, security.tls.channel_credentials(), options=options)


class GrpcServer:
    """A server with the health service: add servicers to `server`, start(), then set_serving(True)."""

    def __init__(self, host: str, port: int, deadlines: Deadlines, security: Security = OPEN) -> None:
        self.security = security
        self._keyed = None if security.key is None else KeyedServer(security.key, deadlines)
        interceptors = [self._keyed] if self._keyed else []
        self.server = grpc.aio.server(options=server_options(deadlines), interceptors=interceptors)
        if self._keyed:
            cluster_pb2_grpc.add_ClusterServicer_to_server(self._keyed, self.server)  # type: ignore[no-untyped-call]
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
            tls = self.security.tls
            if tls is None:
                self.port = self.server.add_insecure_port(self.address)
            else:
                self.port = self.server.add_secure_port(self.address, tls.server_credentials())
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
