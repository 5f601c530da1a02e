"""The secret that the workers and routers of one cluster share. It signs; it is never sent, shown or logged."""

import hmac
from pathlib import Path

from common.errors import ConfigError

LEAST_CHARACTERS = 16
DIGEST_BYTES = 32
PROTOCOL = b"kvrelay cluster key 1"


class ClusterKey:
    """Makes and checks signatures (HMAC-SHA256). Each use has a label, so that none passes for another."""

    __slots__ = ("_secret",)

    def __init__(self, text: str, field: str = "cluster_key") -> None:
        """`field`: the setting that it is from. Raises ConfigError."""
        if len(text) < LEAST_CHARACTERS:
            problem = f"the cluster key must have at least {LEAST_CHARACTERS} characters, got {len(text)}"
            raise ConfigError(problem, field=field)
        self._secret = hmac.digest(text.encode(errors="surrogateescape"), PROTOCOL, "sha256")

    @classmethod
    def load(cls, text: str, path: str) -> "ClusterKey | None":
        """From the setting or the file, blanks around it left out; None where neither is given. Raises ConfigError."""
        if text and path:
            raise ConfigError("--cluster-key and --cluster-key-file exclude each other", field="cluster_key_file")
        if path:
            text = cls._read(path)
        if not (text or path):
            return None
        return cls(text.strip(), "cluster_key_file" if path else "cluster_key")

    @staticmethod
    def _read(path: str) -> str:
        try:
            return Path(path).read_text()
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            problem = f"--cluster-key-file: can't read {path}: {reason}"
        raise ConfigError(problem, field="cluster_key_file")

    def sign(self, label: bytes, *parts: bytes) -> bytes:
        """32 bytes that only who has the key can make for these parts, in this order."""
        return sign(self._secret, label, *parts)

    def verify(self, signature: bytes, label: bytes, *parts: bytes) -> bool:
        """In a time that tells nothing."""
        return hmac.compare_digest(signature, self.sign(label, *parts))


def sign(secret: bytes, label: bytes, *parts: bytes) -> bytes:
    """Over the parts with their lengths: no two lists of parts give the same bytes."""
    message = b"".join(len(part).to_bytes(4, "big") + part for part in (label, *parts))
    return hmac.digest(secret, message, "sha256")
