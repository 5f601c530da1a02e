"""Variables that Kubernetes and Docker put into every container for each service they know.

A service named `kvrelay` makes KVRELAY_PORT=tcp://10.96.0.12:8000, which is nobody's setting.
"""

import re
from collections.abc import Mapping

URL = re.compile(r"(?:tcp|udp|sctp)://\S+")
OTHERS = re.compile(
    r".+_SERVICE_HOST|.+_SERVICE_PORT(?:_.+)?|.+_PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?", re.ASCII
)


def service_links(environ: Mapping[str, str]) -> set[str]:
    """Names of such variables. NAME_PORT is one if it has a URL and comes with others of its service."""
    others = {name for name in environ if OTHERS.fullmatch(name)}
    bases = {re.split(r"_SERVICE_HOST$|_PORT_\d+_", name)[0] for name in others}
    ports = {f"{base}_PORT" for base in bases}
    return others | {name for name in ports if URL.fullmatch(environ.get(name, ""))}
