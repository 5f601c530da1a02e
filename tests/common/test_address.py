"""What can't be called is no address, in whatever form it is written; what can be is read and written back."""

import pytest

from common.address import Address, is_address, is_any, join_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.5:7001", "10.0.0.5", 7001),
        ("localhost:1", "localhost", 1),
        ("prefill-0.pods.ns.svc.cluster.local:65535", "prefill-0.pods.ns.svc.cluster.local", 65535),
        ("my_service:80", "my_service", 80),
        ("example.org.:80", "example.org.", 80),
        ("[::1]:7001", "::1", 7001),
        ("[fd00::1]:7001", "fd00::1", 7001),
        ("[::ffff:10.0.0.5]:7001", "::ffff:10.0.0.5", 7001),
    ],
)
def test_an_address_is_read_and_written_back(text: str, host: str, port: int) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, str(address)) == (host, port, text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":7001",
        "10.0.0.5",
        "10.0.0.5:",
        "10.0.0.5:0",
        "10.0.0.5:65536",
        "10.0.0.5:07001",
        "10.0.0.5:+7",
        "10.0.0.5:७",
        "10.0.0.300:7001",
        "010.0.0.5:7001",
        "10.0.5:7001",
        "0:7001",
        "fd00::1:7001",
        "::1:7001",
        "[10.0.0.5]:7001",
        "[localhost]:7001",
        "[fd00::1:7001",
        "fd00::1]:7001",
        "[]:7001",
        "[fe80::1%eth0]:7001",
        "[fd00::10000]:7001",
        "http://host:7001",
        "host:7001/",
        "host/path:7001",
        "user@host:7001",
        "two hosts:7001",
        "-host:7001",
        "host-:7001",
        "host..pod:7001",
        "höst:7001",
        f"{'a' * 64}:7001",
        f"{'.'.join(['a' * 60] * 5)}:7001",
    ],
)
def test_what_cant_be_called_is_no_address(text: str) -> None:
    assert not is_address(text)


@pytest.mark.parametrize(
    ("host", "any_host"),
    [
        ("0.0.0.0", True),
        ("::", True),
        ("[::]", True),
        ("0:0:0:0:0:0:0:0", True),
        ("::ffff:0.0.0.0", True),
        ("127.0.0.1", False),
        ("::1", False),
        ("localhost", False),
        ("", False),
    ],
)
def test_an_address_to_bind_only_is_known_in_any_spelling(host: str, any_host: bool) -> None:
    assert is_any(host) is any_host


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1:1"), ("pod.svc", "pod.svc:1"), ("::1", "[::1]:1"), ("[::1]", "[::1]:1")],
)
def test_addresses_have_brackets_around_ipv6(host: str, address: str) -> None:
    assert join_address(host, 1) == address
