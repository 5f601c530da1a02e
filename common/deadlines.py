"""Every wait of the system, in seconds, in one place."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Defaults are for production; tests scale them down."""

    heartbeat_s: float = 1.0
    suspect_s: float = 3.0
    dead_s: float = 5.0
    connect_s: float = 5.0  # first contact with a worker, Redis or a holder
    rpc_s: float = 5.0  # one small call to a holder
    router_queue_s: float = 60.0  # a request waiting for a worker
    prefill_s: float = 10.0  # without progress; more for long prompts, see prefill_progress_s
    pull_progress_s: float = 5.0
    decode_token_s: float = 10.0  # a running sequence without a token
    request_s: float = 600.0
    lease_s: float = 30.0
    keepalive_s: float = 10.0  # before the first token's headers
    drain_s: float = 30.0
    http_header_s: float = 10.0  # from a request's first byte, or the connection, to the end of its headers
    http_body_s: float = 60.0  # from there to the end of the body
    http_idle_s: float = 75.0  # a connection between two requests

    def scaled(self, factor: float) -> "Deadlines":
        """All of them times factor."""
        return Deadlines(**{f.name: getattr(self, f.name) * factor for f in fields(self)})
