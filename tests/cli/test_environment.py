"""A mistyped setting in the environment is told once, with what may be meant; links to services are not."""

import pytest

from cli.environment import check_environment, unknown_settings

pytestmark = pytest.mark.usefixtures("restored_logging")
LINKS = {
    "KVRELAY_SERVICE_HOST": "10.96.0.12",
    "KVRELAY_SERVICE_PORT": "8000",
    "KVRELAY_PORT": "tcp://10.96.0.12:8000",
    "KVRELAY_PORT_8000_TCP": "tcp://10.96.0.12:8000",
    "KVRELAY_PORT_8000_TCP_ADDR": "10.96.0.12",
}


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, []),
        ({"HOME": "/", "XKVRELAY_PORT": "1"}, []),
        ({"KVRELAY_MODEL": "m", "KVRELAY_API_KEY": "k", "KVRELAY_PREFILL": "2", "KVRELAY_REDIS_URL": "redis://h"}, []),
        ({"KVRELAY_CACHE": "/c", "KVRELAY_LOG_FORMAT": "json"}, []),
        ({"KVRELAY_MAX_NUM_SEQ": "64"}, ["KVRELAY_MAX_NUM_SEQ (KVRELAY_MAX_NUM_SEQS?)"]),
        ({"KVRELAY_QQQQ": "64"}, ["KVRELAY_QQQQ"]),
        (LINKS, []),
        (LINKS | {"KVRELAY_PORT": "7001"}, []),
        ({"KVRELAY_METRICS_PORT": "tcp://10.96.0.13:9000", "KVRELAY_METRICS_SERVICE_HOST": "10.96.0.13"}, []),
        ({"KVRELAY_METRIC_PORT": "9000"}, ["KVRELAY_METRIC_PORT (KVRELAY_METRICS_PORT?)"]),
    ],
)
def test_what_no_role_knows_is_found(environ: dict[str, str], names: list[str]) -> None:
    assert unknown_settings(environ) == names


def test_it_is_one_line_each_without_values(capsys: pytest.CaptureFixture[str]) -> None:
    check_environment("decode", LINKS | {"KVRELAY_API_KEYS": "s3cret", "KVRELAY_THREAD": "s3cret"})
    first, second = capsys.readouterr().err.splitlines()
    assert first.split(" ", 2)[2].startswith("decode unknown settings in the environment names=")
    assert "KVRELAY_API_KEYS (KVRELAY_API_KEY?), KVRELAY_THREAD (KVRELAY_THREADS?)" in first
    assert second.endswith("no settings but links to services names=KVRELAY_PORT")
    assert "s3cret" not in first


def test_nothing_is_said_where_all_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    check_environment("decode", {"KVRELAY_MODEL": "m"})
    assert capsys.readouterr().err == ""
