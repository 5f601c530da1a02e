"""Registry records that carry a signature of the cluster's key: who can write to Redis can't add a worker."""

import hmac
import json
from typing import Any

from common.cluster_key import ClusterKey

LABEL = b"record"
FIELD = "signature"


class BadSignature(ValueError):
    """The record is not signed by this cluster's key."""


def signed(text: str, namespace: str, key: ClusterKey) -> str:
    """The record with its signature, which covers every field and the namespace."""
    record: dict[str, Any] = json.loads(text)
    return json.dumps(record | {FIELD: key.sign(LABEL, namespace.encode(), _canonical(record)).hex()})


def check(text: str | bytes, namespace: str, key: ClusterKey) -> None:
    """Raises ValueError, of which BadSignature is one, also for fields that only a newer version knows."""
    record = json.loads(text)
    if not isinstance(record, dict):
        raise ValueError("not an object")
    signature = record.pop(FIELD, None)
    if not isinstance(signature, str):
        raise BadSignature("it is not signed")
    wanted = key.sign(LABEL, namespace.encode(), _canonical(record)).hex()
    if not hmac.compare_digest(signature.encode(errors="replace"), wanted.encode()):
        raise BadSignature("its signature is not this cluster's")


def _canonical(record: dict[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
