"""The key folder: what is in the certificates, who may read the files, and that nothing is overwritten."""

from __future__ import annotations

import datetime
import ssl
import stat
from pathlib import Path

import pytest

pytest.importorskip("flwr")
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.verification import PolicyBuilder, Store

from strata.core.errors import BadInput
from strata.fleet.security import keys as keys_module
from strata.fleet.security.keys import device_keys, make_keys
from tests.fleet.processes import strata

PRIVATE = ("ca.key", "server.key", "operator.token", "devices/a/device.key", "devices/b/device.key")
PUBLIC = ("ca.pem", "server.pem", "devices/a/ca.pem", "registered/a.pub", "registered/b.pub")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["fleet.local", "192.168.1.10"], ["a", "b"])
    return tmp_path / "keys"


def test_server_certificate(keys: Path) -> None:
    certificate = x509.load_pem_x509_certificate((keys / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fleet.local", "localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["192.168.1.10", "127.0.0.1", "::1"]
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical and not constraints.value.ca
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert 365 * 5 - 1 <= left.days <= 365 * 5


def test_server_certificate_is_the_authoritys(keys: Path) -> None:
    authority = x509.load_pem_x509_certificate((keys / "ca.pem").read_bytes())
    certificate = x509.load_pem_x509_certificate((keys / "server.pem").read_bytes())
    verifier = PolicyBuilder().store(Store([authority])).build_server_verifier(x509.DNSName("fleet.local"))
    assert verifier.verify(certificate, []) == [certificate, authority]
    key = serialization.load_pem_private_key((keys / "server.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey) and key.public_key() == certificate.public_key()
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(keys / "server.pem", keys / "server.key")


def test_device_keys_are_what_supernodes_take(keys: Path) -> None:
    private = serialization.load_ssh_private_key((keys / "devices/a/device.key").read_bytes(), None)
    public = serialization.load_ssh_public_key((keys / "registered/a.pub").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey) and isinstance(private.curve, ec.SECP384R1)
    assert private.public_key() == public
    assert (keys / "registered/b.pub").read_bytes() != (keys / "registered/a.pub").read_bytes()
    assert (keys / "devices/a/ca.pem").read_bytes() == (keys / "ca.pem").read_bytes()


def test_modes(keys: Path) -> None:
    def mode(name: str) -> int:
        return stat.S_IMODE((keys / name).stat().st_mode)

    assert {name: mode(name) for name in PRIVATE} == dict.fromkeys(PRIVATE, 0o600)
    assert {name: mode(name) for name in PUBLIC} == dict.fromkeys(PUBLIC, 0o644)
    assert mode(".") == mode("devices") == mode("devices/a") == 0o700


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "hosts, devices, message",
    [
        (["other.local"], ["c"], "has a server certificate"),
        ([], [], "holds a fleet's keys already"),
        ([], ["a"], "device a has keys already"),
        ([], ["c", "c"], "may be given once"),
        ([], ["../c"], "a device's name is"),
        ([], ["0"], "a number from 1"),
    ],
)
def test_nothing_is_overwritten(keys: Path, hosts: list[str], devices: list[str], message: str) -> None:
    before = contents(keys)
    with pytest.raises(BadInput, match=message):
        make_keys(keys, hosts, devices)
    assert contents(keys) == before


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("dear")
    with pytest.raises(BadInput, match="holds other files"):
        make_keys(tmp_path, [], ["1"])
    assert contents(tmp_path) == {"thesis.txt": b"dear"}


@pytest.mark.parametrize("host", ["host:8477", "https://host", "", "a b"])
def test_hosts_are_checked_first(tmp_path: Path, host: str) -> None:
    with pytest.raises(BadInput, match="--host is a name or an address"):
        make_keys(tmp_path / "keys", [host], ["1"])
    assert not (tmp_path / "keys").exists()


def test_devices_are_added_later(keys: Path) -> None:
    before = contents(keys)
    assert make_keys(keys, [], ["2"]).devices == ("device-1", "device-2")
    assert make_keys(keys, [], ["1"]).devices == ("device-3",)
    after = contents(keys)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {
        name
        for i in (1, 2, 3)
        for name in (f"registered/device-{i}.pub", f"devices/device-{i}/device.key", f"devices/device-{i}/ca.pem")
    }


def test_renewing_keeps_the_authority(keys: Path) -> None:
    before = contents(keys)
    make_keys(keys, [], [], renew=True)
    renewed = contents(keys)
    assert {name for name in before if renewed[name] != before[name]} == {"server.pem", "server.key"}
    names = x509.load_pem_x509_certificate(renewed["server.pem"]).extensions
    dns = names.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)
    assert dns == ["fleet.local", "localhost"]  # as before


def test_killed_while_making_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After any file: the folder is either whole, or plainly not a fleet's."""

    class Killed(BaseException):
        pass

    write = keys_module.write_new
    for files in range(4):
        left = [None] * files

        def dying(path: Path, content: bytes, mode: int = 0o600, left: list[None] = left) -> None:
            if not left:
                raise Killed
            left.pop()
            write(path, content, mode)

        folder = tmp_path / str(files)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(keys_module, "write_new", dying)
            make_keys(folder, [], ["a"])
        if files == 0:
            assert make_keys(folder, [], ["a"]).new_fleet
        else:
            before = contents(folder)
            with pytest.raises(BadInput, match="or not all of them: choose a new folder"):
                make_keys(folder, [], ["b"])
            assert contents(folder) == before


def test_devices_are_not_added_to_a_copy(keys: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "ca.pem").write_bytes((keys / "ca.pem").read_bytes())
    with pytest.raises(BadInput, match="add devices to the key folder on the server"):
        make_keys(copy, [], ["c"])
    assert list(contents(copy)) == ["ca.pem"]


def test_a_device_finds_its_keys(keys: Path) -> None:
    own = keys / "devices" / "a"
    assert device_keys(own, None).path == device_keys(own / "device.key", None).path == own
    assert device_keys(keys, "a").path == own and device_keys(own, None).name == "a"
    with pytest.raises(BadInput, match="say with --name which this is .there: a, b"):
        device_keys(keys, None)
    with pytest.raises(BadInput, match=r"there is no file .*devices/x/device.key"):
        device_keys(keys, "x")


def test_the_command_says_what_goes_where(tmp_path: Path) -> None:
    done = strata("fleet", "keys", "k", "--host", "10.0.0.1,fleet.local", "--devices", "pi,nano", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("for 10.0.0.1, fleet.local, localhost", "k/devices/pi ->", "operator.token", "ca.key is needed"):
        assert words in done.stdout
    again = strata("fleet", "keys", "k", "--devices", "pi", cwd=tmp_path)
    assert again.returncode == 2 and again.stderr.startswith("strata fleet: device pi has keys already")
    assert "Traceback" not in again.stderr
