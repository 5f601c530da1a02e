"""Settings that decide who may speak to whom inside a cluster."""

from dataclasses import dataclass

from common.settings import setting


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """The same for all workers and routers of one cluster, but for each one's own certificate."""

    cluster_key: str = setting(
        "", "secret that workers and routers prove to each other (default: anybody may call)", secret=True
    )
    cluster_key_file: str = setting("", "file with that secret")
    tls_certfile: str = setting("", "PEM certificate chain, for TLS between workers and routers")
    tls_keyfile: str = setting("", "PEM key of that certificate, not encrypted")
    tls_ca_certfile: str = setting(
        "", "PEM certificates that the others' must come from; workers then ask callers for theirs, too"
    )
    tls_server_name: str = setting(
        "", "name to look for in workers' certificates (default: the host that they advertise)"
    )
