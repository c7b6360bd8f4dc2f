"""Which data sets there are, where each comes from and how it is found, fetched and loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from strata.core.errors import BadInput
from strata.core.paths import expanded
from strata.data.cifar import find_cifar10, find_cifar100, load_cifar10, load_cifar100
from strata.data.digits import load_digits
from strata.data.download import Progress, check_address, fetch, unpack
from strata.data.files import default_root
from strata.data.files import reading as reading_of
from strata.data.folders import find_tinyimagenet, load_folder, load_tinyimagenet
from strata.data.idx import find_fashion, find_mnist, load_fashion, load_mnist
from strata.data.imagenet64 import find_imagenet64, load_imagenet64
from strata.data.leaf import find_femnist, load_femnist
from strata.data.objective_names import objective_named
from strata.data.reading import OF_OTHERS, OF_PICTURES, OF_TABLES, OF_TEXT, OF_TEXT_SETS, Reading
from strata.data.samples import FederatedData
from strata.data.tables import load_table
from strata.data.text import load_text
from strata.data.text_sets import TEXT_SETS, find_shakespeare, read_shakespeare


@dataclass(frozen=True)
class Download:
    url: str
    md5: str | None

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Entry:
    name: str
    summary: str
    source: str
    download_bytes: int  # to fetch (about, where not published)
    find: Callable[[Path], Path | None]  # the data set's own folder at or below a root
    load: Callable[[Path], FederatedData]
    downloads: tuple[Download, ...] = ()
    folder: str = ""  # what the archive unpacks to, or where single files go
    by_hand: str = ""  # how to get it where it cannot simply be downloaded
    read: Callable[[Path, Reading], FederatedData] | None = None  # in place of `load`, where it can be read in ways

    def found(self, place: Path) -> Path | None:
        """As `find`; a place where one may not look is said to be one."""
        with reading_of(place):
            return self.find(place)


def _idx(base: str, *md5s: str) -> tuple[Download, ...]:
    files = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(Download(f"{base}{file}-ubyte.gz", md5) for file, md5 in zip(files, md5s, strict=True))


def _text(
    name: str, summary: str, source: str, size: int, downloads: tuple[Download, ...] = (), folder: str = "",
    by_hand: str = "",
) -> Entry:  # fmt: skip
    """None of them has a published checksum: that of the first download is kept."""
    known = TEXT_SETS.get(name)
    find, read = (find_shakespeare, read_shakespeare) if known is None else (known.find, known.read)
    return Entry(
        name,
        summary,
        source,
        size,
        find,
        lambda place: read(place, Reading()),
        downloads,
        folder or name,
        by_hand,
        read,
    )


_TORONTO = "https://www.cs.toronto.edu/~kriz/"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"  # LeCun's own server refuses downloads; same files, same md5
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_TINY = "http://cs231n.stanford.edu/"
_BANKING = "https://raw.githubusercontent.com/PolyAI-LDN/task-specific-datasets/master/banking_data/"
_CLINC = "https://raw.githubusercontent.com/clinc/oos-eval/master/data/"
_GLUE = "https://dl.fbaipublicfiles.com/glue/data/"
_TREC = "https://cogcomp.seas.upenn.edu/Data/QA/QC/"
_NEWS = "http://qwone.com/~jason/20Newsgroups/"
_ENTRIES = (
    Entry("digits", "10 classes, 1500 + 297 images of 8x8, enlarged to 32x32", "in the package (scikit-learn, UCI)", 0,
          lambda root: root, lambda root: load_digits()),
    Entry("cifar10", "10 classes, 50,000 + 10,000 images of 32x32", _TORONTO + "cifar.html", 170_498_071,
          find_cifar10, load_cifar10,
          (Download(_TORONTO + "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),), "cifar-10-batches-py"),
    Entry("cifar100", "100 classes, 50,000 + 10,000 images of 32x32", _TORONTO + "cifar.html", 169_001_437,
          find_cifar100, load_cifar100,
          (Download(_TORONTO + "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),), "cifar-100-python"),
    Entry("mnist", "10 classes, 60,000 + 10,000 images of 28x28, enlarged to 32x32", _MNIST, 11_594_722,
          find_mnist, load_mnist,
          _idx(_MNIST, "f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432",
               "9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c"), "mnist"),
    Entry("fashion-mnist", "10 classes, 60,000 + 10,000 images of 28x28, enlarged to 32x32", _FASHION, 30_878_645,
          find_fashion, load_fashion,
          _idx(_FASHION, "8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe",
               "bef4ecab320f06d8554ea6380940ec79", "bb300cfdad3c16e7a12a480ee83cd310"), "fashion-mnist"),
    Entry("femnist", "62 classes, 3550 writers, 805,263 images of 28x28, enlarged to 32x32", "https://leaf.cmu.edu",
          5_000_000_000, find_femnist, load_femnist, folder="femnist",
          by_hand="LEAF makes it from NIST's scans: clone https://github.com/TalwalkarLab/leaf, run "
          "`./preprocess.sh -s niid --sf 1.0 -k 0 -t sample` in leaf/data/femnist, and "
          "copy data/train and data/test to {root}/femnist"),
    # no checksum is published by Stanford; this md5 is what many projects record for its 248,100,043 bytes
    Entry("tinyimagenet", "200 classes, 100,000 + 10,000 images of 64x64", _TINY, 248_100_043,
          find_tinyimagenet, load_tinyimagenet,
          (Download(_TINY + "tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),), "tiny-imagenet-200"),
    Entry("imagenet64", "1000 classes, 1,281,167 + 50,000 images of 64x64", "https://image-net.org/download-images",
          13_000_000_000, find_imagenet64, load_imagenet64, folder="imagenet64",
          by_hand="it needs a login at https://image-net.org/download-images: fetch Imagenet64_train_part1_npz.zip, "
          "Imagenet64_train_part2_npz.zip and Imagenet64_val_npz.zip and unzip them into {root}/imagenet64"),

    _text("shakespeare", "1362 roles of the plays; the next of 74 characters", "Project Gutenberg", 1_427_408,
          by_hand="put shakespeare_by_role.jsonl.xz, rows of play, role and speeches, into {root}"),
    _text("20newsgroups", "20 classes, 11,314 + 7532 messages, split by date", _NEWS, 14_464_277,
          by_hand="fetch " + _NEWS + "20news-bydate.tar.gz and unpack it into {root}/20newsgroups"),
    _text("banking77", "77 classes, 10,003 + 3080 questions of bank customers", _BANKING, 1_079_000,
          (Download(_BANKING + "train.csv", None), Download(_BANKING + "test.csv", None))),
    _text("clinc150", "150 classes, 15,000 + 4500 requests; those out of scope are left out", _CLINC, 2_300_000,
          (Download(_CLINC + "data_full.json", None),)),
    _text("sst2", "2 classes, 67,349 + 872 (GLUE's dev; of the one file 1821) phrases of film reviews", _GLUE,
          7_439_277, (Download(_GLUE + "SST-2.zip", None),), "SST-2"),
    _text("trec", "6 classes, 5452 + 500 questions", _TREC, 360_000,
          (Download(_TREC + "train_5500.label", None), Download(_TREC + "TREC_10.label", None))),
    _text("trec50", "50 classes, the same questions", _TREC, 360_000,
          (Download(_TREC + "train_5500.label", None), Download(_TREC + "TREC_10.label", None)), "trec"),
)  # fmt: skip
CATALOGUE: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}
_UNPACKED_LIMIT = 8 << 30  # bytes; the largest archive here unpacks to well under 1 GiB


def entry_of(name: str) -> Entry:
    if name not in CATALOGUE:
        raise BadInput(
            f"there is no data set {name!r}; choose {', '.join(CATALOGUE)}, or folder, text:FILE.jsonl or "
            "table:FILE.csv for your own"
        )
    return CATALOGUE[name]


def load(
    name: str, root: str | Path | None = None, reading: Reading | None = None, classes: int | None = None
) -> FederatedData:
    """A data set by name. `root` is the folder it is in (or its parent); `folder[:SIZE]` loads a tree of pictures,
    `text:FILE.jsonl` and `table:FILE.csv` a file, relative to `root` where that is given. `reading`: how text, tables
    and pictures of your own are read. `classes`: of files whose labels are numbers, where not all of them occur."""
    asked = reading or Reading()
    kind, colon, file = name.partition(":")
    if colon and kind in ("text", "table"):
        asked.refuse_unused(OF_TEXT if kind == "text" else OF_TABLES, name)
        path = expanded(file) if root is None else expanded(root) / expanded(file)
        if not file:
            raise BadInput(f"the data {kind} needs a file: --data {kind}:FILE.{'jsonl' if kind == 'text' else 'csv'}")
        data = load_text(path, asked, classes) if kind == "text" else load_table(path, asked, classes)
        if classes is None and data.unseen:
            note = f"{data.name}: {data.unseen} of {data.classes} classes have no sample"
            data = replace(data, notes=(*data.notes, note))
        return data
    place = default_root() if root is None else expanded(root)
    with reading_of(place):
        if kind == "folder":
            asked.refuse_unused(OF_PICTURES, name)
            if root is None:
                raise BadInput("the data set folder needs to be told which one: --data-dir DIR")
            return _by_objective(load_folder(place, _size(name), skip=asked.skip_unreadable), asked)
        entry = entry_of(name)
        asked.refuse_unused(OF_TEXT_SETS if entry.read else OF_OTHERS, name)
        found = entry.find(place)
        if found is None:
            raise BadInput(f"{name} is not in {place}; run: strata data get {name} --dir {place}")
        return _by_objective(entry.load(found), asked) if entry.read is None else entry.read(found, asked)


def _by_objective(data: FederatedData, asked: Reading) -> FederatedData:
    return data if asked.objective is None else replace(data, objective=objective_named(asked.objective))


def _size(name: str) -> int | None:
    _, colon, text = name.partition(":")
    if not colon:
        return None
    if not text.isdigit() or not 1 <= int(text) <= 4096:
        raise BadInput(f"{name!r} should name a size in pixels, folder:64 for example")
    return int(text)


def get(
    name: str,
    root: str | Path | None = None,
    mirror: str | None = None,
    progress: Callable[[str], Progress] = lambda file: lambda done, total: None,
) -> Path:
    """Download (with checksum, continuing a broken download) and unpack; returns the data set's folder.

    `mirror`: the address of a folder that holds the same files; the checksums stay those of the original.
    """
    entry = entry_of(name)
    if mirror is not None:
        check_address(mirror)
    place = default_root() if root is None else expanded(root)
    if name == "digits":
        return place
    found = entry.found(place)
    if not entry.downloads:
        if found is None:
            raise BadInput(f"{name} cannot simply be downloaded: {entry.by_hand.format(root=place)}")
        return found
    downloads = entry.downloads
    if mirror is not None:
        downloads = tuple(replace(one, url=f"{mirror.rstrip('/')}/{one.file}") for one in downloads)
    if found is not None and found.is_file():  # the whole set as one file
        return found
    archive = len(downloads) == 1 and downloads[0].file.endswith((".zip", ".gz"))
    if archive:
        if found is not None and (place / entry.folder).exists():
            return place / entry.folder
        one = downloads[0]
        target = fetch(one.url, place / one.file, one.md5, progress=progress(one.file))
        folder = unpack(target, place, entry.folder, _UNPACKED_LIMIT)
        if entry.find(place) is None:
            raise BadInput(f"{folder} is there but is not a whole {name}; remove it and run the same command again")
        return folder
    for one in downloads:
        fetch(one.url, place / entry.folder / one.file, one.md5, progress=progress(one.file))
    return place / entry.folder
