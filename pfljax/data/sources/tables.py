"""Tables with an example per row: CSV and Parquet files.

pyarrow reads both; pandas would need it for Parquet, too, and makes a Python object of each text. Columns that may hold
ids or categories are read as text, in which 007 is not 7 and 1.10 is not 1.1, and get their type afterwards.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import dataclasses
import gzip
import io
import json
import lzma
import os
import pathlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

import numpy as np

from pfljax.contract import optional
from pfljax.contract.errors import ArgumentError, few, warn
from pfljax.contract.host import free_memory, readable
from pfljax.contract.reading import check_memory, opened
from pfljax.data.sources.arrays import TaskName, warn_of_missing
from pfljax.data.sources.characters import tokens
from pfljax.data.sources.files import SPLITS, Names, damaged, names_in, source_from_file
from pfljax.data.sources.source import Features, Fraction, Source
from pfljax.settings.fields import MOST, Seed, checked, hyperparameter, nearest

TABLE = "a CSV or Parquet file with an example per row and named columns"
ARRAY_NAMES = {"x": "features", "y": "label", "is_test": "test"}  # names in messages
SEPARATORS = {"tab": "\t", "\\t": "\t"}  # words for those that are hard to type
COMPRESSED = {  # first bytes -> what decompresses it
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}
UNREADABLE = {b"PK\3\4": "zip", b"\x28\xb5\x2f\xfd": "zstd"}
BLOCK_BYTES = 2**24  # that are decompressed at a time
# Names of pandas for an index in CSV and Arrow, and names of an index that people write.
INDEX = re.compile(r"|Unnamed: \d+(\.\d+)*|__index_level_\d+__")
ROW_NUMBERS = (
    "index", "level_0", "rownames", "row_number", "row", "rowid", "row_id", "id", "idx", "nr",
    "no",
)  # fmt: skip
NUMERALS = r"^[+-]?[0-9]+$"
LEADING_ZERO = r"^[+-]?0[0-9]+$"
SIGNED = r"^(\+.*|-0)$"  # whole numbers that others stand for, too
GROUPED = r"^[+-]?[0-9]{1,3}([., ][0-9]{3})+([.,][0-9]+)?$"
MOST_CATEGORIES = 10_000
# Texts that pandas takes for missing values, besides pyarrow's.
MISSING = ("None", "<NA>")

Label = Annotated[Names, hyperparameter(empty=False)]
FeatureColumns = Annotated[Names, hyperparameter(empty=False)]
Categorical = Annotated[Names, hyperparameter(empty=False)]
Fill = Literal["none", "mean"]


class Columns(NamedTuple):
    """Names of columns, and what fills missing numbers; see `table`."""

    label: Names
    client: str = ""
    features: Names = ""
    categorical: Names = ""
    text: str = ""
    test: str = ""
    fill: str = "none"
    time: str = ""

    def stripped(self) -> Columns:
        """The same names without spaces around them."""
        return self._replace(
            client=self.client.strip(),
            text=self.text.strip(),
            test=self.test.strip(),
            time=self.time.strip(),
        )

    def named(self) -> dict[str, str]:
        """The columns that are named, with an argument that names each."""
        named = dict.fromkeys(names_in(self.features), "features")
        named |= dict.fromkeys(names_in(self.categorical), "categorical")
        named |= dict.fromkeys(names_in(self.label), "label")
        single = {self.client: "client", self.test: "test", self.text: "text", self.time: "time"}
        return named | {name: argument for name, argument in single.items() if name}


class TableArrays(NamedTuple):
    """What a table holds.

    Attributes:
        arrays: The arrays of `make_source`.
        features: The columns of its x; None: x is no columns.
    """

    arrays: dict[str, np.ndarray]
    features: Features | None = None


class Dialect(NamedTuple):
    """How a CSV file is written; see `table`."""

    separator: str = ""
    encoding: str = "utf-8"
    decimal: str = "."
    missing: Names = ""


@checked()
def table(
    file: Annotated[str | pathlib.Path, hyperparameter(accepted=TABLE, help=TABLE)],
    *,
    label: Label = "label",
    client: str = "",
    features: FeatureColumns = "",
    categorical: Categorical = "",
    text: str = "",
    test: str = "",
    time: str = "",
    fill: Fill = "none",
    separator: str = "",
    encoding: str = "utf-8",
    decimal: str = ".",
    missing: Annotated[Names, hyperparameter(empty=False)] = "",
    seed: Seed = 0,
    fraction: Fraction = 1.0,
    standardize: bool = True,
    task: TaskName = "auto",
) -> Source:
    """Reads a CSV file (with a header) or a Parquet file. Its first bytes say which it is.

    A CSV file may be compressed with gzip, bzip2 or xz. Spaces around names, numbers and texts are ignored. A
    column of row numbers, such as the index that pandas writes, is no feature unless `features` names it. A missing
    value is refused, in any column that is read, unless it is a number and `fill` is set.

    The other arguments are those of `npz`.

    Args:
        file: Path of the file.
        label: Column with the labels: text (classes in sorted order), whole numbers (classes 0..C-1) or other numbers
            (regression); or several columns of numbers (to predict them all) or of booleans (multilabel).
        client: Column that names each example's client; empty: none does.
        features: Columns of numbers to learn from; empty: all but those named otherwise.
        categorical: Columns of categories to learn from, too. Each category that a training example has becomes a
            column of 0 and 1, which is not standardized.
        text: Column of text to learn from instead: its characters are tokens from 1 in sorted order, uint8, and 0 pads.
        test: Column that marks the official test examples, with True or test; empty: none does.
        time: Column that says when each example was taken, in numbers, dates or texts such as 2024-05-31, for
            `partitions.Time` and `Splits.by_time`; empty: the order of the rows says so.
        fill: What replaces missing numbers of a feature: none, which refuses them, or the mean of the training
            examples.
        separator: What separates the columns of a CSV file, such as ";" or "tab"; empty: a comma, or a tab if the name
            of the file has .tsv.
        encoding: Encoding of a CSV file, such as latin-1.
        decimal: Decimal point of a CSV file: a point or a comma.
        missing: Texts that stand for missing values in a CSV file, besides an empty cell; empty: those that pandas
            writes or reads, such as NA, NaN and null.

    Raises:
        ArgumentError: if the file cannot be read, or a column is missing or not accepted.

    Examples:
        >>> import pandas as pd
        >>> from pfljax.data import sources
        >>> columns = {"heat": [1.5, 2.5], "city": ["Oslo", "Rome"], "label": ["cold", "warm"]}
        >>> pd.DataFrame(columns).to_csv("weather.csv", index=False)
        >>> source = sources.table("weather.csv", categorical="city")
        >>> source.features.names, source.class_names
        (('heat', 'city=Oslo', 'city=Rome'), ('cold', 'warm'))
    """
    file = str(file)
    columns = Columns(label, client, features, categorical, text, test, fill, time).stripped()
    dialect = Dialect(separator, encoding, decimal, missing)
    read = table_arrays(_read(file, columns, dialect), file, columns)
    source = source_from_file(
        read.arrays,
        file,
        seed=seed,
        fraction=fraction,
        array_names=ARRAY_NAMES,
        task=task,
        images=False,  # numbers, also if they fit in uint8
        standardize=standardize and not text,
        fill=fill == "mean",
        features=read.features,
    )
    return dataclasses.replace(source, tokens=bool(text))


def table_arrays(
    table: Any, file: str, columns: Columns, x: np.ndarray | None = None
) -> TableArrays:
    """The arrays of `make_source` from a table.

    Args:
        table: A table of pyarrow.
        file: Path of its file, for messages.
        columns: What its columns are.
        x: (n, *features) examples; None: those in its columns.
    """
    names = [name.strip() for name in table.column_names]
    positions = {name: position for position, name in enumerate(names)}
    columns = columns.stripped()
    if len(positions) < len(names):
        raise ArgumentError("file", "has two columns of a name", file)
    if not len(table):
        raise ArgumentError("file", "has no rows", file)

    def column(argument: str, name: str) -> Any:
        check_column(argument, name, positions, file)
        values = table.column(positions[name])
        _check_type(argument, name, values.type)
        return values

    labels = [_values(column("label", name), name, file) for name in names_in(columns.label)]
    arrays = {"y": join_targets(labels, columns.label)}
    if columns.client:
        arrays["client"] = _values(column("client", columns.client), columns.client, file)
    if columns.test:
        marks = _values(column("test", columns.test), columns.test, file)
        arrays["is_test"] = _marks(marks, columns.test)
    if columns.time:
        arrays["time"] = _values(column("time", columns.time), columns.time, file)
    if x is not None:
        return TableArrays(arrays | {"x": x})
    if not columns.text:
        x, features = _features(table, positions, file, columns)
        return TableArrays(arrays | {"x": x}, features)

    # Learn from a column of text.
    for argument in ("features", "categorical"):
        value = getattr(columns, argument)
        if value:
            raise ArgumentError(argument, "not accepted with a text column", value)
    texts = column("text", columns.text)
    if not _is_text(texts.type):
        raise ArgumentError("text", "accepted: a column of text", columns.text)
    _check_complete(texts, columns.text, file)
    return TableArrays(arrays | {"x": tokens(texts.to_pylist(), file)})


def check_column(argument: str, name: str, names: Collection[str], file: str) -> None:
    """Raises `ArgumentError` unless a column that an argument names is among the columns of a file."""
    if name not in names:
        text = f"{pathlib.Path(file).name} has no such column; {nearest(name, names)}"
        raise ArgumentError(argument, text, name)


def _features(
    table: Any, positions: Mapping[str, int], file: str, columns: Columns
) -> tuple[np.ndarray, Features]:
    """The examples (n, F) in the columns of a table that are features, and what these are."""
    wanted = names_in(columns.features)
    categorical = dict.fromkeys(names_in(columns.categorical))
    single = (columns.client, columns.test, columns.time)
    others = {*names_in(columns.label), *filter(None, single)}
    named = [("features", name) for name in wanted]
    named += [("categorical", name) for name in categorical]
    for argument, name in named:
        check_column(argument, name, positions, file)
    for argument, name in named:
        if name in others:
            raise ArgumentError(argument, f"{name} is named as label, client, test or time, too")

    # Without names, all other columns are candidates.
    if wanted:
        candidates = [*wanted, *(name for name in categorical if name not in wanted)]
    else:
        candidates = [name for name in positions if name not in others]
        candidates = _without_row_numbers(table, positions, file, candidates, categorical)
    numeric = set()
    left_out = []
    for name in candidates:
        if name in categorical:
            continue
        if _is_number(table.column(positions[name]).type):
            numeric.add(name)
        else:
            left_out.append(name)
    if len(left_out) == len(candidates) or (wanted and left_out):
        text = f"{few(left_out) or 'nothing'} in {pathlib.Path(file).name}"
        accepted = "accepted: columns of numbers; name categories in categorical, and a column of texts in text"
        raise ArgumentError("features", f"{text}; {accepted}")
    if left_out:
        text = f"{few(left_out)} in {pathlib.Path(file).name} holds no numbers and is left out"
        warn("features", f"{text}; name it in categorical to learn from its categories")

    # A column of categories becomes a column of 0 and 1 for each.
    blocks = []
    labels = []
    one_hot = []
    for name in candidates:
        column = table.column(positions[name])
        if name in numeric:
            blocks.append(_numbers(column, name, file, fill=columns.fill == "mean"))
            labels.append(name)
            one_hot.append(False)
        elif name in categorical:
            categories, codes = _categories(column, name, file)
            check_memory(8 * len(table) * (len(blocks) + len(categories)), file)
            blocks += [codes == code for code in range(len(categories))]
            labels += [f"{name}={category}" for category in categories]
            one_hot += [True] * len(categories)
    is_pixels = all(values.dtype == np.uint8 for values in blocks)
    x = np.stack(blocks, axis=1).astype(np.uint8 if is_pixels else np.float64, copy=False)
    return x, Features(tuple(labels), np.array(one_hot))


def _without_row_numbers(
    table: Any,
    positions: Mapping[str, int],
    file: str,
    names: Sequence[str],
    categorical: Collection[str],
) -> list[str]:
    """The names of columns but those of row numbers, of which it warns."""
    index_names = _index_names(table.schema)
    others = []
    numbered = []
    for name in names:
        column = table.column(positions[name])
        is_index = bool(INDEX.fullmatch(name)) or name in index_names
        is_index = is_index or (name.lower() in ROW_NUMBERS and _counts_rows(column))
        if is_index and _is_number(column.type) and name not in categorical:
            numbered.append(name)
        else:
            others.append(name)
    if not numbered or not others:
        return list(names)
    listed = few([repr(name) for name in numbered])
    text = (
        f"{listed} in {pathlib.Path(file).name} is an index, such as row numbers, and is left out"
    )
    warn("features", f"{text}; name it in features to learn from it")
    return others


def _index_names(schema: Any) -> set[str]:
    """The columns that pandas' metadata call an index."""
    try:
        indices = json.loads(schema.metadata[b"pandas"])["index_columns"]
        return {name for name in indices if isinstance(name, str)}
    except (TypeError, KeyError, ValueError):
        # No metadata, or those of other programs
        return set()


def _counts_rows(column: Any) -> bool:
    """Whether a column holds successive whole numbers."""
    if column.null_count or not _is_number(column.type):
        return False
    values = _decoded(column).to_numpy(zero_copy_only=False)
    return values.dtype.kind in "iu" and bool((np.diff(values) == 1).all())


def _read(file: str, columns: Columns, dialect: Dialect) -> Any:
    """The pyarrow table in a file."""
    optional.load("pyarrow.csv", "file", file)
    optional.load("pyarrow.parquet", "file", file)
    with opened(file) as stream:
        check_memory(os.fstat(stream.fileno()).st_size, file)
        first = stream.read(8)
        stream.seek(0)
        with damaged(file, "is not a CSV or Parquet file ({error})"):
            if first.startswith(b"PAR1"):
                _check_default(dialect)
                return _read_parquet(stream, file, columns)
            return _read_csv(_content(stream, first, file), file, columns, dialect)


def _check_default(dialect: Dialect) -> None:
    """Raises `ArgumentError` for an option of CSV files that is set."""
    for name, default in Dialect()._asdict().items():
        value = getattr(dialect, name)
        if value != default and value != []:
            raise ArgumentError(name, "accepted only for CSV files", value)


def _read_parquet(stream: BinaryIO, file: str, columns: Columns) -> Any:
    """The table in a Parquet file, in which columns that are not needed are empty.

    A file's size says nothing of its columns' sizes, since repeated values take no space in it.
    """
    pyarrow = optional.load("pyarrow", "file", file)
    parquet = optional.load("pyarrow.parquet", "file", file)
    parquet_file = parquet.ParquetFile(stream)
    metadata = parquet_file.metadata
    schema = parquet_file.schema_arrow
    names = [name.strip() for name in schema.names]
    fields = dict(zip(names, schema.types, strict=True))
    if not fields:
        raise ValueError("no columns")
    if len(fields) < len(schema):
        raise ArgumentError("file", "has two columns of a name", file)
    named = columns.named()
    for name, argument in named.items():
        check_column(argument, name, fields, file)
        _check_type(argument, name, fields[name])
    reads_all_numbers = not columns.features and not columns.text
    needed = {}
    for name, arrow_type in fields.items():
        if name in named or (reads_all_numbers and _is_number(arrow_type)):
            needed[name] = arrow_type

    # Memory of the columns as arrays, and of the file's content
    row_bytes = 0
    for arrow_type in needed.values():
        row_bytes += _width(arrow_type) + 8 * _is_number(arrow_type)
    check_memory(metadata.num_rows * row_bytes, file)
    content_bytes = 0
    for number in range(metadata.num_row_groups):
        content_bytes += metadata.row_group(number).total_byte_size
    check_memory(content_bytes, file)

    # As a dictionary, each different text is in memory once.
    name_in_file = dict(zip(names, schema.names, strict=True))
    texts = [name_in_file[name] for name, arrow_type in needed.items() if _is_text(arrow_type)]
    if texts:
        parquet_file = parquet.ParquetFile(stream, read_dictionary=texts)
    is_everything = len(needed) == len(fields)
    table = parquet_file.read(
        columns=None if is_everything else [name_in_file[name] for name in needed]
    )
    arrays = dict.fromkeys(fields, pyarrow.chunked_array([pyarrow.nulls(metadata.num_rows)]))
    for name, column in zip(table.column_names, table.columns, strict=True):
        arrays[name.strip()] = column
    return pyarrow.table(list(arrays.values()), names=list(arrays), metadata=schema.metadata)


def _content(stream: BinaryIO, first: bytes, file: str) -> bytes:
    """The bytes of a file, decompressed."""
    for magic, name in UNREADABLE.items():
        if first.startswith(magic):
            text = f"is compressed with {name}; accepted: gzip, bzip2 and xz"
            raise ArgumentError("file", text, file)
    for magic, decompress in COMPRESSED.items():
        if first.startswith(magic):
            return _decompressed(stream, decompress, file)
    return stream.read()


def _decompressed(stream: BinaryIO, decompress: Callable[[Any], Any], file: str) -> bytes:
    """The bytes of a compressed file. Raises `ArgumentError` if they need more memory than is free."""
    free = free_memory()
    blocks = []
    size = 0
    with decompress(stream) as content:
        while block := content.read(BLOCK_BYTES):
            blocks.append(block)
            size += len(block)
            if 2 * size > free:
                text = f"decompresses to more than {readable(size)}"
                memory = f"only {readable(free)} of memory is free"
                raise ArgumentError("file", f"{text}, but {memory}", file)
    return b"".join(blocks)


def _read_csv(content: bytes, file: str, columns: Columns, dialect: Dialect) -> Any:
    """The table in a CSV file, without spaces around names and texts."""
    pyarrow = optional.load("pyarrow", "file", file)
    reader = optional.load("pyarrow.csv", "file", file)
    separator = _separator(file, dialect)
    _check_dialect(separator, dialect)
    content = content.lstrip(b"\r\n")
    names = _header(content, file, separator, dialect.encoding)
    if len({*names}) < len(names):
        raise ArgumentError("file", "has two columns of a name", file)
    named = columns.named()
    hint = _other_separator(names, separator)
    for name, argument in named.items():
        if hint and name not in names:
            text = f"{pathlib.Path(file).name} has no such column; {hint}"
            raise ArgumentError(argument, text, name)

    # Columns that may hold ids are read as text, in which 007 is not 7.
    labels = names_in(columns.label)
    categorical = names_in(columns.categorical)
    ids = named.keys() - {*names_in(columns.features)} | {*categorical}
    missing = _missing_texts(dialect.missing, reader)
    table = reader.read_csv(
        pyarrow.BufferReader(content),
        reader.ReadOptions(
            use_threads=False,
            # A column's type is that of its values in the first block, which is all of them.
            block_size=min(len(content) + 1, MOST),
            column_names=names,
            skip_rows_after_names=1,
            encoding=dialect.encoding,
        ),
        reader.ParseOptions(delimiter=separator, newlines_in_values=True),
        reader.ConvertOptions(
            column_types={name: pyarrow.string() for name in ids if name in names},
            null_values=[*missing, *(f" {text}" for text in missing)],
            strings_can_be_null=True,
            decimal_point=dialect.decimal,
        ),
    )
    arrays = table.columns
    _check_quotes(content, arrays[-1], names[-1], file)

    # No other text is read. Categories stay text: 1.1 and 1.10 are two of them.
    for position, name in enumerate(names):
        if name not in named:
            continue
        array = _trimmed(arrays[position], name, file, missing, dialect)
        if name in labels:
            _check_groups(array, name, file, dialect)
        if name in ids and name not in categorical:
            array = _typed(array, dialect)
        arrays[position] = array
    return pyarrow.table(arrays, names=names)


def _separator(file: str, dialect: Dialect) -> str:
    """What separates the columns of a CSV file."""
    if dialect.separator:
        return SEPARATORS.get(dialect.separator, dialect.separator)
    return "\t" if ".tsv" in pathlib.Path(file).name.lower() else ","


def _check_dialect(separator: str, dialect: Dialect) -> None:
    """Raises `ArgumentError` for a separator, decimal point or encoding that is not accepted."""
    if dialect.decimal not in (".", ","):
        raise ArgumentError("decimal", "accepted: a point or a comma", dialect.decimal)
    if len(separator) != 1:
        raise ArgumentError("separator", "accepted: one character, or tab", dialect.separator)
    if separator == dialect.decimal:
        text = "is the separator, too; separator names another"
        raise ArgumentError("decimal", text, dialect.decimal)
    try:
        codecs.lookup(dialect.encoding)
    except LookupError as error:
        text = "is unknown; accepted: utf-8, latin-1 and others"
        raise ArgumentError("encoding", text, dialect.encoding) from error


def _check_quotes(content: bytes, column: Any, name: str, file: str) -> None:
    """Raises `ArgumentError` if a quote is not closed, so that the last cell of the table has the rest of the file."""
    if content.count(b'"') % 2 == 0 or not len(column) or not _is_text(column.type):
        return
    last = column[-1].as_py()
    if last is not None and "\n" in last:
        text = f"has a quote in column {name}, row {len(column) - 1} (counted from 0), that is not closed"
        raise ArgumentError("file", f"{text}; accepted: quotes in pairs", file)


def _check_groups(column: Any, name: str, file: str, dialect: Dialect) -> None:
    """Raises `ArgumentError` if labels are numbers with thousands separators, which would be classes."""
    compute = optional.load("pyarrow.compute", "file", file)
    if not _is_text(column.type):
        return
    other = "." if dialect.decimal == "," else ","
    with_point = compute.replace_substring(column, dialect.decimal, ".")
    is_plain = compute.match_substring_regex(with_point, r"^[+-]?[0-9.]+$")
    has_other = compute.match_substring(column, other)
    is_grouped = compute.and_(compute.match_substring_regex(column, GROUPED), has_other)
    is_number = compute.or_(is_plain, is_grouped)
    if compute.any(is_grouped).as_py() and compute.all(is_number).as_py():
        example = column[compute.index(is_grouped, True).as_py()].as_py()
        text = f"has thousands separators in column {name}, such as {example}"
        accepted = f"accepted: numbers without, with {dialect.decimal!r} as decimal point"
        raise ArgumentError("file", f"{text}; {accepted}", file)


def _header(content: bytes, file: str, separator: str, encoding: str) -> list[str]:
    """The names of the columns of a CSV file."""
    codec = "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding
    text = io.TextIOWrapper(io.BytesIO(content), codec, newline="")
    try:
        header = next(csv.reader(text, delimiter=separator, skipinitialspace=True), [])
    except UnicodeDecodeError as error:
        text = f"is not {encoding} text; encoding names another"
        raise ArgumentError("file", text, file) from error
    if not header:
        raise ValueError("no columns")
    return [name.strip() for name in header]


def _other_separator(names: Sequence[str], separator: str) -> str:
    """A hint at the separator of a file that has one column, whose name has others in it; or ""."""
    if len(names) != 1:
        return ""
    others = [other for other in (";", "\t", "|", ",") if other in names[0]]
    if not others or others[0] == separator:
        return ""
    word = "tab" if others[0] == "\t" else others[0]
    text = f"its columns seem to be separated by {word!r}, not {separator!r}"
    return f"{text}: set separator={word!r}"


def _missing_texts(missing: Names, reader: Any) -> list[str]:
    """The texts that stand for missing values."""
    texts = names_in(missing)
    if texts:
        return ["", *texts]
    return [*reader.ConvertOptions().null_values, *MISSING]


def _trimmed(column: Any, name: str, file: str, missing: Sequence[str], dialect: Dialect) -> Any:
    """A column whose texts are without spaces around them; those that stand for missing values become null."""
    pyarrow = optional.load("pyarrow", "file", file)
    compute = optional.load("pyarrow.compute", "file", file)
    if pyarrow.types.is_binary(column.type):
        text = f"is not {dialect.encoding} text in column {name}; encoding names another"
        raise ArgumentError("file", text, file)
    if not _is_text(column.type):
        return column
    trimmed = compute.utf8_trim_whitespace(column)
    starts_with_quote = compute.starts_with(trimmed, '"')
    is_after_space = compute.and_(starts_with_quote, compute.not_equal(trimmed, column))
    if compute.any(is_after_space).as_py():
        row = compute.index(is_after_space, True).as_py()
        text = f"has a space before a quote in column {name}, row {row} (counted from 0)"
        raise ArgumentError("file", f"{text}; accepted: quotes right after separators", file)
    is_missing = compute.is_in(trimmed, value_set=pyarrow.array(missing, column.type))
    return compute.if_else(is_missing, pyarrow.scalar(None, column.type), trimmed)


def _typed(column: Any, dialect: Dialect) -> Any:
    """A column of texts as whole numbers, numbers or booleans if all its texts are such; 007 is text."""
    compute = optional.load("pyarrow.compute", "file")
    pyarrow = optional.load("pyarrow", "file")
    if compute.any(compute.match_substring_regex(column, LEADING_ZERO)).as_py():
        return column
    if compute.all(compute.match_substring_regex(column, NUMERALS)).as_py():
        if compute.any(compute.match_substring_regex(column, SIGNED)).as_py():
            return column
        # Ids of more digits than int64 has stay text: as floats, they would be no ids.
        arrow_types = [pyarrow.int64()]
    else:
        arrow_types = [pyarrow.float64(), pyarrow.bool_()]
    if dialect.decimal == ",":
        if compute.any(compute.match_substring(column, ".")).as_py():
            return column
        with_point = compute.replace_substring(column, ",", ".")
    else:
        with_point = column
    for arrow_type in arrow_types:
        try:
            return compute.cast(with_point, arrow_type)
        except pyarrow.ArrowInvalid:
            continue
    return column


def _is_number(arrow_type: Any) -> bool:
    """Whether a column of a pyarrow type holds numbers or booleans."""
    types = optional.load("pyarrow.types", "file")
    if types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)
    return any(test(arrow_type) for test in tests)


def _is_text(arrow_type: Any) -> bool:
    """Whether a column of a pyarrow type holds text."""
    types = optional.load("pyarrow.types", "file")
    if types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    tests = (types.is_string, types.is_large_string, types.is_string_view)
    return any(test(arrow_type) for test in tests)


def _check_type(argument: str, name: str, arrow_type: Any) -> None:
    """Raises `ArgumentError` if a column that an argument names holds neither numbers nor text."""
    types = optional.load("pyarrow.types", "file")
    if argument == "time" and types.is_temporal(arrow_type):
        return
    if not _is_number(arrow_type) and not _is_text(arrow_type) and str(arrow_type) != "null":
        text = f"holds {arrow_type}; accepted: a column of numbers or text"
        raise ArgumentError(argument, text, name)


def _width(arrow_type: Any) -> float:
    """Bytes of a value of a pyarrow type; of text, those of its position."""
    types = optional.load("pyarrow.types", "file")
    if types.is_dictionary(arrow_type) or _is_text(arrow_type):
        return 4
    return arrow_type.bit_width / 8


def _decoded(column: Any) -> Any:
    """A column in one piece, without a dictionary, whose decimals are numbers."""
    pyarrow = optional.load("pyarrow", "file")
    column = column.combine_chunks()
    # A column of no chunks, or one too large for one
    if isinstance(column, pyarrow.ChunkedArray):
        column = pyarrow.concat_arrays(column.chunks)
    if hasattr(column, "dictionary_decode"):
        column = column.dictionary_decode()
    if not pyarrow.types.is_decimal(column.type):
        return column
    is_whole = column.type.scale == 0 and column.type.precision <= 18
    return column.cast(pyarrow.int64() if is_whole else pyarrow.float64())


def _check_complete(column: Any, name: str, file: str) -> None:
    """Raises `ArgumentError` if a value of a column is missing."""
    if column.null_count:
        compute = optional.load("pyarrow.compute", "file", file)
        row = compute.index(compute.is_null(column), True).as_py()
        raise _incomplete("no value", name, row, column.null_count, file)


def _incomplete(what: str, name: str, row: int, count: int, file: str) -> ArgumentError:
    more = f", and {count - 1:,} more" if count > 1 else ""
    text = f"has {what} in column {name}, row {row} (counted from 0){more}"
    return ArgumentError("file", text, file)


def _values(column: Any, name: str, file: str) -> np.ndarray:
    """A column's numbers, booleans or texts (n,), texts without spaces around them; raises if one is missing."""
    _check_complete(column, name, file)
    if not _is_text(column.type):
        return _decoded(column).to_numpy(zero_copy_only=False)
    _check_text_memory(column, file)
    compute = optional.load("pyarrow.compute", "file", file)
    trimmed = compute.utf8_trim_whitespace(_decoded(column))
    return trimmed.to_numpy(zero_copy_only=False)


def _check_text_memory(column: Any, file: str) -> None:
    """Raises `ArgumentError` if texts need more memory than is free, in an array of the longest one's length."""
    compute = optional.load("pyarrow.compute", "file", file)
    texts = column.combine_chunks()
    texts = texts.dictionary if hasattr(texts, "dictionary") else texts
    longest = compute.max(compute.utf8_length(texts)).as_py() or 0
    check_memory(4 * longest * len(column), file)


def _numbers(column: Any, name: str, file: str, fill: bool) -> np.ndarray:
    """A feature's numbers (n,); NaN where one is missing, if it is to be filled."""
    column = _decoded(column)
    if column.null_count and not fill:
        _check_complete(column, name, file)
    values = column.to_numpy(zero_copy_only=False)
    # Booleans with missing values
    if values.dtype == object:
        values = values.astype(np.float64)
    if values.dtype.kind != "f":
        return values
    is_refused = ~np.isfinite(values)
    if fill:
        is_refused &= ~np.isnan(values)
    if is_refused.any():
        row = int(np.argmax(is_refused))
        what = "no value" if np.isnan(values[row]) else "an infinite value"
        raise _incomplete(what, name, row, int(is_refused.sum()), file)
    return values


def _categories(column: Any, name: str, file: str) -> tuple[list[str], np.ndarray]:
    """The categories in a column in sorted order, and the number of each example's (n,)."""
    values = _values(column, name, file)
    if values.dtype.kind == "f" and np.isnan(values).any():
        is_missing = np.isnan(values)
        row = int(np.argmax(is_missing))
        raise _incomplete("no value", name, row, int(is_missing.sum()), file)
    if values.dtype == object:
        values = values.astype(str)
        warn_of_missing("categorical", values)
    categories, codes = np.unique(values, return_inverse=True)
    if len(categories) > MOST_CATEGORIES:
        text = f"{name} has {len(categories):,} categories, each of which would be a column"
        raise ArgumentError("categorical", f"{text}; accepted: up to {MOST_CATEGORIES:,}")
    return [str(category) for category in categories], codes


def join_targets(labels: list[np.ndarray], names: Names) -> np.ndarray:
    """The targets y (n,) of one column, or (n, m) of several."""
    if len(labels) == 1:
        return labels[0]
    if not labels or any(values.dtype.kind not in "biuf" for values in labels):
        text = "accepted: one column, or several columns of numbers or booleans"
        raise ArgumentError("label", text, names)
    y = np.stack(labels, axis=1)
    return y if y.dtype == bool else y.astype(np.float64)


def _marks(values: np.ndarray, name: str) -> np.ndarray:
    """Whether examples are for testing, bool (n,)."""
    if values.dtype.kind in "OTU" and {*map(str, values)} <= {*SPLITS}:
        return values == SPLITS[1]
    if values.dtype.kind not in "biu" or not np.isin(values, (0, 1)).all():
        text = f"accepted: a column of booleans, or of {' and '.join(SPLITS)}"
        raise ArgumentError("test", text, name)
    return values.astype(bool)
