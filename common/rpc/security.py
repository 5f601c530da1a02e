"""What stands between a worker's port and strangers: the cluster's key, TLS, both, or nothing."""

import ipaddress
import logging
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from common.certificates import CertificateFiles
from common.cluster_key import ClusterKey
from common.errors import ConfigError
from common.log import get_logger, log_event
from common.rpc.config import SecurityConfig

log = get_logger("security")


@dataclass(frozen=True, slots=True)
class Tls:
    """The contents of the files; None is not given."""

    chain: bytes | None
    key: bytes | None = field(repr=False)
    ca: bytes | None
    server_name: str = ""

    def server_credentials(self) -> grpc.ServerCredentials:
        """With a CA, for callers alone that show a certificate of it."""
        assert self.chain is not None
        assert self.key is not None
        return grpc.ssl_server_credentials([(self.key, self.chain)], self.ca, require_client_auth=self.ca is not None)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.chain)

    def channel_options(self) -> list[tuple[str, str]]:
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []


@dataclass(frozen=True, slots=True)
class Security:
    """What a process was told, loaded and checked."""

    key: ClusterKey | None = None
    tls: Tls | None = None

    @classmethod
    def load(cls, config: SecurityConfig, *, serves: bool) -> "Security":
        """`serves`: it has a port of its own for the others. Raises ConfigError that names the flag."""
        key = ClusterKey.load(config.cluster_key, config.cluster_key_file)
        files = CertificateFiles(config.tls_certfile, config.tls_keyfile, config.tls_ca_certfile, "tls-", "ca-certfile")
        files.check()
        if config.tls_server_name and not (config.tls_certfile or config.tls_ca_certfile):
            raise ConfigError("--tls-server-name has no use without TLS", field="tls_server_name")
        if serves and config.tls_ca_certfile and not config.tls_certfile:
            raise ConfigError("--tls-certfile: a worker with --tls-ca-certfile needs one", field="tls_certfile")
        if not (config.tls_certfile or config.tls_ca_certfile):
            return cls(key)
        chain, own, ca = (_content(path) for path in (config.tls_certfile, config.tls_keyfile, config.tls_ca_certfile))
        return cls(key, Tls(chain, own, ca, config.tls_server_name))

    def warn_if_open(self, host: str) -> None:
        """One line where anybody who reaches the port may submit work."""
        if self.key is None and (self.tls is None or self.tls.ca is None) and not _is_loopback(host):
            problem = "anybody who reaches this port may submit work: give --cluster-key, or --tls-ca-certfile"
            log_event(log, logging.WARNING, problem, host=host)


OPEN = Security()


def _content(path: str) -> bytes | None:
    return Path(path).read_bytes() if path else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
