"""One tree of errors, with one mapping to HTTP.

Between processes an error travels in a message, as (code, message, field), and is the same class on the other side.
"""

from typing import ClassVar


class KVRelayError(Exception):
    """Base of all errors; `field` names the request's field or the flag at fault."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    resumable: ClassVar[bool] = False  # the router may submit again with what it has sent
    public: ClassVar[str] = "internal error"  # what clients hear: the message may name machines; "": they hear it

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    @property
    def told(self) -> str:
        """The text for whoever is outside."""
        return self.public or self.message


class InvalidRequest(KVRelayError):
    """The client's fault; nothing ran."""

    code, http_status = "invalid_request", 400
    public = ""


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class SlowClient(InvalidRequest):
    """A request that did not arrive in time."""

    code, http_status = "request_too_slow", 408


class Unauthorized(KVRelayError):
    code, http_status = "invalid_api_key", 401
    public = ""


class NotFound(KVRelayError):
    code, http_status = "not_found", 404
    public = ""


class ModelNotFound(NotFound):
    code = "model_not_found"


class Overloaded(KVRelayError):
    """Refused before any work; `retry_after_s` goes into the Retry-After header."""

    code, http_status, resumable = "overloaded", 429, True
    public = ""

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, field=field)
        self.retry_after_s = retry_after_s


class Cancelled(KVRelayError):
    """The client left, or the sequence was aborted."""

    code, http_status = "cancelled", 499
    public = "cancelled"


class Timeout(KVRelayError):
    """A deadline of common/deadlines.py passed."""

    code, http_status, resumable = "timeout", 504, True
    public = "no worker made progress with the request in time"


class RequestTimeout(Timeout):
    """The whole request took too long; there is no second try."""

    code, resumable = "request_timeout", False
    public = ""


class Unavailable(KVRelayError):
    """Nobody can serve this now."""

    code, http_status = "unavailable", 503
    public = "nobody can serve this now"


class NoWorker(Unavailable):
    code = "no_worker"
    public = ""


class WorkerLost(Unavailable):
    """The stream to a worker broke with work on it."""

    code, resumable = "worker_lost", True
    public = "the request was lost with the workers that had it"


class Draining(Unavailable):
    code, resumable = "draining", True


class EngineFailure(KVRelayError):
    """A forward pass failed; its sequences are gone, the worker goes on."""

    code, resumable = "engine_failure", True
    public = "the model's computation failed"


class SequenceFailure(EngineFailure):
    """One sequence of a forward pass gave no token, also when it was computed anew without cached KV."""

    code, resumable = "sequence_failure", False


class TokenMismatch(KVRelayError):
    """The same token number came again with another id."""

    code = "token_mismatch"


class HandoverError(KVRelayError):
    """The KV could not be handed over; the request resumes by prefilling again."""

    code, http_status, resumable = "handover_failed", 503, True
    public = "the KV cache could not be handed over"


class KVExpired(HandoverError):
    """The blocks were not held until the copy had ended, so the copy counts for nothing."""

    code = "kv_expired"


class HandleTaken(HandoverError):
    """Another reader has claimed the handle."""

    code = "handle_taken"


class EpochMismatch(HandoverError):
    """The message is meant for an earlier life of this worker."""

    code = "epoch_mismatch"


class StaleAttempt(HandoverError):
    """A newer attempt of the same request is known."""

    code, resumable = "stale_attempt", False


class FingerprintMismatch(HandoverError):
    """The two sides would not mean the same by the same bytes."""

    code = "fingerprint_mismatch"


class TransportUnavailable(HandoverError):
    """No transport between the two could be proven."""

    code = "transport_unavailable"


class PullStalled(HandoverError):
    """A pull made no progress within its deadline."""

    code = "pull_stalled"


class StartupError(KVRelayError):
    """One clear line at start and a non-zero exit."""

    code = "startup"


class ConfigError(StartupError):
    code = "config"


class ModelError(StartupError):
    """The model can't be loaded: missing, corrupt, or of an unsupported kind."""

    code = "model"
    public = ""


class AddressInUse(StartupError):
    code = "address_in_use"


class RedisUnreachable(StartupError):
    code = "redis_unreachable"


def _tree(root: type[KVRelayError]) -> list[type[KVRelayError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


BY_CODE: dict[str, type[KVRelayError]] = {error.code: error for error in _tree(KVRelayError)}


def from_wire(code: str, message: str, field: str = "") -> KVRelayError:
    """The error a peer sent; an unknown code (a newer peer's) is a plain KVRelayError."""
    return BY_CODE.get(code, KVRelayError)(message, field=field or None)
