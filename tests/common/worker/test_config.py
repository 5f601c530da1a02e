"""A worker tells others addresses that they can call, or does not start."""

import pytest

from common.errors import ConfigError
from common.worker.config import WorkerConfig, check_reachable, http_address


@pytest.mark.parametrize(
    ("host", "advertise"),
    [
        ("127.0.0.1", ""),
        ("::1", ""),
        ("localhost", ""),
        ("0.0.0.0", "10.0.0.5:7001"),
        ("::", "[fd00::1]:7001"),
        ("::", "pod-0.pods:7001"),
    ],
)
def test_what_can_be_called_is_taken(host: str, advertise: str) -> None:
    check_reachable(WorkerConfig(host=host, advertise=advertise))


@pytest.mark.parametrize(
    ("host", "advertise"),
    [
        ("0.0.0.0", ""),
        ("::", ""),
        ("[::]", ""),
        ("::", "0.0.0.0:7001"),
        ("::", "[::]:7001"),
        ("::", "fd00::1:7001"),
        ("0.0.0.0", "[10.0.0.5]:7001"),
        ("0.0.0.0", "10.0.0.5:0"),
        ("0.0.0.0", "10.0.0.5"),
    ],
)
def test_what_nobody_can_call_is_refused_by_its_flag(host: str, advertise: str) -> None:
    with pytest.raises(ConfigError, match="--advertise") as caught:
        check_reachable(WorkerConfig(host=host, advertise=advertise))
    assert caught.value.field == "advertise"


@pytest.mark.parametrize(
    ("host", "address", "bound", "told"),
    [
        ("127.0.0.1", "127.0.0.1:7001", "127.0.0.1", "127.0.0.1:9000"),
        ("10.0.0.5", "worker.example:7001", "10.0.0.5", "10.0.0.5:9000"),
        ("0.0.0.0", "10.0.0.5:7001", "0.0.0.0", "10.0.0.5:9000"),
        ("::", "[fd00::1]:7001", "::", "[fd00::1]:9000"),
    ],
)
def test_metrics_bound_to_every_address_are_told_at_the_advertised_one(
    host: str, address: str, bound: str, told: str
) -> None:
    assert http_address(host, address, bound, 9000) == told
