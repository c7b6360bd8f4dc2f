from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import tarfile

import pytest

from strata.cli import main
from strata.data import catalogue
from tests.data import published
from tests.data.server import Site, serving


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("STRATA_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def run(capsys, *args: str) -> tuple[int, str, str]:
    code = main(["data", *args])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_list_says_what_is_on_disk(root, capsys):
    published.cifar10(root / "cifar-10-batches-py")
    code, out, _ = run(capsys)
    rows = {line.split()[0]: line for line in out.splitlines() if line}
    assert code == 0 and "  yes  " in rows["cifar10"] and "  no  " in rows["cifar100"] and "170 MB" in rows["cifar10"]
    assert "  360 kB  " in rows["trec"] and "about 5 GB, by hand" in rows["femnist"]
    assert "in the package" in rows["digits"] and "image-net.org" in rows["imagenet64"]
    _, out, _ = run(capsys, "--json", "--dir", str(root))
    listed = {row["name"]: row for row in json.loads(out)["data"]}
    assert list(listed) == [
        "digits", "cifar10", "cifar100", "mnist", "fashion-mnist", "femnist", "tinyimagenet", "imagenet64",
        "shakespeare", "20newsgroups", "banking77", "clinc150", "sst2", "trec", "trec50",
    ]  # fmt: skip
    assert listed["cifar10"]["path"] == str(root / "cifar-10-batches-py") and listed["cifar10"]["on_disk"]
    assert not listed["mnist"]["on_disk"] and listed["mnist"]["get"] == "download"


def _cifar_archive(tmp_path) -> bytes:
    published.cifar10(tmp_path / "made" / "cifar-10-batches-py")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(tmp_path / "made" / "cifar-10-batches-py", "cifar-10-batches-py")
    return packed.getvalue()


def test_get_then_load(root, tmp_path, capsys, monkeypatch):
    body = _cifar_archive(tmp_path)
    with serving(Site({"cifar-10-python.tar.gz": body}, break_after=[1000])) as site:
        code, out, err = run(capsys, "get", "cifar10", "--mirror", site.url)
        assert (code, out) == (2, "") and "c58f30108f718f92721af3b95e74349a" in err  # not the published file
        assert not (root / "cifar-10-batches-py").exists()
        entry = catalogue.CATALOGUE["cifar10"]
        download = dataclasses.replace(entry.downloads[0], md5=hashlib.md5(body).hexdigest())
        monkeypatch.setitem(catalogue.CATALOGUE, "cifar10", dataclasses.replace(entry, downloads=(download,)))
        code, out, err = run(capsys, "get", "cifar10", "--mirror", site.url + "/")
        assert code == 0 and err == "" and f"--data-dir {root}" in out
        asked = len(site.requests)
        code, out, _ = run(capsys, "get", "cifar10", "--mirror", site.url, "--json")
        assert json.loads(out) == {"name": "cifar10", "path": str(root / "cifar-10-batches-py")}
        assert len(site.requests) == asked  # there already
        (root / "cifar-10-batches-py" / "data_batch_1").rename(tmp_path / "away")
        assert "remove it" in run(capsys, "get", "cifar10", "--mirror", site.url)[2]
        (tmp_path / "away").rename(root / "cifar-10-batches-py" / "data_batch_1")
    code, out, _ = run(capsys, "show", "--data", "cifar10", "--devices", "2", "--json")
    assert code == 0 and [sum(row) for row in json.loads(out)["counts"]] == [10, 10]


def test_who_holds_what_of_data_without_classes(tmp_path, capsys):
    path = tmp_path / "said.jsonl"
    path.write_text("".join(json.dumps({"text": "abcdef", "who": n % 3}) + "\n" for n in range(20)))
    asked = ["show", "--data", f"text:{path}", "--objective", "next-token", "--length", "2", "--user-field", "who"]
    code, out, _ = run(capsys, *asked, "--partition", "user", "--devices", "3", "--json")
    found = json.loads(out)
    assert code == 0 and found["classes_per_device"] is None
    assert sum(map(sum, found["counts"])) == 18 * 3  # a tenth is held out, and each text makes windows of 2, 2 and 1
    code, out, _ = run(capsys, *asked, "--devices", "2")
    assert code == 0 and "27.0 samples per device on average" in out and "classes and" not in out


def test_get_of_single_files(root, tmp_path, capsys, monkeypatch):
    published.mnist(tmp_path / "made", ".gz")
    files = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    entry = catalogue.CATALOGUE["mnist"]
    downloads = tuple(dataclasses.replace(d, md5=hashlib.md5(files[d.file]).hexdigest()) for d in entry.downloads)
    monkeypatch.setitem(catalogue.CATALOGUE, "mnist", dataclasses.replace(entry, downloads=downloads))
    with serving(Site(files)) as site:
        code, _, _ = run(capsys, "get", "mnist", "--mirror", site.url, "--dir", str(tmp_path / "here"))
    assert code == 0 and len(catalogue.load("mnist", tmp_path / "here").train) == 5


def test_what_cannot_be_downloaded_is_explained(root, capsys):
    expected = {"femnist": "preprocess.sh", "imagenet64": "needs a login", "nope": "choose digits, cifar10"}
    for name, words in expected.items():
        code, out, err = run(capsys, "get", name)
        assert (code, out) == (2, "") and words in err and err.count("\n") == 1
    assert f"{root}-x/femnist" in run(capsys, "--dir", f"{root}-x", "get", "femnist")[2]
    code, out, _ = run(capsys, "get", "digits")
    assert code == 0 and "nothing to fetch" in out


def test_a_mirror_or_a_folder_that_cannot_be(root, capsys, monkeypatch):
    for arguments, words in (
        (["get", "cifar10", "--mirror", "foo"], "a mirror is the plain http or https address"),
        (["get", "cifar10", "--dir", "~no-such-user/data"], "~no-such-user/data begins with a home folder that is not"),
        (["--dir", "~no-such-user"], "not known here: give the whole path"),
        (["show", "--data", "cifar10", "--dir", "~no-such-user"], "not known here: give the whole path"),
        (["--dir", "x" * 300], "cannot be read: File name too long"),
        (["get", "cifar10", "--dir", "x" * 300], "cannot be read: File name too long"),
        (["get", "femnist", "--dir", "x" * 300], "cannot be read: File name too long"),
    ):
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (2, "") and words in err and err.count("\n") == 1
    assert not root.exists()
    monkeypatch.setenv("STRATA_DATA", "~no-such-user")
    assert "not known here" in run(capsys)[2]


def test_show_prints_a_table_and_draws(root, tmp_path, capsys):
    picture = tmp_path / "holdings.png"
    code, out, _ = run(capsys, "show", "--partition", "dirichlet:0.1", "--devices", "20", "--picture", str(picture))
    lines = out.splitlines()
    assert code == 0 and picture.read_bytes()[:4] == b"\x89PNG"
    assert lines[1].split() == ["device", "samples", "classes", *"0123456789"] and len(lines) == 25
    first = lines[2].split()
    held = [int(cell) for cell in first[3:] if cell != "."]
    assert first[:2] == ["0", "75"] and sum(held) == 75 and len(held) == int(first[2])
    assert run(capsys, "show", "--partition", "dirichlet:0.1", "--devices", "20")[1].splitlines()[:22] == lines[:22]


def test_show_of_a_huge_fleet_is_cut(root, capsys):
    code, out, _ = run(capsys, "show", "--partition", "lazy:3", "--devices", "1000000")
    assert code == 0 and "... and 999000 more devices" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--data", "cifar10"], "run: strata data get cifar10 --dir"),
        (["--partition", "noniid"], "there is no partition 'noniid'"),
        (["--devices", "0"], "give 1 or more"),
        (["--devices", "2000"], "1500 samples over 2000 devices"),
        (["--partition", "user"], "has no users"),
        (["--seed", "-1"], "0 or more"),
        (["--picture", "/no/such/folder/x.png"], "cannot write the picture"),
        (["--picture", "x.docx"], "cannot write the picture"),
    ],
)
def test_bad_input_is_one_sentence(root, capsys, args, words):
    code, out, err = run(capsys, "show", *args)
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1


def test_help_has_an_example(capsys):
    for args in (["--help"], ["get", "--help"], ["show", "--help"]):
        with pytest.raises(SystemExit) as end:
            main(["data", *args])
        assert end.value.code == 0 and "example: strata data" in capsys.readouterr().out
