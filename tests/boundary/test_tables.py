"""Tables that users have, written by pandas, pyarrow and by hand: what is read, or one line of what is wrong."""

import bz2
import contextlib
import datetime
import decimal
import gzip
import io
import lzma
import re
import sqlite3
import warnings
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from samples import check, params, sample

import pfljax as pfl
from pfljax.contract import reading
from pfljax.data import sources

pd = pytest.importorskip("pandas")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
N = 11
A = np.arange(N) / 4
LABEL = np.arange(N) % 2
WHO = np.array(["ann", "bob"])[np.arange(N) // 6]
FRAME = pd.DataFrame({"a": A, "label": LABEL, "who": WHO})
CSV = FRAME.to_csv(index=False)
LINES = CSV.splitlines()
HOLES = np.where(np.arange(N) == 3, np.nan, A)


class Right(NamedTuple):
    """What a source must hold, as worked out by hand or with NumPy; None: it is not compared."""

    x: Any = A[:, None]
    y: Any = LABEL
    client_names: Any = ("ann", "bob")
    class_names: Any = None


class Case(NamedTuple):
    """A file that a user has.

    Attributes:
        kind: What sort of file it is.
        name: Its name.
        content: Its content, or what writes it to a path.
        right: What is right, or a regular expression of the error.
        told: A regular expression of the warning; "" if there is none.
        options: Arguments of the reader.
    """

    kind: str
    name: str
    content: bytes | str | Callable[[Any], Any]
    right: Right | str
    told: str = ""
    options: dict[str, Any] = {}


def csv(content, right, told="", name="t.csv", **options):
    return Case("csv", name, content, right, told, options)


def parquet(columns, right, told="", **options):
    """A Parquet file of the usual columns and others."""

    def write(path):
        made = {"a": A, "label": LABEL, "who": WHO} | (columns() if callable(columns) else columns)
        pq.write_table(pa.table(made), path)

    return Case("parquet", "t.parquet", write, right, told, options)


def of_frame(frame, right, told="", **options):
    """A CSV file as pandas writes it."""
    return Case("pandas", "t.csv", lambda path: frame.to_csv(path), right, told, options)


def packed(compress):
    return compress(CSV.encode())


def zipped():
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("t.csv", CSV)
    return stream.getvalue()


def semicolons(text):
    return text.replace(",", ";").replace(".", ",")


def twice(path):
    FRAME.to_csv(path)
    pd.read_csv(path).to_csv(path)


INDEX = "features: .* is an index, such as row numbers, and is left out; name it in features"
LEFT = "features: f in t.parquet holds no numbers and is left out"
SPACED = "\n".join(", ".join(line.split(",")) for line in LINES)
KINDS = np.array(["x", "y", "x", "z", "y", "x", "x", "y", "z", "x", "y"])
ONE_HOT = np.stack([A, KINDS == "x", KINDS == "y", KINDS == "z"], axis=1)
CASES = {
    "plain": csv(CSV, Right()),
    "a byte order mark": csv("\ufeff" + CSV, Right()),
    "lines of Windows": csv(CSV.replace("\n", "\r\n"), Right()),
    "lines of old Macs": csv(CSV.replace("\n", "\r"), Right()),
    "blank lines": csv("\n\n" + CSV.replace("\n", "\n\n"), Right()),
    "no last line end": csv(CSV.rstrip(), Right()),
    "quoted names and texts": csv(
        "\n".join(",".join(f'"{cell}"' for cell in line.split(",")) for line in LINES), Right()
    ),
    "a name with a line end": csv(CSV.replace("a,", '"a\nb",', 1), Right()),
    "spaces after commas": csv(SPACED, Right()),
    "spaces after some commas": csv("\n".join([*LINES[:4], *SPACED.splitlines()[4:]]), Right()),
    "spaces around words": csv(CSV.replace("bob", "bob ").replace("ann", " ann\t"), Right()),
    "a name with spaces": csv(SPACED, Right(), client=" who ", label=" label"),
    "spaces before quotes": csv(
        SPACED.replace("bob", '"bob"'), "file=.* a space before a quote in column who, row 6"
    ),
    "semicolons": csv(semicolons(CSV), Right(), separator=";", decimal=","),
    "semicolons without saying so": csv(
        semicolons(CSV), ".*t.csv has no such column; its columns .* separator=';'"
    ),
    "tabs": csv(CSV.replace(",", "\t"), Right(), name="t.tsv"),
    "tabs in a csv": csv(CSV.replace(",", "\t"), Right(), separator="tab"),
    "commas twice": csv(CSV, "decimal=,: is the separator, too", decimal=","),
    "two separators": csv(CSV, "separator=;;: accepted: one character, or tab", separator=";;"),
    "latin-1": csv(
        CSV.replace("bob", "bö").encode("latin-1"),
        Right(client_names=("ann", "bö")),
        encoding="latin-1",
    ),
    "latin-1 without saying so": csv(
        CSV.replace("bob", "bö").encode("latin-1"), "file=.* is not utf-8 text"
    ),
    "a header in latin-1": csv(
        CSV.replace("a,", "ä,", 1).encode("latin-1"), "file=.* is not utf-8 text; encoding"
    ),
    "utf-16": csv(CSV.encode("utf-16"), Right(), encoding="utf-16"),
    "an unknown encoding": csv(CSV, "encoding=utf-81: is unknown", encoding="utf-81"),
    "gzip": csv(packed(gzip.compress), Right(), name="t.csv.gz"),
    "bzip2": csv(packed(bz2.compress), Right(), name="t.csv.bz2"),
    "xz": csv(packed(lzma.compress), Right(), name="t.csv.xz"),
    "gzip that is torn": csv(
        packed(gzip.compress)[:-9], "file=.* is not a CSV or Parquet file", name="t.csv.gz"
    ),
    "zip": csv(zipped(), "file=.*: is compressed with zip; accepted: gzip, bzip2 and xz"),
    "an empty label": csv(
        CSV.replace("0.5,0,", "0.5,,"), r"file=.* has no value in column label, row 2"
    ),
    "an empty client": csv(
        CSV.replace("0.5,0,ann", "0.5,0,"), "file=.* has no value in column who, row 2"
    ),
    "a client of spaces": csv(
        CSV.replace("0.5,0,ann", "0.5,0,  "), "file=.* has no value in column who, row 2"
    ),
    "NA as a client": csv(
        CSV.replace("0.5,0,ann", "0.5,0,NA"), "file=.* has no value in column who, row 2"
    ),
    "an empty number": csv(CSV.replace("0.5,", ",", 1), "file=.* has no value in column a, row 2"),
    "two empty numbers": csv(
        CSV.replace("0.5,", ",").replace("1.5,", ","), "file=.* column a, row 2 .*, and 1 more"
    ),
    "infinity": csv(
        CSV.replace("0.5,", "inf,", 1), "file=.* has an infinite value in column a, row 2"
    ),
    "question marks": csv(
        SPACED.replace("0.5,", "?,", 1), "file=.* has no value in column a, row 2", missing="?"
    ),
    "NA as a name": csv(CSV.replace("bob", "NA"), Right(client_names=("NA", "ann")), missing="?"),
    "ids with zeros": csv(
        CSV.replace("bob", "007").replace("ann", "7"), Right(client_names=("007", "7"))
    ),
    "ids of 20 digits": csv(
        CSV.replace("bob", "12345678901234567890").replace("ann", "12345678901234567891"),
        Right(client_names=("12345678901234567890", "12345678901234567891")),
    ),
    "ids that are numbers": csv(
        CSV.replace("bob", "10").replace("ann", "9"), Right(client_names=(9, 10))
    ),
    "labels with zeros": csv(
        "\n".join(
            [
                "a,label,who",
                *(f"{a},{'01' if y else '1'},{w}" for a, y, w in zip(A, LABEL, WHO, strict=True)),
            ]
        ),
        Right(y=1 - LABEL, class_names=("01", "1")),
    ),
    "two columns of a name": csv("a,a,label,who\n1,2,0,x\n", "file=.*: has two columns of a name"),
    "two columns of a name but for a space": csv(
        "a, a,label,who\n1,2,0,x\n", "file=.*: has two columns of a name"
    ),
    "a row that is short": csv(
        CSV.replace("0.5,0,ann", "0.5,0"), "file=.* is not a CSV .*Expected 3 columns, got 2"
    ),
    "a row that is long": csv(
        CSV.replace("0.5,0,ann", "0.5,0,ann,"), "file=.* is not a CSV .*Expected 3 columns, got 4"
    ),
    "nothing": csv("", "file=.* is not a CSV or Parquet file"),
    "a header": csv("a,label,who\n", "file=.*: has no rows"),
    "one row": csv("a,label,who\n1.5,0,ann\n", Right([[1.5]], [0], ("ann",))),
    "categories": Case(
        "categories",
        "t.csv",
        lambda path: FRAME.assign(k=KINDS).to_csv(path, index=False),
        Right(ONE_HOT),
        options={"categorical": "k"},
    ),
    "categories that are numbers": Case(
        "categories",
        "t.csv",
        lambda path: FRAME.assign(k=np.searchsorted(["x", "y", "z"], KINDS) * 10).to_csv(
            path, index=False
        ),
        Right(ONE_HOT),
        options={"categorical": "k"},
    ),
    "categories alone": Case(
        "categories",
        "t.csv",
        lambda path: FRAME.assign(k=KINDS).to_csv(path, index=False),
        Right(ONE_HOT[:, [1, 2, 3, 0]]),
        options={"features": ["k", "a"], "categorical": ["k"]},
    ),
    "a missing category": Case(
        "categories",
        "t.csv",
        lambda path: FRAME.assign(k=np.where(KINDS == "z", "", KINDS)).to_csv(path, index=False),
        "file=.* has no value in column k, row 3",
        options={"categorical": "k"},
    ),
    "a client as a category": csv(
        CSV, "categorical: who is named as label, client or test, too", categorical="who"
    ),
    "text that is no category": csv(
        CSV.replace("a,label", "a,f,label").replace(".", ".x,"), ".*", features="a,f"
    ),
    "the index of pandas": of_frame(FRAME, Right(), INDEX),
    "an index saved twice": Case("pandas", "t.csv", twice, Right(), INDEX),
    "a shuffled index": of_frame(FRAME.set_index(np.arange(N)[::-1]), Right(), INDEX),
    "an index that is named": of_frame(FRAME.rename_axis("index"), Right(), INDEX),
    "an index that is asked for": of_frame(
        FRAME.rename_axis("index"), Right(np.stack([A, np.arange(N)], 1)), features="a,index"
    ),
    "an index of names": of_frame(
        FRAME.set_index(np.array(list("abcdefghijk"))),
        Right(),
        "features: .* holds no numbers and is left out",
    ),
    "an index in Parquet": Case(
        "pandas",
        "t.parquet",
        lambda path: FRAME.sample(frac=1, random_state=0).to_parquet(path),
        Right(None, None),
        INDEX,
    ),
    "a named index in Parquet": Case(
        "pandas",
        "t.parquet",
        lambda path: FRAME.assign(n=np.arange(N) * 3 % 13).set_index("n").to_parquet(path),
        Right(),
        INDEX,
    ),
    "decimals": parquet(
        {"f": [decimal.Decimal(k) / 4 for k in range(N)]}, Right(np.stack([A, A], 1))
    ),
    "half precision": parquet({"f": A.astype(np.float16)}, Right(np.stack([A, A], 1))),
    "unsigned integers": parquet({"f": LABEL.astype(np.uint64)}, Right(np.stack([A, LABEL], 1))),
    "booleans": parquet({"f": LABEL == 1}, Right(np.stack([A, LABEL], 1))),
    "a dictionary of numbers": parquet(
        lambda: {"f": pa.array(LABEL).dictionary_encode()}, Right(np.stack([A, LABEL], 1))
    ),
    "a dictionary of names": parquet(lambda: {"who": pa.array(WHO).dictionary_encode()}, Right()),
    "large strings": parquet(lambda: {"who": pa.array(WHO.tolist(), pa.large_string())}, Right()),
    "names with spaces in Parquet": parquet(lambda: {" b ": A}, Right(A[:, None]), features=" b "),
    "whole decimals as labels": parquet(
        {"label": [decimal.Decimal(int(k)) for k in LABEL]}, Right()
    ),
    "lists": parquet({"f": [[1.0, 2.0]] * N}, Right(), LEFT),
    "dates": parquet({"f": [datetime.date(2020, 1, 1)] * N}, Right(), LEFT),
    "structs": parquet({"f": [{"q": 1}] * N}, Right(), LEFT),
    "bytes": parquet({"f": [b"ab"] * N}, Right(), LEFT),
    "dates as clients": parquet(
        {"who": [datetime.date(2020, 1, 1)] * N}, "client=who: holds date32.*; accepted: a column"
    ),
    "lists as labels": parquet(
        {"label": [[1, 2]] * N}, "label=label: holds list<.*; accepted: a column of numbers or"
    ),
    "a hole in Parquet": parquet(
        {"a": [1.0, None, *[2.0] * (N - 2)]}, "file=.* has no value in column a, row 1"
    ),
    "NaN in Parquet": parquet(
        lambda: {"a": pa.array(HOLES)}, "file=.* has no value in column a, row 3"
    ),
    "a hole among integers": parquet(
        {"label": [0, None, *[1] * (N - 2)]}, "file=.* has no value in column label, row 1"
    ),
    "options of CSV in Parquet": parquet(
        {}, "separator=;: accepted only for CSV files", separator=";"
    ),
    "a label as a feature": csv(
        CSV, "features: label is named as label, client or test, too", features="a,label"
    ),
    "a client as a feature": csv(
        CSV, "features: who is named as label, client or test, too", features=["who", "a"]
    ),
    "an index called row": of_frame(FRAME.rename_axis("row"), Right(), INDEX),
    "an index called id": of_frame(
        FRAME.rename_axis("id").set_index(np.arange(7, 7 + N)), Right(), INDEX
    ),
    "a quote that is not closed": csv(
        "\n".join([*LINES[:4], LINES[4].replace("ann", '"ann'), *LINES[5:]]),
        r"file=.*: has a quote in column who, row 3 \(counted from 0\), that is not closed",
    ),
    "inches": csv(
        CSV.replace("bob", '5" pipe').replace("ann", '7" pipe').rstrip() + "\n2.5,0,8 pipe\n",
        Right(np.append(A, 2.5)[:, None], np.append(LABEL, 0), ('5" pipe', '7" pipe', "8 pipe")),
    ),
    "points between thousands": csv(
        semicolons("a,label,who\n") + "".join(f"{k},5;1.{k:03d};ann\n" for k in range(N)),
        "file=.* has thousands separators in column label, such as 1.000; accepted: numbers without",
        separator=";",
        decimal=",",
    ),
    "points between thousands, and commas": csv(
        "a;label;who\n" + "".join(f"{k},5;1.{k:03d},50;ann\n" for k in range(N)),
        "file=.* has thousands separators in column label, such as 1.000,50; accepted: numbers without",
        separator=";",
        decimal=",",
    ),
    "commas between thousands": csv(
        "a,label,who\n" + "".join(f'{k},"1,{k:03d}.5",ann\n' for k in range(N)),
        "file=.* has thousands separators in column label, such as 1,000.5; accepted: numbers without",
    ),
    "ids with points and decimal commas": csv(
        semicolons(CSV).replace("ann", "1.000").replace("bob", "1.0"),
        Right(client_names=("1.0", "1.000")),
        separator=";",
        decimal=",",
    ),
    "ids with signs": csv(
        CSV.replace("bob", "+7").replace("ann", "7"), Right(client_names=("+7", "7"))
    ),
    "categories as they are written": Case(
        "categories",
        "t.csv",
        lambda path: FRAME.assign(
            k=np.array(["1.1", "1.10", "2"])[np.searchsorted(["x", "y", "z"], KINDS)]
        ).to_csv(path, index=False),
        Right(ONE_HOT),
        options={"categorical": "k"},
    ),
    "None as a category": Case(
        "categories",
        "t.csv",
        lambda path: FRAME.assign(k=np.where(KINDS == "z", "None", KINDS)).to_csv(
            path, index=False
        ),
        "file=.* has no value in column k, row 3",
        options={"categorical": "k"},
    ),
    "a missing category in Parquet": parquet(
        lambda: {"k": pa.array(HOLES)}, "file=.* has no value in column k, row 3", categorical="k"
    ),
    "an empty category in Parquet": parquet(
        {"k": np.where(KINDS == "x", "", KINDS)},
        Right(ONE_HOT),
        "categorical: has '' in 5 rows, as a category of its own",
        categorical="k",
    ),
    "spaces in Parquet": parquet({"who": np.where(WHO == "bob", " bob", "ann ")}, Right()),
    "many categories": csv(
        "a,label,who\n" + "".join(f"id{k},{k % 2},ann\n" for k in range(10_001)),
        "categorical: a has 10,001 categories, each of which would be a column; accepted: up to 10,000",
        categorical="a",
    ),
    "bytes that are numbers": parquet(
        {"a": np.arange(N, dtype=np.uint8) * 20}, Right(np.arange(N)[:, None] * 20.0)
    ),
}


def kind_of(case):
    return CASES[case[0]].kind


NAMES = [(name,) for name in CASES]
SOME = sample(NAMES, kind_of)


def test_the_sample_has_every_kind():
    check(NAMES, SOME, kind_of)


def written(case, folder):
    path = folder / case.name
    if callable(case.content):
        case.content(path)
    else:
        path.write_bytes(case.content if isinstance(case.content, bytes) else case.content.encode())
    return path


@pytest.mark.parametrize("name", params(NAMES, SOME, SOME))
def test_a_table_is_what_its_writer_meant_or_one_line_tells(name, tmp_path):
    case = CASES[name]
    path = written(case, tmp_path)
    options = {"client": "who", "standardize": False} | case.options
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if isinstance(case.right, str):
            with pytest.raises(pfl.ArgumentError, match=f"^{case.right}") as caught:
                sources.read(path, **options)
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
            return
        source = sources.read(path, **options)
    right = case.right
    if right.x is not None:
        np.testing.assert_allclose(source.x, right.x, rtol=1e-6)
        np.testing.assert_array_equal(source.y, right.y)
    assert tuple(source.client_names) == tuple(right.client_names)
    assert right.class_names is None or source.class_names == right.class_names
    assert source.x.shape[1] == (1 if right.x is None else np.shape(right.x)[1])
    texts = [str(each.message) for each in told]
    assert [text for text in texts if re.match(case.told, text)] if case.told else not texts


def hospitals():
    """A table with holes and categories, of which w is in examples for testing alone."""
    rng = np.random.default_rng(0)
    n = 60
    ward = np.array(["x", "y", "z"])[rng.integers(0, 3, n)]
    is_test = np.arange(n) % 4 == 0
    ward[is_test & (np.arange(n) < 20)] = "w"
    age = np.where(rng.random(n) < 0.3, np.nan, rng.normal(50, 20, n))
    age[is_test] = 1000.0
    return pd.DataFrame(
        {
            "age": age,
            "ward": ward,
            "label": np.arange(n) % 2,
            "who": np.arange(n) // 20,
            "part": is_test,
        }
    )


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("standardize", [False, True])
def test_holes_and_categories_are_those_of_the_training_examples(kind, standardize, tmp_path):
    frame = hospitals()
    path = tmp_path / f"h.{kind}"
    getattr(frame, f"to_{kind}")(path, index=False)
    options = {"client": "who", "test": "part", "categorical": "ward"}
    with pytest.raises(pfl.ArgumentError, match="has no value in column age, row"):
        pfl.data.read(path, standardize=standardize, **options)
    clients = pfl.data.read(path, standardize=standardize, fill="mean", **options)
    assert clients.feature_names == ("age", "ward=x", "ward=y", "ward=z")
    train = frame[~frame["part"]]
    filled = train["age"].fillna(train["age"].mean()).to_numpy()
    expected = (filled - filled.mean()) / filled.std() if standardize else filled
    scaled = clients.standardized
    found = np.concatenate([scaled.train.x[k][:size] for k, size in enumerate(clients.train.size)])
    np.testing.assert_allclose(np.sort(found[:, 0]), np.sort(expected), rtol=1e-5, atol=1e-5)
    counts = [int((train["ward"] == ward).sum()) for ward in "xyz"]
    np.testing.assert_array_equal(found[:, 1:].sum(axis=0), counts)
    tests = np.concatenate([clients.test.x[k][:size] for k, size in enumerate(clients.test.size)])
    assert (tests[:, 1:].sum(axis=1) == 0).sum() == 5  # no training example is in ward w


def test_a_column_without_a_number_to_train_on_is_refused(tmp_path):
    frame = hospitals()
    frame.loc[~frame["part"], "age"] = np.nan
    frame.to_csv(tmp_path / "h.csv", index=False)
    options = {"client": "who", "test": "part", "fill": "mean"}
    text = r"^fill: age has no number in any training example; accepted: x"
    with (
        pytest.raises(pfl.ArgumentError, match=text),
        pytest.warns(UserWarning, match=r"ward .* is left out"),
    ):
        pfl.data.read(tmp_path / "h.csv", **options)


def test_holes_are_filled_for_drawn_tests_too(tmp_path):
    """A column of which every training number is 1: the tests' 1000 do not count."""
    frame = hospitals().drop(columns="part")
    frame.to_csv(tmp_path / "h.csv", index=False)
    clients = pfl.data.read(
        tmp_path / "h.csv", client="who", categorical="ward", fill="mean", standardize=False
    )
    train = np.concatenate(
        [clients.train.x[k][:size, 0] for k, size in enumerate(clients.train.size)]
    )
    tests = np.concatenate(
        [clients.test.x[k][:size, 0] for k, size in enumerate(clients.test.size)]
    )
    known = frame["age"].dropna().to_numpy(np.float32)
    holes = ~np.isin(train, known)
    assert holes.sum() + (~np.isin(tests, known)).sum() == frame["age"].isna().sum()
    np.testing.assert_allclose(train[holes], train[~holes].mean(), rtol=1e-5)
    np.testing.assert_allclose(tests[~np.isin(tests, known)], train[~holes].mean(), rtol=1e-5)


def test_a_small_file_that_is_large_once_decoded_is_refused_before(tmp_path, monkeypatch):
    """Repeated values take no space in Parquet; nor do repeated bytes in gzip."""
    pq.write_table(
        pa.table({"a": np.zeros(10**6), "label": np.zeros(10**6, np.int64)}),
        tmp_path / "small.parquet",
    )
    (tmp_path / "small.csv.gz").write_bytes(gzip.compress(b"a,label\n" + b"0.00000,0\n" * 10**6))
    assert max(path.stat().st_size for path in tmp_path.iterdir()) < 100_000
    monkeypatch.setattr(reading, "free_memory", lambda: 2**22)
    monkeypatch.setattr("pfljax.data.sources.tables.free_memory", lambda: 2**22)
    for name in ("small.parquet", "small.csv.gz"):
        with pytest.raises(pfl.ArgumentError, match=r"but only 4.0 MiB (of memory )?is free"):
            sources.read(tmp_path / name)


def test_a_long_text_that_repeats_is_refused_before_it_is_copied(tmp_path, monkeypatch):
    pq.write_table(
        pa.table({"a": np.zeros(2000), "label": ["x" * 10**4] * 2000}), tmp_path / "t.parquet"
    )
    monkeypatch.setattr(reading, "free_memory", lambda: 2**24)
    with pytest.raises(
        pfl.ArgumentError, match=r"needs 76.3 MiB of memory, but only 16.0 MiB is free"
    ):
        sources.read(tmp_path / "t.parquet")


ENDLESS = "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "view",
    [
        f"examples AS {ENDLESS} SELECT 'train' AS split_name, n AS client_id, x'00' AS serialized_example_proto FROM t",
        f"federated_data AS {ENDLESS} SELECT n AS client_id, x'00' AS data FROM t",
    ],
)
def test_an_endless_view_ends_in_a_line(view, tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "t.sqlite")) as base, base:
        base.execute(f"CREATE VIEW {view}")
    with pytest.raises(pfl.ArgumentError, match="takes more steps than a file of its size needs"):
        pfl.data.read(tmp_path / "t.sqlite")


@pytest.mark.slow
def test_many_names_are_cut_in_messages(tmp_path):
    """An npz with thousands of arrays, and a table with thousands of columns."""
    np.savez(tmp_path / "t.npz", **{f"array_{number}": np.zeros(1) for number in range(3000)})
    with pytest.raises(pfl.ArgumentError, match=r"lacks x and y.*array_19, ... 2,980 more$"):
        sources.read(tmp_path / "t.npz")
    names = [f"c{number}" for number in range(3000)]
    (tmp_path / "t.csv").write_text("\n".join([",".join(names), ",".join(["x"] * 3000)]))
    with pytest.raises(pfl.ArgumentError, match=r"accepted: c0, c1.*, ... 2,800 more$"):
        sources.read(tmp_path / "t.csv", label="zzz")
    with pytest.raises(
        pfl.ArgumentError,
        match=r"features: c1, c2, .* 2,979 more in t.csv; accepted: columns of numbers",
    ):
        sources.read(tmp_path / "t.csv", label="c0")
