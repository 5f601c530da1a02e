"""Certificates for tests: a CA, leaves of it as PEM files, and a stranger's CA."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import trustme


@cache
def a_ca(name: str = "ours") -> trustme.CA:
    """Made once a process: keys take their time."""
    return trustme.CA(organization_name=name)


@dataclass(frozen=True)
class PemFiles:
    chain: str
    key: str
    ca: str


def pem_files(folder: Path, *names: str, ca: str = "ours") -> PemFiles:
    """A leaf for these names (of hosts, or IP addresses), its key, and the CA that it comes from."""
    folder.mkdir(parents=True, exist_ok=True)
    leaf = a_ca(ca).issue_cert(*names)
    chain, key, authority = folder / "chain.pem", folder / "key.pem", folder / "ca.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    leaf.private_key_pem.write_to_path(str(key))
    a_ca(ca).cert_pem.write_to_path(str(authority))
    return PemFiles(str(chain), str(key), str(authority))
