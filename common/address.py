"""host:port in one form everywhere: an IPv6 address in brackets, a name as DNS has it, a port in digits."""

import ipaddress
import re
from dataclasses import dataclass

LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
NAME = re.compile(rf"{LABEL}(?:\.{LABEL})*\.?", re.ASCII)
MAX_NAME = 253  # characters
PORT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Address:
    """Where something can be called."""

    host: str  # without brackets
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """From host:port. Raises ValueError that says what is wrong."""
        host, colon, port = text.rpartition(":")
        if not (colon and PORT.fullmatch(port) and int(port) < 2**16):
            raise ValueError(f"{text!r:.100} is not host:port")
        if ":" in host and not host.startswith("["):
            raise ValueError(
                f"{text!r:.100} is not host:port: an IPv6 address stands in brackets, as in [fd00::1]:7001"
            )
        return cls(parse_host(host), int(port))

    def __str__(self) -> str:
        return join_address(self.host, self.port)


def parse_host(text: str) -> str:
    """A name or an address, without its brackets. Raises ValueError that says what is wrong."""
    bracketed = text.startswith("[") and text.endswith("]")
    host = text[1:-1] if bracketed else text
    try:
        if bracketed or ":" in host:
            if "%" in host:
                raise ValueError("a zone means something on its own host only")
            ipaddress.IPv6Address(host)
        elif host.rpartition(".")[2].isdecimal():  # no name ends so: 10.0.0.300 is a mistake
            ipaddress.IPv4Address(host)
        elif len(host) > MAX_NAME or not NAME.fullmatch(host):
            raise ValueError("no such name is possible")
    except ValueError as error:
        raise ValueError(f"{text!r:.100} is neither a host's name nor its address ({error})") from error
    return host


def join_address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_address(text: str) -> bool:
    """Whether it is host:port, with a port that something can be reached at."""
    try:
        Address.parse(text)
    except ValueError:
        return False
    return True


def is_any(host: str) -> bool:
    """Whether it is 0.0.0.0 or ::, in any spelling: to be bound, not to be called."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_unspecified
