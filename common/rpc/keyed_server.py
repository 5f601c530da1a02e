"""A server's half of the cluster key: it serves no call of a peer that has not proven it, health apart."""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from common.cluster_key import ClusterKey
from common.deadlines import Deadlines
from common.log import get_logger, log_event
from common.rpc.handshake import HEADER, CallVerifier
from common.rpc.pb import cluster_pb2, cluster_pb2_grpc

log = get_logger("key")
OPEN = ("/kvrelay.v1.Cluster/Greet", "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch")
QUIET_S = 60.0  # between two log lines about refusals


class KeyedServer(cluster_pb2_grpc.ClusterServicer, grpc.aio.ServerInterceptor):
    """Greets dialers, and stands before all other services of the server."""

    def __init__(self, key: ClusterKey, deadlines: Deadlines, clock: Callable[[], float] = time.monotonic) -> None:
        self._verifier = CallVerifier(key, clock, deadlines.connect_s)
        self._clock = clock
        self._refused = 0  # since the last line that says so
        self._quiet_until = clock()

    @property
    def num_sessions(self) -> int:
        return self._verifier.num_sessions

    async def Greet(self, request: cluster_pb2.Greeting, context: Any) -> cluster_pb2.Challenge:
        try:
            nonce, proof = self._verifier.greet(request.nonce)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        return cluster_pb2.Challenge(nonce=nonce, proof=proof)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        if method in OPEN:
            return await continuation(handler_call_details)
        header = dict(handler_call_details.invocation_metadata or ()).get(HEADER, b"")
        problem = self._verifier.admit(method, header if isinstance(header, bytes) else header.encode())
        if not problem:
            return await continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(self._refusal(method, problem))

    def _refusal(self, method: str, problem: str) -> Any:
        """Ends any kind of call without reading a message of it."""

        async def refuse(_: Any, context: Any) -> None:
            self._report(method, problem, context.peer())
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, problem)

        return refuse

    def _report(self, method: str, problem: str, peer: str) -> None:
        self._refused += 1
        if self._clock() >= self._quiet_until:
            log_event(log, logging.WARNING, "refused", peer=peer, method=method, reason=problem, calls=self._refused)
            self._refused, self._quiet_until = 0, self._clock() + QUIET_S
