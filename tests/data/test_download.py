from __future__ import annotations

import fcntl
import hashlib
import http.client
import io
import socket
import ssl
import subprocess
import sys
import tarfile
import time
import zipfile

import numpy as np
import pytest

from strata.core.errors import BadInput
from strata.data.download import check_address, fetch, unpack
from tests.data.server import Site, serving

BODY = np.random.default_rng(0).bytes(3_000_000)
MD5 = hashlib.md5(BODY).hexdigest()


def test_a_plain_download(tmp_path):
    seen = []
    with serving(Site({"a.bin": BODY})) as site:
        target = tmp_path / "deep" / "a.bin"
        fetch(f"{site.url}/a.bin", target, MD5, progress=lambda done, total: seen.append((done, total)))
        fetch(f"{site.url}/a.bin", target, MD5)  # there already: checked, not fetched
    assert target.read_bytes() == BODY and [path.name for path in target.parent.iterdir()] == ["a.bin"]
    assert len(site.requests) == 1 and seen[0] == (0, 3_000_000) and seen[-1] == (3_000_000, 3_000_000)


def test_it_continues_when_the_server_breaks_off(tmp_path):
    with serving(Site({"a.bin": BODY}, break_after=[1_000_000, 500_000])) as site:
        fetch(f"{site.url}/a.bin", tmp_path / "a.bin", MD5)
    assert (tmp_path / "a.bin").read_bytes() == BODY
    assert [wanted for _, wanted in site.requests] == [None, "bytes=1000000-", "bytes=1500000-"]


def test_it_continues_when_encryption_breaks_down(tmp_path, monkeypatch):
    read1, calls = http.client.HTTPResponse.read1, []

    def broken(response, size):
        calls.append(size)
        if len(calls) == 2:
            raise ssl.SSLError("record layer failure")
        return read1(response, size)

    monkeypatch.setattr(http.client.HTTPResponse, "read1", broken)
    with serving(Site({"a.bin": BODY})) as site:
        fetch(f"{site.url}/a.bin", tmp_path / "a.bin", MD5)
    assert (tmp_path / "a.bin").read_bytes() == BODY and len(site.requests) == 2


def test_it_continues_in_a_later_call(tmp_path):
    part = tmp_path / "a.bin.part"
    with serving(Site({"a.bin": BODY}, break_after=[700_000])) as site:
        with pytest.raises(BadInput, match="broke off after 700000 bytes.*continues from there"):
            fetch(f"{site.url}/a.bin", tmp_path / "a.bin", MD5, attempts=1)
        assert part.read_bytes() == BODY[:700_000] and not (tmp_path / "a.bin").exists()
        fetch(f"{site.url}/a.bin", tmp_path / "a.bin", MD5)
    assert (tmp_path / "a.bin").read_bytes() == BODY and not part.exists()
    assert site.requests[-1] == ("a.bin", "bytes=700000-")


def test_killed_in_the_middle_it_continues(tmp_path):
    part = tmp_path / "a.bin.part"
    with serving(Site({"a.bin": BODY}, stall_after=[1_200_000])) as site:
        arguments = f"{site.url + '/a.bin'!r}, Path({str(tmp_path / 'a.bin')!r}), {MD5!r}"
        code = f"from strata.data.download import Path, fetch; fetch({arguments})"
        process = subprocess.Popen([sys.executable, "-c", code])
        deadline = time.monotonic() + 60
        while not (part.exists() and part.stat().st_size >= 1_100_000) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
        process.wait()
        site.go.set()
        kept = part.stat().st_size
        assert kept >= 1_100_000 and not (tmp_path / "a.bin").exists()
        fetch(f"{site.url}/a.bin", tmp_path / "a.bin", MD5)
    assert (tmp_path / "a.bin").read_bytes() == BODY and site.requests[-1] == ("a.bin", f"bytes={kept}-")


def test_a_server_that_gives_nothing_ends_in_a_sentence(tmp_path):
    with serving(Site({"a.bin": BODY}, break_after=[0] * 9)) as site:
        with pytest.raises(BadInput, match="broke off after 0 bytes"):
            fetch(f"{site.url}/a.bin", tmp_path / "a.bin", MD5, attempts=3)
    assert len(site.requests) == 3 and list(tmp_path.iterdir()) == []


def test_a_server_without_ranges_starts_over(tmp_path):
    (tmp_path / "a.bin.part").write_bytes(b"x" * 1000)
    with serving(Site({"a.bin": BODY}, ranges=False)) as site:
        fetch(f"{site.url}/a.bin", tmp_path / "a.bin", MD5)
    assert (tmp_path / "a.bin").read_bytes() == BODY and len(site.requests) == 1


def test_a_wrong_file_is_not_kept(tmp_path):
    with serving(Site({"a.bin": b"<html>sorry</html>"})) as site:
        with pytest.raises(BadInput, match=f"md5 is .* should be {MD5}"):
            fetch(f"{site.url}/a.bin", tmp_path / "a.bin", MD5)
    assert list(tmp_path.iterdir()) == [] and len(site.requests) == 1
    (tmp_path / "a.bin").write_bytes(b"placed by hand, but wrong")
    with pytest.raises(BadInput, match="remove .*a.bin and try again"):
        fetch("http://unused.invalid/a.bin", tmp_path / "a.bin", MD5)


@pytest.mark.parametrize("stale", [b"y" * 1000, b"y" * 3_000_000, b"y" * 4_000_000, BODY])
def test_a_part_of_another_file_is_replaced(tmp_path, stale):
    (tmp_path / "a.bin.part").write_bytes(stale)
    with serving(Site({"a.bin": BODY})) as site:
        fetch(f"{site.url}/a.bin", tmp_path / "a.bin", MD5)
    assert (tmp_path / "a.bin").read_bytes() == BODY
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_errors_of_the_server(tmp_path):
    with serving(Site({"a.bin": BODY}, errors=[503, 500])) as site:
        fetch(f"{site.url}/a.bin", tmp_path / "a.bin", MD5)  # its own trouble: try again
        with pytest.raises(BadInput, match="HTTP 404 Not Found; fetch the file elsewhere and put it at .*b.bin"):
            fetch(f"{site.url}/b.bin", tmp_path / "b.bin", MD5)
    assert not (tmp_path / "b.bin.part").exists()


def test_offline_is_said_plainly(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/a.bin"  # bound, nobody listens: refused
        with pytest.raises(BadInput, match=f"seems to be offline; fetch {url} on another, put it at {tmp_path}/a.bin"):
            fetch(url, tmp_path / "a.bin", MD5)
    with pytest.raises(BadInput, match="offline"):
        fetch("http://no-such-host.invalid/a.bin", tmp_path / "a.bin", MD5)
    assert list(tmp_path.iterdir()) == []


def test_addresses_of_mirrors():
    for right in ("http://localhost:8000", "https://example.org/data/", "http://[::1]:80/x"):
        assert check_address(right) == right
    for wrong in (
        "foo", "", "ftp://[x", "ftp://example.org", "file:///etc", "http://", "http://:80", "http://a:port", "http://a..b",
        "http://me:secret@example.org", "http://example.org/?file=", "https:example.org",
    ):  # fmt: skip
        with pytest.raises(BadInput, match="a mirror is the plain http or https address of a folder, such as"):
            check_address(wrong)
    for unwritten in ("http://example.org/my data", "http://example.org/datä", "http://example.org/a\x7f"):
        with pytest.raises(BadInput, match="written as %20"):
            check_address(unwritten)


def test_without_a_published_checksum_the_first_download_counts(tmp_path):
    target = tmp_path / "a.bin"
    with serving(Site({"a.bin": BODY})) as site:
        fetch(f"{site.url}/a.bin", target, None)
        assert (tmp_path / "a.bin.sha256").read_text().split() == [hashlib.sha256(BODY).hexdigest(), "a.bin"]
        target.unlink()
        site.files["a.bin"] = b"changed"
        with pytest.raises(BadInput, match="has changed"):
            fetch(f"{site.url}/a.bin", target, None)
    assert not target.exists()


def test_one_download_at_a_time(tmp_path):
    with (tmp_path / "a.bin.part").open("ab") as other, serving(Site({"a.bin": BODY})) as site:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BadInput, match="another process"):
            fetch(f"{site.url}/a.bin", tmp_path / "a.bin", MD5)
    assert site.requests == []


def test_an_unwritable_place(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        fetch("http://unused.invalid/a.bin", tmp_path / "file" / "a.bin", MD5)


def _tar(path, *members) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content, kind, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, link, len(content)
            tar.addfile(info, io.BytesIO(content))


def test_unpacking(tmp_path):
    _tar(tmp_path / "a.tar.gz", ("set", b"", tarfile.DIRTYPE, ""), ("set/x/one", b"1", tarfile.REGTYPE, ""))
    assert unpack(tmp_path / "a.tar.gz", tmp_path, "set", 100) == tmp_path / "set"
    assert (tmp_path / "set" / "x" / "one").read_bytes() == b"1"
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("zipped/two", "2")
    assert (unpack(tmp_path / "b.zip", tmp_path, "zipped", 100) / "two").read_text() == "2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar.gz", "b.zip", "set", "zipped"]


FILE = tarfile.REGTYPE


@pytest.mark.parametrize(
    "members",
    [
        [("set/a", b"1", FILE, ""), ("../evil", b"1", FILE, "")],
        [("set/../../evil", b"1", FILE, "")],
        [("/tmp/strata-evil", b"1", FILE, "")],
        [("set/link", b"", tarfile.SYMTYPE, "/etc"), ("set/link/evil", b"1", FILE, "")],
        [("set/a", b"1", FILE, ""), ("set/hard", b"", tarfile.LNKTYPE, "/etc/passwd")],
        [("set/fifo", b"", tarfile.FIFOTYPE, "")],
        [("set/a", b"1" * 1001, FILE, "")],  # more than the limit
        [("other/a", b"1", FILE, "")],
        [("set", b"a file", FILE, "")],
        [],
    ],
)
def test_hostile_archives_leave_nothing_behind(tmp_path, members):
    root = tmp_path / "root"
    root.mkdir()
    _tar(tmp_path / "a.tar.gz", *members)
    with pytest.raises(BadInput):
        unpack(tmp_path / "a.tar.gz", root, "set", 1000)
    assert list(root.iterdir()) == [] and sorted(path.name for path in tmp_path.iterdir()) == ["a.tar.gz", "root"]


def test_hostile_zips(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    link = zipfile.ZipInfo("set/link")
    link.external_attr = 0o120777 << 16
    for name in ("../evil", "set/../../evil", "/evil", link):
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            archive.writestr(name, "/etc/passwd")
        with pytest.raises(BadInput):
            unpack(tmp_path / "a.zip", root, "set", 1000)
    (tmp_path / "a.zip").write_bytes((tmp_path / "a.zip").read_bytes()[:20])
    with pytest.raises(BadInput, match="broken or cut short"):
        unpack(tmp_path / "a.zip", root, "set", 1000)
    assert list(root.iterdir()) == []


def test_a_truncated_archive(tmp_path):
    _tar(tmp_path / "a.tar.gz", ("set/a", np.random.default_rng(0).bytes(10_000), FILE, ""))
    (tmp_path / "a.tar.gz").write_bytes((tmp_path / "a.tar.gz").read_bytes()[:5000])
    with pytest.raises(BadInput, match="broken or cut short"):
        unpack(tmp_path / "a.tar.gz", tmp_path, "set", 100_000)
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.gz"]
