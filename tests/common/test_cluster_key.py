"""A cluster key is read with care, shows nowhere, and signs so that nothing passes for something else."""

import logging
from pathlib import Path

import pytest

from common.cluster_key import LEAST_CHARACTERS, ClusterKey
from common.errors import ConfigError
from common.log import TextFormatter
from common.rpc.config import SecurityConfig
from common.settings import to_arguments, to_environment

TEXT = "k" * LEAST_CHARACTERS


def test_without_setting_and_file_there_is_no_key() -> None:
    assert ClusterKey.load("", "") is None


def test_setting_and_file_give_the_same_key_whatever_blanks_are_around(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{TEXT}\n")
    keys = ClusterKey.load(TEXT, ""), ClusterKey.load(f" {TEXT}\n", ""), ClusterKey.load("", str(tmp_path / "key"))
    assert len({key.sign(b"label") for key in keys if key}) == 1


@pytest.mark.parametrize(
    ("text", "content", "problem", "field"),
    [
        (TEXT[1:], None, r"at least 16 characters, got 15", "cluster_key"),
        (" " * 20, None, r"got 0", "cluster_key"),
        (TEXT, TEXT, r"exclude each other", "cluster_key_file"),
        ("", "", r"got 0", "cluster_key_file"),
        ("", b"\xff" * 20, r"it is no text", "cluster_key_file"),
    ],
)
def test_a_bad_key_is_one_line_that_does_not_quote_it(
    tmp_path: Path, text: str, content: str | bytes | None, problem: str, field: str
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=problem) as caught:
        ClusterKey.load(text, "" if content is None else str(path))
    assert (caught.value.field, "kkk" in caught.value.message) == (field, False)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--cluster-key-file: can't read .*none: No such file") as caught:
        ClusterKey.load("", str(tmp_path / "none"))
    assert caught.value.field == "cluster_key_file"


def test_a_signature_holds_for_its_key_label_and_parts_alone() -> None:
    key, other = ClusterKey(TEXT), ClusterKey(TEXT + "x")
    signature = key.sign(b"label", b"one", b"two")
    assert key.verify(signature, b"label", b"one", b"two")
    assert not other.verify(signature, b"label", b"one", b"two")
    for label, *parts in [(b"lab", b"one", b"two"), (b"label", b"on", b"etwo"), (b"label", b"onetwo"), (b"label",)]:
        assert not key.verify(signature, label, *parts)


def test_it_shows_in_no_repr_argument_or_log() -> None:
    config, key = SecurityConfig(cluster_key=TEXT), ClusterKey(TEXT)
    assert to_environment(config) == {"KVRELAY_CLUSTER_KEY": TEXT}
    record = logging.makeLogRecord({"msg": "event", "values": {"cluster_key": TEXT, "key": key, "config": config}})
    shown = [repr(config), repr(key), str(key), *to_arguments(config), TextFormatter("worker", "").format(record)]
    assert not [text for text in shown if TEXT in text]
