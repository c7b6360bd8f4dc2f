"""Operators' tokens: by name, with a role, known to the server by their hashes."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

pytest.importorskip("flwr")
from strata.cli import main
from strata.core.errors import BadInput
from strata.fleet.security.addresses import Address
from strata.fleet.security.connection_guard import NOT_BY_ROLE
from strata.fleet.security.keys import KeyFolder, make_keys
from strata.fleet.security.revocation import rotate_token
from strata.fleet.security.tokens import Operator, Tokens, digest_of, make_token, records, revoke_token
from strata.fleet.server.control import Access, _sentence


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    return make_keys(tmp_path / "keys", [], ["a"]).folder


def text(folder: Path) -> str:
    return (folder / "operator.token").read_text().strip()


def test_a_token_has_a_name_and_a_role_and_counts_at_once(folder: KeyFolder) -> None:
    tokens = Tokens(folder, digest_of("launcher"))
    ada, bob = make_token(folder, "ada", "watch"), make_token(folder, "bob", "run")
    assert tokens.of(text(ada)) == Operator("ada", "watch") and tokens.of(text(bob)) == Operator("bob", "run")
    assert tokens.of(text(folder.path)) == Operator("operator", "run")  # as before there were others
    assert tokens.of("launcher") == Operator("server", "server")
    assert tokens.of("") is None and tokens.of(digest_of(text(bob))) is None and tokens.of("\xff") is None
    revoke_token(folder, "ada")
    assert not ada.exists() and [record.operator.name for record in records(folder)] == ["bob"]
    old, again = text(folder.path), make_token(folder, "ada", "run")
    rotate_token(folder)
    assert tokens.of(text(again)) == Operator("ada", "run") and tokens.of(old) is None


def test_a_revoked_token_is_refused(folder: KeyFolder) -> None:
    tokens = Tokens(folder, "")
    token = text(make_token(folder, "ada", "run"))
    assert tokens.of(token) is not None
    revoke_token(folder, "ada")
    assert tokens.of(token) is None and tokens.of("") is None


def test_the_server_has_hashes_only(folder: KeyFolder) -> None:
    place = make_token(folder, "ada", "watch")
    token = text(place)
    elsewhere = [path for path in folder.path.rglob("*") if path.is_file() and path.parent != place]
    assert not [path for path in elsewhere if token.encode() in path.read_bytes()]
    assert json.loads((folder.tokens / "ada.json").read_bytes())["sha256"] == digest_of(token)
    assert place.stat().st_mode & 0o777 == folder.tokens.stat().st_mode & 0o777 == 0o700
    assert not [path for path in (folder.tokens / "ada.json", place / "operator.token") if path.stat().st_mode & 0o077]
    tokens = Tokens(folder, "")
    place.rename(folder.path.parent / "ada")  # to her machine
    assert tokens.of(token) == Operator("ada", "watch")
    access = Access.of(Address("localhost", 1), folder.path.parent / "ada", insecure=False)
    assert access.token == token


def test_a_damaged_file_is_nobodys_token(folder: KeyFolder) -> None:
    token = text(make_token(folder, "ada", "watch"))
    file = folder.tokens / "ada.json"
    good = json.loads(file.read_bytes())
    tokens = Tokens(folder, "")
    for content in (
        b"", b"\xff", b"[]", b"[" * 3000, b"null", b'{"role": "run"}',
        *(json.dumps({**good, **change}).encode() for change in (
            {"role": "server"}, {"role": ["run"]}, {"sha256": 7}, {"sha256": "x" * 64}, {"sha256": "\u0663" * 64})),
    ):  # fmt: skip
        file.unlink()
        file.write_bytes(content)
        assert tokens.of(token) is None and tokens.of("") is None
    file.unlink()
    file.write_text(json.dumps(good))
    assert tokens.of(token) == Operator("ada", "watch")


def test_names(folder: KeyFolder) -> None:
    make_token(folder, "ada", "run")
    for name, wrong in (
        ("ada", "ada has a token already: choose another name, or revoke it"),
        ("../ada", "an operator's name is 1 to 64 letters"),
        ("operator", "an operator's name is"),
        ("server", "an operator's name is"),
    ):
        with pytest.raises(BadInput, match=wrong):
            make_token(folder, name, "run")
    with pytest.raises(BadInput, match=r"no operator \.\./tokens/ada has a token in .*: there are ada"):
        revoke_token(folder, "../tokens/ada")
    with pytest.raises(BadInput, match="operator.token is replaced, not revoked: `strata fleet rotate token`"):
        revoke_token(folder, "operator")
    with pytest.raises(BadInput, match="give the key folder on the server"):
        make_token(KeyFolder(folder.operator("ada")), "bob", "run")


def test_the_commands(folder: KeyFolder, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["--keys", str(folder.path)]
    assert main(["fleet", "token", "ada", "--role", "watch", *keys]) == 0
    told = capsys.readouterr().out
    assert f"move {folder.operator('ada')} there" in told and text(folder.operator("ada")) not in told
    assert main(["fleet", "token", "--list", *keys]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("ada  watch  made 20")
    assert main(["fleet", "token", "--list", "--json", *keys]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["role"]) for one in listed] == [("operator", "run"), ("ada", "watch")]
    assert main(["fleet", "token", "ada", "--revoke", *keys]) == 0
    assert "is refused from now on" in capsys.readouterr().out
    assert main(["fleet", "audit", *keys]) == 0
    made, revoked = capsys.readouterr().out.splitlines()
    assert "token made  user=" in made and made.endswith("token=ada role=watch") and "token revoked" in revoked
    for wrong in ([], ["ada"], ["--list", "ada"], ["ada", "--revoke", "--role", "run"], ["ada", "--revoke"]):
        assert main(["fleet", "token", *wrong, *keys]) == 2
        error = capsys.readouterr().err
        assert error.startswith("strata fleet: ") and error.count("\n") == 1


def test_who_may_only_watch_is_told_so() -> None:
    answer = httpx.Response(403, json={"detail": NOT_BY_ROLE.format(role="watch")})
    error = httpx.HTTPStatusError("", request=httpx.Request("POST", "https://a"), response=answer)
    said = _sentence(error, Access(Address("fleet.local", 8477), None, None))
    assert said == (
        "the server at fleet.local:8477 lets this operator.token watch and nothing else: use one with --role run"
    )
