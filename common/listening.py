"""Sockets that listen on every address of a host, on one port; `::` takes IPv4, too, where the system can."""

import errno
import socket
from collections.abc import Sequence
from typing import Any

from common.address import is_any, join_address, parse_host
from common.errors import AddressInUse, ConfigError

TRIES = 5  # at a free port that is free on all addresses


def listen(host: str, port: int, *, backlog: int = 128, flag: str = "port") -> list[socket.socket]:
    """Raises AddressInUse that names the flag, or ConfigError for a host that can't be bound."""
    sockets = _bind_all(host, port, flag)
    try:
        for one in sockets:
            one.listen(backlog)
    except OSError as error:  # bound by somebody else, who began to listen in between
        _close(sockets)
        raise _in_use(host, port, flag, error) from error
    return sockets


def check_bindable(host: str, port: int, *, flag: str = "port") -> None:
    """Raises what listen() would."""
    _close(_bind_all(host, port, flag))


def _bind_all(host: str, port: int, flag: str) -> list[socket.socket]:
    address = join_address(host, port)
    if not 0 <= port < 2**16:
        raise ConfigError(f"--{flag} must be in [0, 65536), got {port}", field=_field(flag))
    try:
        name = parse_host(host)
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--host: can't bind {address}: {error}", field="host") from error
    places = list(dict.fromkeys((family, place) for family, _, _, _, place in found))
    for left in reversed(range(TRIES)):
        sockets, problems = _bind(places, port, both=is_any(name))
        taken = next((problem for problem in problems if problem.errno == errno.EADDRINUSE), None)
        if taken is None:
            break
        _close(sockets)
        if port or not left:
            raise _in_use(host, port, flag, taken)
    if not sockets:  # some are normal: localhost may have an IPv6 address that the host lacks
        raise ConfigError(f"--host: can't bind {address}: {problems[0].strerror}", field="host") from problems[0]
    return sockets


def _bind(
    places: Sequence[tuple[int, tuple[Any, ...]]], port: int, *, both: bool
) -> tuple[list[socket.socket], list[OSError]]:
    sockets: list[socket.socket] = []
    problems: list[OSError] = []
    for family, (ip, _, *more) in places:
        try:
            one = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:  # the kernel doesn't know this family
            problems.append(error)
            continue
        try:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                alone = not (both and socket.has_dualstack_ipv6())
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(alone))
            one.bind((ip, port, *more))
        except OSError as error:
            one.close()
            problems.append(error)
            continue
        port = one.getsockname()[1]  # the others take the same
        sockets.append(one)
    return sockets, problems


def _close(sockets: Sequence[socket.socket]) -> None:
    for one in sockets:
        one.close()


def _in_use(host: str, port: int, flag: str, error: OSError) -> AddressInUse:
    return AddressInUse(f"--{flag}: can't listen on {join_address(host, port)}: {error.strerror}", field=_field(flag))


def _field(flag: str) -> str:
    return flag.replace("-", "_")
