"""Certificates and keys as operators give them: PEM files, checked at start, each problem named by its flag."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """A certificate chain with its key, and the CA that the other side's certificate must come from; "" is none.

    The fields' flags are --<prefix>certfile, --<prefix>keyfile and --<prefix><ca_flag>.
    """

    certfile: str
    keyfile: str
    ca_file: str
    prefix: str
    ca_flag: str

    def check(self, password: str | None = None) -> None:
        """Raises ConfigError for files that are missing, no PEM, or don't belong together."""
        if bool(self.certfile) != bool(self.keyfile):
            given, missing = ("certfile", "keyfile") if self.certfile else ("keyfile", "certfile")
            raise self._error(missing, f"is needed with --{self.prefix}{given}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if self.certfile:
            self.load_chain(context, password)
        if self.ca_file:
            self.load_ca(context)

    def load_chain(self, context: ssl.SSLContext, password: str | None = None) -> None:
        """Raises ConfigError."""
        self._read("certfile", self.certfile, "CERTIFICATE")
        self._read("keyfile", self.keyfile, "PRIVATE KEY")
        asked: list[bool] = []

        def ask() -> str:
            asked.append(True)
            return password or ""

        try:
            context.load_cert_chain(self.certfile, self.keyfile, ask)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise self._error("keyfile", f"{self.keyfile} is not the key of {self.certfile}") from error
            if asked:
                how = "with another password" if password else "and no password is given"
                raise self._error("keyfile", f"{self.keyfile} is encrypted {how}") from error
            reason = error.reason or str(error)
            raise self._error("certfile", f"can't use {self.certfile} with {self.keyfile}: {reason}") from error

    def load_ca(self, context: ssl.SSLContext) -> None:
        """Raises ConfigError."""
        self._read(self.ca_flag, self.ca_file, "CERTIFICATE")
        try:
            context.load_verify_locations(self.ca_file)
        except ssl.SSLError as error:
            raise self._error(self.ca_flag, f"can't use {self.ca_file}: {error.reason or error}") from error

    def _read(self, name: str, path: str, kind: str) -> None:
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise self._error(name, f"can't read {path}: {error.strerror}") from error
        if b"-----BEGIN " not in data or f"{kind}-----".encode() not in data:
            raise self._error(name, f"{path} holds no {kind.lower()} in PEM")

    def _error(self, name: str, problem: str) -> ConfigError:
        flag = f"{self.prefix}{name}"
        return ConfigError(f"--{flag}: {problem}", field=flag.replace("-", "_"))
