"""Folders of images, texts, paths and partitions as users have them: what is read, or the line that refuses it.

Right values come from Pillow and NumPy, or are written out.
"""

import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from samples import order, params

import pfljax as pfl
from pfljax.contract.reading import read_text
from pfljax.data import sources

Image = pytest.importorskip("PIL.Image")
ImageOps = pytest.importorskip("PIL.ImageOps")
Folder = pathlib.Path
GRAY = np.arange(0, 250, 7, dtype=np.uint8).reshape(4, 9)
COLOR = np.arange(108, dtype=np.uint8).reshape(4, 9, 3)
SHORT = Image.fromarray(COLOR[:3])
LONG = Image.fromarray(COLOR)


class Case(NamedTuple):
    """What a user has, and what is right."""

    name: str
    make: Callable[[Folder], Any]  # writes into a folder, and returns what is read
    right: Any  # a regular expression of the error, or what `make` returns


def cases_of(cases):
    """The names of cases as parameters: three by default, a fifth of them in CI, and all every night."""
    names = [(case.name,) for case in cases]
    ordered = sorted(names, key=lambda name: order(name[0]))
    return params(names, ordered[:3], ordered[: len(names) // 5])


def save(folder: Folder, path: str, image: Any = LONG, **options: Any) -> None:
    """Writes an image."""
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    image.save(file, **options)


def layout(*paths: str) -> Callable[[Folder], Any]:
    """What is read of images at these paths: the classes, the clients, and the number of test examples."""

    def make(folder: Folder) -> Any:
        for path in paths:
            save(folder, path)
        source = sources.images(folder)
        clients = None if source.client is None else source.client_names.tolist()
        return (
            source.class_names,
            clients,
            0 if source.is_test is None else int(source.is_test.sum()),
        )

    return make


AB = ("a", "b")
LAYOUTS = [
    Case("train and test", layout("train/a/0.png", "train/b/0.png", "test/a/1.png"), (AB, None, 1)),
    Case("train, val, test", layout("train/a/0.png", "val/b/0.png", "test/a/1.png"), (AB, None, 1)),
    Case("validation joins train", layout("train/a/0.png", "validation/b/0.png"), (AB, None, 0)),
    Case(
        "Training_Set and Test_Set",
        layout("Training_Set/a/0.png", "Test_Set/b/0.png"),
        (AB, None, 1),
    ),
    Case("seg_train and seg_test", layout("seg_train/a/0.png", "seg_test/b/0.png"), (AB, None, 1)),
    Case("train in train", layout("train/train/a/0.png", "test/test/b/0.png"), (AB, None, 1)),
    Case(
        "parts in classes", layout("a/train/0.png", "b/train/0.png", "b/test/1.png"), (AB, None, 1)
    ),
    Case(
        "parts in clients",
        layout("eve/train/a/0.png", "ada/train/b/0.png", "ada/test/b/1.png"),
        (AB, ["ada", "eve"], 1),
    ),
    Case(
        "a class called train",
        layout("car/0.png", "train/0.png", "ship/0.png"),
        (("car", "ship", "train"), None, 0),
    ),
    Case(
        "train and others",
        layout("train/a/0.png", "extra/a/0.png"),
        r"has train next to other folders, extra; acc",
    ),
    Case(
        "only test", layout("test/a/0.png"), r"has a split for test, but none to train on; accepted"
    ),
    Case(
        "parts without classes",
        layout("train/0.png", "test/1.png"),
        r"t/1\.png is elsewhere; accepted",
    ),
    Case("too deep", layout("1/2/3/4/5/6/7/0.png"), r"1/2/3/4/5/6 is elsewhere; accepted"),
    Case(
        "parts that disagree", layout("train/test/a/0.png"), r"has splits in other splits; accepted"
    ),
]


def pixels(image: Any, ext: str = "png", **options: Any) -> Callable[[Folder], Any]:
    """The pixels that are read of an image, beside one with other pixels."""

    def make(folder: Folder) -> Any:
        save(folder, f"a/0.{ext}", image, **options)
        save(folder, f"b/0.{ext}", image, **options)
        return np.rint(sources.images(folder, standardize=False).x[0] * 255).astype(int).tolist()

    return make


def rgb(image: Any) -> list:
    """The pixels of an image in Pillow's own conversion."""
    return np.asarray(image.convert("RGB")).tolist()


def turned(number: int) -> Any:
    """EXIF data with an orientation."""
    exif = Image.Exif()
    exif[0x0112] = number
    return exif


def upright(number: int) -> list:
    """The colors as Pillow's ImageOps turns them."""
    image = LONG.copy()
    image.getexif()[0x0112] = number
    return rgb(ImageOps.exif_transpose(image))


CLEAR = np.dstack([COLOR, np.full((4, 9), 255, np.uint8)])
HALF = np.dstack([np.zeros((4, 9, 3), np.uint8), np.full((4, 9), 102, np.uint8)])
IMAGES = [
    *(Case(f"orientation {n}", pixels(LONG, exif=turned(n)), upright(n)) for n in range(1, 9)),
    Case("orientation 9 means nothing", pixels(LONG, exif=turned(9)), rgb(LONG)),
    Case("palette", pixels(LONG.convert("P")), rgb(LONG.convert("P"))),
    Case(
        "one bit",
        pixels(Image.fromarray(GRAY > 99)),
        (np.asarray(GRAY > 99) * 255)[..., None].tolist(),
    ),
    Case("gray", pixels(Image.fromarray(GRAY)), GRAY[..., None].tolist()),
    Case("CMYK", pixels(LONG.convert("CMYK"), "tif"), rgb(LONG.convert("CMYK"))),
    Case("opaque alpha", pixels(Image.fromarray(CLEAR)), rgb(LONG)),
    Case("alpha of 0.4 on white", pixels(Image.fromarray(HALF)), np.full((4, 9, 3), 153).tolist()),
    Case(
        "a transparent color",
        pixels(Image.fromarray(COLOR * 0), transparency=(0, 0, 0)),
        [[[255] * 3] * 9] * 4,
    ),
    Case(
        "16 bits",
        pixels(Image.fromarray(GRAY.astype(np.uint16) * 9)),
        r"has mode I;16; accepted: 8 bits",
    ),
    Case(
        "floats",
        pixels(Image.fromarray(GRAY / np.float32(9)), "tif"),
        r"has mode F; accepted: 8 bits",
    ),
    Case(
        "frames",
        pixels(LONG, "gif", save_all=True, append_images=[LONG.rotate(180)]),
        r"several frames or pages",
    ),
    Case(
        "pages",
        pixels(LONG, "tif", save_all=True, append_images=[LONG]),
        r"several frames or pages",
    ),
    Case("a photo with a preview", pixels(LONG, "mpo", save_all=True, append_images=[SHORT]), None),
]


def beside(path: str, content: bytes = b"\xd0\xcf x") -> Callable[[Folder], Any]:
    """The number of images that are read beside another file."""

    def make(folder: Folder) -> Any:
        save(folder, "a/0.PNG")
        save(folder, "b/0.JPEG")
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        return len(sources.images(folder).x)

    return make


def linked(make_links: Callable[[Folder, Folder], None]) -> Callable[[Folder], Any]:
    """The number of images that are read of links to a store of two classes."""

    def make(folder: Folder) -> Any:
        store = folder / "store"
        save(store, "a/0.png")
        save(store, "b/0.png")
        (folder / "set").mkdir()
        make_links(folder / "set", store)
        return len(sources.images(folder / "set").x)

    return make


def link_files(folder: Folder, store: Folder) -> None:
    for name in AB:
        (folder / name).mkdir()
        (folder / name / "0.png").symlink_to(store / name / "0.png")


def link_in_a_circle(folder: Folder, store: Folder) -> None:
    (folder / "a").symlink_to(store / "a")
    (store / "a" / "up").symlink_to(folder)


def huge(folder: Folder) -> Any:
    """A PNG of some kilobytes that claims 40,000 x 40,000 pixels."""
    save(folder, "a/0.png", Image.new("1", (40_000, 40_000)))
    return sources.images(folder).x


FILES = [
    *(
        Case(name, beside(f"a/{name}"), 2)
        for name in (".DS_Store", "Thumbs.db", "desktop.ini", "._0.png", "labels.csv")
    ),
    Case("README.md", beside("README.md"), 2),
    Case("__MACOSX", beside("__MACOSX/a/0.png"), 2),
    Case("a file without a suffix", beside("a/LICENSE"), 2),
    Case(
        "heic",
        beside("a/1.heic"),
        r"a/1\.heic: is an image of a format that is not read; accepted: \.apng",
    ),
    Case(
        "a damaged image", beside("a/1.png"), r"a/1\.png: is damaged, or no image that Pillow reads"
    ),
    Case(
        "an empty image",
        beside("a/1.jpg", b""),
        r"a/1\.jpg: is damaged, or no image that Pillow reads",
    ),
    Case(
        "PostScript in disguise",
        beside("a/1.png", b"%!PS-Adobe-3.0 EPSF-3.0\n"),
        r"a/1\.png: is damaged",
    ),
    Case(
        "linked classes",
        linked(lambda folder, store: [(folder / n).symlink_to(store / n) for n in AB]),
        2,
    ),
    Case("linked files", linked(link_files), 2),
    Case(
        "links in a circle",
        linked(link_in_a_circle),
        r"a/up is a link to a folder that it is in; accepted",
    ),
    Case(
        "a link to nothing",
        linked(lambda folder, _: save(folder, "a/0.png") or dangling(folder)),
        r"No such file",
    ),
    Case(
        "40,000 x 40,000 pixels",
        huge,
        r"has more than [\d,]+ pixels, which may exhaust the memory; accepted: fewer",
    ),
]


def dangling(folder: Folder) -> None:
    (folder / "a" / "1.png").symlink_to(folder / "nothing.png")


PLAY = "A:\none\ntwo\n\nB:\nthree\nfour\n"


def play(content: bytes) -> Callable[[Folder], Any]:
    """The roles and the number of characters of a play."""

    def make(folder: Folder) -> Any:
        (folder / "play.txt").write_bytes(content)
        source = sources.text(folder / "play.txt")
        return source.client_names.tolist(), source.num_classes

    return make


LETTERS = len({*"one\ntwo\nthree\nfour"})
TEXTS = [
    *(
        Case(f"in {name}", play(PLAY.encode(name)), (["A", "B"], LETTERS))
        for name in ("utf-8", "utf-8-sig", "utf-16")
    ),
    Case("in UTF-32", play(PLAY.encode("utf-32")), (["A", "B"], LETTERS)),
    Case("lines end in CR LF", play(PLAY.replace("\n", "\r\n").encode()), (["A", "B"], LETTERS)),
    Case("lines end in CR", play(PLAY.replace("\n", "\r").encode()), (["A", "B"], LETTERS)),
    Case(
        "in Latin-1",
        play(PLAY.replace("o", "é").encode("latin-1")),
        r"is not UTF-8 text \(byte 3\)",
    ),
    Case(
        "in UTF-16 without a mark",
        play(PLAY.encode("utf-16-le")),
        r"it has null bytes; is it UTF-16 without a",
    ),
]


def deal(
    partition: Any, num_clients: int, classes: int = 10, n: int = 6000
) -> Callable[[Folder], Any]:
    """Whether all clients have examples of both parts, in proportion, when one example in six is for testing."""

    def make(folder: Folder) -> Any:
        del folder
        y = np.random.default_rng(0).integers(0, classes, n)
        is_test = np.arange(n) % 6 == 0
        clients = pfl.Federation.from_arrays(
            np.zeros((n, 1)),
            y,
            is_test=is_test,
            num_clients=num_clients,
            partition=partition,
            standardize=False,
        )
        assert clients.train.size.min() >= 1 and clients.test.size.min() >= 1
        counts = [
            np.array(
                [
                    np.bincount(own[:size], minlength=classes)
                    for own, size in zip(split.y, split.size, strict=True)
                ]
            )
            for split in (clients.train, clients.test)
        ]
        assert (counts[0].sum(axis=0) <= np.bincount(y[~is_test], minlength=classes)).all()
        proportional = counts[0] / np.maximum(counts[0].sum(axis=0), 1) * counts[1].sum(axis=0)
        # Rounding moves less than one example; a client's first test example may come from another client.
        moved = np.maximum(np.abs(counts[1] - proportional) - 1, 0).sum()
        return bool(
            moved <= num_clients
            and (counts[1] > 0).sum() - ((counts[1] > 0) & (counts[0] > 0)).sum() <= 5
        )

    return make


P = pfl.partitions
PARTITIONS = [
    *(
        Case(f"Dirichlet 0.1, {k} clients", deal(P.Dirichlet(alpha=0.1), k), True)
        for k in (1, 2, 97, 1000)
    ),
    Case("Dirichlet 0.01", deal(P.Dirichlet(alpha=0.01), 100), True),
    Case("62 classes", deal(P.Dirichlet(alpha=0.1), 128, classes=62), True),
    Case("shards", deal(P.Pathological(classes=2), 100), True),
    Case("label groups", deal(P.LabelGroups(groups=3), 100), True),
    Case("spread label groups", deal(P.LabelDirichlet(groups=2, alpha=0.1), 50), True),
    Case("IID", deal(P.IID(), 1000), True),
    Case("pairs", deal(P.Pairs(classes=2), 10), True),
    Case(
        "more clients than tests",
        deal(P.IID(), 1001),
        r"too many for two examples per client .*up to about 1000",
    ),
]


def at_home(path: str) -> Callable[[Folder], Any]:
    """Whether a path that a user writes leads to the home folder."""

    def make(folder: Folder) -> Any:
        (folder / "d.csv").write_text(
            "a,label,who\n" + "".join(f"{k},{k % 2},{k % 3}\n" for k in range(30))
        )
        os.environ["HOME"] = str(folder)
        return pfl.data.read(path, label="label", client="who").num_clients

    return make


def stored(write: Callable[[Any, Folder], Any]) -> Callable[[Folder], Any]:
    """What is read of an HDF5 file with a client, to which more is written."""

    def make(folder: Folder) -> Any:
        h5py = pytest.importorskip("h5py")
        with h5py.File(folder / "other.h5", "w") as other:
            other["x"] = np.zeros((4, 2))
        with h5py.File(folder / "d.h5", "w") as file:
            client = file.create_group("examples/ada")
            client["label"] = np.arange(4) % 2
            write(client, folder)
        return sources.tff(folder / "d.h5").x.shape

    return make


def link_outside(client: Any, folder: Folder) -> None:
    h5py = pytest.importorskip("h5py")
    client["pixels"] = h5py.ExternalLink(str(folder / "other.h5"), "/x")


def store_outside(client: Any, folder: Folder) -> None:
    (folder / "raw").write_bytes(b"0" * 64)
    client.create_dataset("pixels", (4, 2), "f8", external=[(str(folder / "raw"), 0, 64)])


def claim(client: Any, folder: Folder) -> None:
    del folder
    client.create_dataset("pixels", (4, 2**30), "f4", chunks=(1, 2**16), compression="gzip")


COPIES = [
    Case(
        "HDF5",
        stored(lambda client, _: client.create_dataset("pixels", data=np.ones((4, 2)))),
        (4, 2),
    ),
    Case(
        "a link to another HDF5 file",
        stored(link_outside),
        r"pixels is a link to another file; accepted",
    ),
    Case(
        "an array in another file",
        stored(store_outside),
        r"pixels is kept in other files; accepted",
    ),
    Case(
        "an array of 16 GiB in 5 kB",
        stored(claim),
        r"pixels claims 16\.0 GiB, which cannot fit in the file",
    ),
]
PATHS = [
    Case("~", at_home("~/d.csv"), 3),
    Case(
        "nobody's home",
        at_home("~nobody-here/d.csv"),
        r"~nobody-here is no home folder \(no such user\); accepted",
    ),
    Case("no path", lambda folder: sources.read(3), r"^file=int: accepted: a path"),
    Case(
        "nothing there",
        lambda folder: sources.read(folder / "x.csv"),
        r"cannot be read \(No such file",
    ),
    Case(
        "no text",
        lambda folder: read_text(str(folder)),
        r"cannot be read \(Is a directory|Not a regular file",
    ),
]
CASES = [*LAYOUTS, *IMAGES, *FILES, *TEXTS, *PARTITIONS, *COPIES, *PATHS]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", cases_of(CASES))
def test_what_users_have_is_read_or_refused_in_a_line(name, tmp_path, monkeypatch):
    make, right = next((case.make, case.right) for case in CASES if case.name == name)
    monkeypatch.setenv("HOME", os.environ["HOME"])  # restored afterwards
    if not isinstance(right, str):
        found = make(tmp_path)
        assert right is None or found == right
        return
    with pytest.raises(pfl.ArgumentError, match=right) as error:
        make(tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
