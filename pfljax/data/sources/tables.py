"""Tables with an example per row: CSV and Parquet files."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from pfljax.contract import optional
from pfljax.contract.errors import ArgumentError, warn
from pfljax.contract.fields import MOST, Seed, checked, knob, nearest
from pfljax.contract.reading import check_memory, opened
from pfljax.data.sources.characters import tokens
from pfljax.data.sources.files import PARTS, FileTask, Names, damaged, names_in, of_file
from pfljax.data.sources.source import Fraction, Source, Standardize

TABLE = "a CSV or Parquet file with an example per row and named columns"
CALLED = {"x": "features", "y": "label", "is_test": "test"}

Label = Annotated[Names, knob(flag="label_column")]
Client = Annotated[str, knob(flag="client_column")]
Features = Annotated[Names, knob(flag="feature_columns")]
Text = Annotated[str, knob(flag="text_column")]
Test = Annotated[str, knob(flag="test_column")]


class Columns(NamedTuple):
    """Names of columns; see `table`."""

    label: Names
    client: str
    features: Names
    text: str = ""
    test: str = ""


@checked()
def table(
    file: Annotated[str | pathlib.Path, knob(accepted=TABLE, help=TABLE, flag="data_file")],
    *,
    label: Label = "label",
    client: Client = "",
    features: Features = "",
    text: Text = "",
    test: Test = "",
    seed: Seed = 0,
    fraction: Fraction = 1.0,
    standardize: Standardize = True,
    task: FileTask = "auto",
) -> Source:
    """Reads a CSV file (with a header) or a Parquet file. Its first bytes say which it is.

    The other arguments are those of `npz`.

    Args:
        file: Path of the file.
        label: Column with the labels: text (classes in sorted order), whole numbers (classes 0..C-1) or other numbers
            (regression); or several columns of numbers (to predict them all) or of booleans (multilabel).
        client: Column that names each example's client; empty: none does.
        features: Columns of numbers to learn from; empty: all but those named otherwise.
        text: Column of text to learn from instead: its characters are tokens from 1 in sorted order, uint8, and 0 pads.
        test: Column that marks the official test examples, with True or test; empty: none does.

    Raises:
        ArgumentError: if the file cannot be read, or a column is missing or not accepted.
    """
    file = str(file)
    arrays = arrays_of(_read(file), file, Columns(label, client, features, text, test))
    options: Any = {"task": task, "images": not text, "standardize": standardize and not text}
    source = of_file(arrays, file, seed=seed, fraction=fraction, called=CALLED, **options)
    return dataclasses.replace(source, tokens=bool(text))


def arrays_of(table: Any, file: str, columns: Columns, x: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """The arrays of `make_source` from a pyarrow table; `x` if it is given, otherwise from columns."""
    names = table.column_names
    if not len(table) or len({*names}) < len(names):
        raise ArgumentError("file", "has no rows" if len({*names}) == len(names) else "has two columns of a name", file)

    def column(argument: str, name: str) -> np.ndarray:
        check_column(argument, name, names, file)
        return _values(table.column(name), name, file)

    labels = [column("label", name) for name in names_in(columns.label)]
    found = {"y": targets_of(labels, columns.label)}
    if columns.client:
        found["client"] = column("client", columns.client)
    if columns.test:
        found["is_test"] = _marks(column("test", columns.test), columns.test)
    if x is not None:
        return found | {"x": x}
    if columns.text:
        if columns.features:
            raise ArgumentError("features", "not accepted with a text column", columns.features)
        texts = column("text", columns.text)
        if texts.dtype.kind not in "OTU" or not isinstance(texts[0], str):
            raise ArgumentError("text", "accepted: a column of text", columns.text)
        return found | {"x": tokens(texts.tolist(), file)}
    taken = {*names_in(columns.label), columns.client, columns.test}
    wanted = names_in(columns.features)
    numbers = {name: column("features", name) for name in wanted or names if wanted or name not in taken}
    other = [name for name, values in numbers.items() if values.dtype.kind not in "biuf"]
    if len(other) == len(numbers) or (wanted and other):
        text = f"{', '.join(other) or 'nothing'} in {pathlib.Path(file).name}; accepted: columns of numbers"
        raise ArgumentError("features", text)
    if other:
        warn("features", f"{', '.join(other)} in {pathlib.Path(file).name} holds no numbers and is left out")
    kept = [values for name, values in numbers.items() if name not in other]
    pixels = all(values.dtype == np.uint8 for values in kept)
    return found | {"x": np.stack(kept, axis=1).astype(np.uint8 if pixels else np.float64)}


def check_column(argument: str, name: str, names: Sequence[str], file: str) -> None:
    """Raises `ArgumentError` unless a column that an argument names is among the columns of a file."""
    if name not in names:
        text = f"{pathlib.Path(file).name} has no such column; {nearest(name, names)}"
        raise ArgumentError(argument, text, name)


def _read(file: str) -> Any:
    """The pyarrow table in a file."""
    csv, parquet = (optional.load(f"pyarrow.{kind}", "file", file) for kind in ("csv", "parquet"))
    with opened(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        check_memory(size, file)
        with damaged(file, "is not a CSV or Parquet file ({error})"):
            if stream.read(4) == b"PAR1":
                whole = parquet.ParquetFile(stream)
                groups = range(whole.metadata.num_row_groups)
                check_memory(sum(whole.metadata.row_group(number).total_byte_size for number in groups), file)
                table = whole.read()
            else:
                stream.seek(0)
                # A column's type is that of its values in the first block, which is all of them.
                table = csv.read_csv(stream, csv.ReadOptions(use_threads=False, block_size=min(size + 1, MOST)))
            if not table.column_names:  # which are decoded here
                raise ValueError("no columns")
            return table


def _values(column: Any, name: str, file: str) -> np.ndarray:
    """A column's values (n,), all of which are there."""
    column = column.combine_chunks()
    if hasattr(column, "dictionary_decode"):
        column = column.dictionary_decode()
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise ArgumentError("file", f"has no value in column {name}, row {row} (counted from 0)", file)
    return column.to_numpy(zero_copy_only=False)


def targets_of(labels: list[np.ndarray], names: Names) -> np.ndarray:
    """The targets y (n,) of one column, or (n, m) of several."""
    if len(labels) == 1:
        return labels[0]
    if not labels or any(values.dtype.kind not in "biuf" for values in labels):
        raise ArgumentError("label", "accepted: one column, or several columns of numbers or booleans", names)
    y = np.stack(labels, axis=1)
    return y if y.dtype == bool else y.astype(np.float64)


def _marks(values: np.ndarray, name: str) -> np.ndarray:
    """Whether examples are for testing, bool (n,)."""
    if values.dtype.kind in "OTU" and {*map(str, values)} <= {*PARTS}:
        return values == PARTS[1]
    if values.dtype.kind not in "biu" or not np.isin(values, (0, 1)).all():
        raise ArgumentError("test", f"accepted: a column of booleans, or of {' and '.join(PARTS)}", name)
    return values.astype(bool)
