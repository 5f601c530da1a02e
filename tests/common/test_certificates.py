"""What is wrong with a certificate or its key is said at start, with the flag that named it."""

from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from common.certificates import CertificateFiles
from common.errors import ConfigError
from tests.support.certificates import pem_files

PASSWORD = "s3cret"


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    pem = pem_files(tmp_path, "localhost")
    return CertificateFiles(pem.chain, pem.key, pem.ca, "tls-", "ca-certfile")


def encrypted(path: str) -> str:
    key = serialization.load_pem_private_key(Path(path).read_bytes(), None)
    cipher = serialization.BestAvailableEncryption(PASSWORD.encode())
    text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, cipher)
    Path(path).write_bytes(text)
    return path


def test_what_belongs_together_passes(files: CertificateFiles) -> None:
    files.check()
    replace(files, ca_file="").check()
    replace(files, certfile="", keyfile="").check()
    CertificateFiles("", "", "", "tls-", "ca-certfile").check()


@pytest.mark.parametrize(
    ("changes", "content", "problem"),
    [
        ({"keyfile": ""}, None, r"--tls-keyfile: is needed with --tls-certfile"),
        ({"certfile": ""}, None, r"--tls-certfile: is needed with --tls-keyfile"),
        ({"certfile": "none"}, None, r"--tls-certfile: can't read .*none: No such file or directory"),
        ({"keyfile": "none"}, None, r"--tls-keyfile: can't read .*none: No such file or directory"),
        ({"ca_file": "none"}, None, r"--tls-ca-certfile: can't read .*none: No such file or directory"),
        ({"keyfile": "other"}, "", r"--tls-keyfile: .*other holds no private key in PEM"),
        ({"certfile": "other"}, "text", r"--tls-certfile: .*other holds no certificate in PEM"),
        ({"ca_file": "other"}, "-----BEGIN CERTIFICATE-----\nx\n", r"--tls-ca-certfile: can't use .*"),
        ({"certfile": "other"}, "-----BEGIN CERTIFICATE-----\nx\n", r"--tls-certfile: can't use .*"),
    ],
)
def test_a_problem_is_one_line_that_names_flag_and_file(
    files: CertificateFiles, tmp_path: Path, changes: dict[str, str], content: str | None, problem: str
) -> None:
    if content is not None:
        (tmp_path / "other").write_text(content)
    changed = replace(files, **{name: str(tmp_path / value) if value else "" for name, value in changes.items()})
    with pytest.raises(ConfigError, match=f"^{problem}$") as caught:
        changed.check()
    assert caught.value.field == problem.split(":")[0].removeprefix("--").replace("-", "_")


def test_the_key_of_another_certificate_is_told_as_such(files: CertificateFiles, tmp_path: Path) -> None:
    other = pem_files(tmp_path / "other", "localhost")
    with pytest.raises(ConfigError, match=r"--tls-keyfile: .* is not the key of .*chain.pem"):
        replace(files, keyfile=other.key).check()


def test_an_encrypted_key_takes_its_password_and_never_asks_for_it(files: CertificateFiles) -> None:
    encrypted(files.keyfile)
    files.check(PASSWORD)
    for password, how in [(None, "no password is given"), ("", "no password is given"), ("wrong", "another password")]:
        with pytest.raises(ConfigError, match=f"is encrypted .*{how}") as caught:
            files.check(password)
        assert "wrong" not in caught.value.message
