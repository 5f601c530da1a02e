"""Every wait of the protocol, every pause before another try and between two looks, in seconds, in one place."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Defaults are for production; tests scale them down."""

    heartbeat_s: float = 1.0
    suspect_s: float = 3.0
    dead_s: float = 5.0
    retry_s: float = 0.05  # the first pause before what failed is tried again; doubles, up to heartbeat_s
    look_s: float = 0.05  # between two looks at what tells nobody when it has changed
    connect_s: float = 5.0  # first contact with a worker, Redis or a holder
    rpc_s: float = 5.0  # one small call to a holder
    router_queue_s: float = 60.0  # a request waiting for a worker
    prefill_s: float = 10.0  # until a prompt's first token, while its worker gets nothing done; see prefill_of_s
    prefill_token_s: float = 0.025  # more, for each token: five times what one takes at 200 tokens/s
    pull_progress_s: float = 5.0
    decode_token_s: float = 10.0  # a running sequence without a token
    request_s: float = 600.0
    lease_s: float = 30.0
    keepalive_s: float = 10.0  # before the first token's headers
    drain_s: float = 30.0
    cache_flush_s: float = 0.02  # in which changes of a prefix cache are gathered
    cache_linger_s: float = 2.0  # after a prefill's answer; by then its own cache events are here
    http_header_s: float = 10.0  # from a request's first byte, or the connection, to the end of its headers
    http_body_s: float = 60.0  # from there to the end of the body
    http_idle_s: float = 75.0  # a connection between two requests
    http_grace_s: float = 1.0  # more for headers that may be here, and not looked at, after the loop was busy
    http_linger_s: float = 2.0  # for what a client still sends of a request that has its answer

    def prefill_of_s(self, num_tokens: int) -> float:
        """prefill_s for a worker that has so many tokens to compute first, even on the slowest engine."""
        return self.prefill_s + num_tokens * self.prefill_token_s

    def scaled(self, factor: float) -> "Deadlines":
        """All of them times factor."""
        return Deadlines(**{f.name: getattr(self, f.name) * factor for f in fields(self)})
