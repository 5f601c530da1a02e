"""TLS towards clients, from the files of --ssl-certfile and its like."""

import ssl

from common.certificates import CertificateFiles
from common.errors import ConfigError
from router.config import RouterConfig


def client_tls(settings: RouterConfig) -> ssl.SSLContext | None:
    """What HTTP connections are wrapped in; None: nothing. Raises ConfigError that names the flag."""
    files = CertificateFiles(settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs, "ssl-", "ca-certs")
    files.check(settings.ssl_keyfile_password)
    if not settings.ssl_certfile:
        if settings.ssl_ca_certs:
            raise ConfigError("--ssl-certfile: is needed with --ssl-ca-certs", field="ssl_certfile")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    files.load_chain(context, settings.ssl_keyfile_password)
    if settings.ssl_ca_certs:
        files.load_ca(context)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
