"""Settings of the router."""

from dataclasses import dataclass, replace

from common.deadlines import Deadlines
from common.model.open import ModelSettings
from common.settings import PORTS, POSITIVE, TIMES, Bytes, setting

DEFAULTS = Deadlines()

MAX_QUEUED = 1024  # requests that wait for room


@dataclass(frozen=True, slots=True)
class RouterConfig(ModelSettings):
    """The HTTP side."""

    host: str = setting("127.0.0.1", "address to bind")
    port: int = setting(8000, "HTTP port", within=PORTS)
    max_model_len: int | None = setting(
        None, "longest prompt plus output, tokens (default: the model's own)", within=POSITIVE
    )
    api_key: str = setting("", "keys that clients must show one of, comma-separated (default: none)", secret=True)
    ssl_certfile: str = setting("", "PEM certificate chain: clients then speak HTTPS")
    ssl_keyfile: str = setting("", "PEM key of that certificate")
    ssl_keyfile_password: str = setting("", "of an encrypted key", secret=True)
    ssl_ca_certs: str = setting("", "PEM certificates that clients' own must come from (default: they need none)")
    allowed_origins: str = setting("", "origins that browsers may call from, comma-separated, or * (default: none)")
    max_unsplit_tokens: int = setting(
        32, "prompts with so few uncached tokens may skip the prefill pool, where that is quicker", within=(0, None)
    )
    strict_numerics: bool = setting(
        False, "pair only workers that round alike: one kind of CPU, one attention backend, one torch"
    )
    max_queued_requests: int = setting(
        MAX_QUEUED, "requests that may wait for room in the decode pool; more are refused (429)", within=(0, None)
    )
    log_level: str = setting("info", "least level logged", choices=("debug", "info", "warning", "error"))
    drain_timeout: float = setting(
        30.0, "seconds that running requests get to end after SIGTERM", within=(0.0, 86400.0)
    )
    deadline_scale: float = setting(1.0, "factor on all time-outs; for tests", within=(1e-3, 1e3))
    request_timeout: float = setting(
        DEFAULTS.request_s, "seconds that a request may take as a whole; workers have the same flag", within=TIMES
    )
    queue_timeout: float = setting(
        DEFAULTS.router_queue_s, "seconds that a request may wait for a worker", within=TIMES
    )
    sse_ping_interval: float = setting(
        DEFAULTS.keepalive_s, "seconds of silence after which a stream carries a comment", within=TIMES
    )
    timeout_keep_alive: float = setting(
        DEFAULTS.http_idle_s, "seconds that a connection may be idle; more than a proxy in front allows", within=TIMES
    )
    header_timeout: float = setting(
        DEFAULTS.http_header_s, "seconds that a request's headers may take to come", within=TIMES
    )
    body_timeout: float = setting(DEFAULTS.http_body_s, "seconds that a request's body may take to come", within=TIMES)
    backlog: int = setting(4096, "connections that may wait to be accepted; the kernel resets others", within=POSITIVE)

    def deadlines(self) -> Deadlines:
        """Every wait of this router."""
        wanted = Deadlines(
            request_s=self.request_timeout,
            router_queue_s=self.queue_timeout,
            keepalive_s=self.sse_ping_interval,
            http_idle_s=self.timeout_keep_alive,
            http_header_s=self.header_timeout,
            http_body_s=self.body_timeout,
        )
        return replace(wanted.scaled(self.deadline_scale), drain_s=self.drain_timeout)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How much one HTTP request may ask for."""

    max_body_size: Bytes | None = setting(
        None, "of a request, such as 64Mi (default: 4Mi and 64 bytes for each token of the context)", within=POSITIVE
    )
    max_header_size: Bytes = setting(
        Bytes(8190),
        "of one header, and of the request line; such as 64Ki where an SSO's cookies are long",
        within=(256, None),
    )
    max_header_count: int = setting(128, "headers of a request", within=(16, None))
    max_n: int = setting(16, "answers to one prompt", within=(1, 128))
    max_answers: int = setting(256, "answers to one request: its prompts times n", within=(1, 2048))
    max_stop_strings: int = setting(16, "stop strings of one request", within=(1, 128))
    max_logit_bias: int = setting(1024, "entries of logit_bias", within=(1, 8192))
    max_bad_words: int = setting(128, "entries of bad_words", within=(1, 1024))
