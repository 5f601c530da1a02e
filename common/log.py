"""One line an event on stderr: time, level, who, what, key=value; or JSON with KVRELAY_LOG_FORMAT=json."""

import json
import logging
import math
import os
import string
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

from common.errors import ConfigError

request_id: ContextVar[str] = ContextVar("request_id", default="")  # of what this task works for; in all its lines
FORMAT_ENV = "KVRELAY_LOG_FORMAT"
ROOT = "kvrelay"
SECRET = frozenset(
    (
        "prompt",
        "prompt_ids",
        "output_ids",
        "token_ids",
        "text",
        "messages",
        "api_key",
        "authorization",
        "handle_id",
        "cluster_key",
    )
)
PLAIN = frozenset(string.ascii_letters + string.digits + "_-+./:@%,[]()")


def get_logger(name: str) -> logging.Logger:
    """A logger under kvrelay's root, which setup_logging configures."""
    return logging.getLogger(f"{ROOT}.{name}")


def log_event(logger: logging.Logger, level: int, event: str, /, *, exc_info: Any = None, **values: Any) -> None:
    """One event with its values. Prompts, keys and handle ids are left out by name, bytes and containers by type."""
    if logger.isEnabledFor(level):
        if request := request_id.get():
            values.setdefault("request_id", request)
        logger.log(level, "%s", event, exc_info=exc_info, extra={"values": values})


def setup_logging(
    level: str, role: str, instance: str = "", *, stream: TextIO | None = None, environ: Mapping[str, str] = os.environ
) -> None:
    """All logs of this process go to stderr, one line each. Raises ConfigError for an unknown format."""
    log_format = environ.get(FORMAT_ENV, "text")
    if log_format not in ("text", "json"):
        raise ConfigError(f"{FORMAT_ENV}={log_format!r} is none of text, json", field=FORMAT_ENV)
    formatter = JsonFormatter(role, instance) if log_format == "json" else TextFormatter(role, instance)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)  # other packages: from warning on
    logging.getLogger(ROOT).setLevel(level.upper())


def _time(record: logging.LogRecord) -> str:
    """UTC, ISO 8601, milliseconds."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _shown(key: str, value: Any) -> Any:
    """What may be logged of a value: scalars as they are, of all else only its size."""
    if key.lower() in SECRET:
        return "<hidden>"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no word for it
    if isinstance(value, (str, int, float)) or value is None:
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"<{len(value)} bytes>"
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return f"<{len(value)} items>"
    return str(value)


def _values(record: logging.LogRecord) -> dict[str, Any]:
    return {key: _shown(key, value) for key, value in getattr(record, "values", {}).items()}


def _quoted(value: Any) -> str:
    """Text without line breaks, in quotes where a blank or the like would make it ambiguous."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if text and PLAIN.issuperset(text) else json.dumps(text)


class TextFormatter(logging.Formatter):
    """`2025-01-31T12:00:00.000Z info prefill/127.0.0.1:4000 worker ready epoch=12`; a traceback follows, indented."""

    def __init__(self, role: str, instance: str) -> None:
        super().__init__()
        self.source = f"{role}/{instance}" if instance else role

    def format(self, record: logging.LogRecord) -> str:
        event = record.getMessage().replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")
        values = "".join(f" {key}={_quoted(value)}" for key, value in _values(record).items())
        line = f"{_time(record)} {record.levelname.lower()} {self.source} {event}{values}"
        if record.exc_info:
            line += "\n    " + self.formatException(record.exc_info).replace("\n", "\n    ")
        return line


class JsonFormatter(logging.Formatter):
    """One object a line, a traceback in its own field."""

    def __init__(self, role: str, instance: str) -> None:
        super().__init__()
        self.source: dict[str, Any] = {"role": role, "id": instance}

    def format(self, record: logging.LogRecord) -> str:
        entry = {"time": _time(record), "level": record.levelname.lower(), **self.source}
        entry |= {"event": record.getMessage(), "values": _values(record)}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)
