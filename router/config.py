"""Settings of the router."""

from dataclasses import dataclass

from common.model.open import ModelSettings
from common.settings import PORTS, POSITIVE, Bytes, setting


@dataclass(frozen=True, slots=True)
class RouterConfig(ModelSettings):
    """The HTTP side."""

    host: str = setting("127.0.0.1", "address to bind")
    port: int = setting(8000, "HTTP port", within=PORTS)
    max_model_len: int | None = setting(
        None, "longest prompt plus output, tokens (default: the model's own)", within=POSITIVE
    )
    api_key: str = setting("", "keys that clients must show one of, comma-separated (default: none)", secret=True)
    allowed_origins: str = setting("", "origins that browsers may call from, comma-separated, or * (default: none)")
    max_unsplit_tokens: int = setting(
        32, "prompts with so few uncached tokens may skip the prefill pool, where that is quicker", within=(0, None)
    )
    max_queued_requests: int = setting(
        1024, "requests that may wait for room in the decode pool; more are refused (429)", within=(0, None)
    )
    log_level: str = setting("info", "least level logged", choices=("debug", "info", "warning", "error"))
    drain_timeout: float = setting(
        30.0, "seconds that running requests get to end after SIGTERM", within=(0.0, 86400.0)
    )
    deadline_scale: float = setting(1.0, "factor on all time-outs; for tests", within=(1e-3, 1e3))


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How much one HTTP request may ask for."""

    max_body_size: Bytes = setting(Bytes(64 * 2**20), "of a request, such as 64Mi", within=POSITIVE)
    max_n: int = setting(16, "answers to one prompt", within=(1, 128))
    max_answers: int = setting(256, "answers to one request: its prompts times n", within=POSITIVE)
    max_stop_strings: int = setting(16, "stop strings of one request", within=(1, 128))
    max_logit_bias: int = setting(1024, "entries of logit_bias", within=(1, 8192))
    max_bad_words: int = setting(128, "entries of bad_words", within=(1, 1024))
