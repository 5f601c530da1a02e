"""Whether this host has IPv6, for tests that need it."""

import socket

import pytest


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
