"""Keys that are shut out, and secrets that are replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("flwr")
from cryptography import x509

from strata.cli import main
from strata.core.errors import BadInput
from strata.fleet.security.certificates import hosts_of
from strata.fleet.security.keys import KeyFolder, make_keys
from strata.fleet.security.revocation import revoke, rotate_authority, rotate_device, rotate_token
from strata.fleet.security.tokens import TokenFile


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    return make_keys(tmp_path / "keys", ["fleet.local"], ["a", "b"]).folder


def test_a_revoked_key_is_kept_apart_and_its_name_is_free(folder: KeyFolder) -> None:
    public = (folder.registered / "a.pub").read_bytes()
    revoke(folder, "a")
    assert folder.names() == ["b"] and [path.read_bytes() for path in folder.revoked.iterdir()] == [public]
    assert make_keys(folder.path, [], ["a"]).devices == ("a",)
    rotate_device(folder, "a")
    assert folder.names() == ["a", "b"] and len(list(folder.revoked.iterdir())) == 2
    with pytest.raises(BadInput, match=r"no device x is registered in .*: registered are a, b"):
        revoke(folder, "x")
    with pytest.raises(BadInput, match="no device ../b is registered"):
        revoke(folder, "../b")


def test_the_token_is_read_again_when_it_is_replaced(folder: KeyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    token = TokenFile(folder.token)
    before = token.text()
    rotate_token(folder)
    assert token.text() not in ("", before) and token.text() == folder.token.read_text().strip()
    assert folder.token.stat().st_mode & 0o077 == 0
    after = token.text()
    folder.token.unlink()
    assert token.text() == after  # nobody is let in without one
    folder.token.write_text("\n")
    assert token.text() == after
    with pytest.raises(BadInput, match="operator.token is empty"):
        TokenFile(folder.token)


def test_another_authority_signs_for_the_same_names(folder: KeyFolder) -> None:
    old = folder.authority.read_bytes()
    rotate_authority(folder)
    new = folder.authority.read_bytes()
    assert new != old and (folder.device("a").authority).read_bytes() == new
    certificate = x509.load_pem_x509_certificate(folder.certificate.read_bytes())
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(new))
    assert hosts_of(folder.certificate.read_bytes()) == ("fleet.local", "localhost", "127.0.0.1", "::1")
    assert not [path for path in folder.path.rglob("*.key") if path.stat().st_mode & 0o077]


def test_the_commands(folder: KeyFolder, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["--keys", os.fspath(folder.path)]
    for command, said in (
        (["revoke", "b"], "b is shut out for good"),
        (["rotate", "token"], "another operator.token"),
        (["rotate", "ca"], "another certificate authority"),
        (["rotate", "device", "a"], "another key for a"),
    ):
        assert main(["fleet", *command, *keys]) == 0
        assert said in capsys.readouterr().out
    for wrong in (["rotate", "device"], ["rotate", "token", "a"], ["revoke", "b"]):
        assert main(["fleet", *wrong, *keys]) == 2
        error = capsys.readouterr().err
        assert error.startswith("strata fleet: ") and error.count("\n") == 1
