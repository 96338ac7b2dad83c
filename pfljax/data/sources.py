"""Where examples come from: data sets as plain arrays, before they are divided among clients."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import pathlib
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from pfljax.core.types import Task, UsageError

SINE_EXAMPLES = 20  # a client's examples of the sine curve, training and test part together
SINE_NOISE = 0.1  # standard deviation of the noise on the sine curve
SYNTHETIC_FEATURES = 150
SYNTHETIC_TRAIN = (50, 1000)  # the least and the most training examples of a client
SYNTHETIC_TEST = 5000  # a client's test examples, unless test_examples says otherwise
SYNTHETIC_NOISE = 0.1  # standard deviation of the noise on the linear score that decides the class
TEXT_WINDOW = 80  # characters that a text's example shows
LEAST_WINDOWS = 8  # of a part of a role's text, as far as it has characters
TEXT_TRAIN = 0.8  # share of a role's lines, from the first on, to train on
PAD_TOKEN = 255  # target where a sequence has no character to predict: never trained on, left out of means
CLIENT_FIELDS = ("client", "writer", "client_id", "user")  # what may say, in a TFDS data set, whose example it is


@dataclasses.dataclass(frozen=True)
class Source:
    """A data set of n examples.

    Attributes:
        x: (n, *features) float32, images (n, height, width, channels); or (n, T) uint8 tokens of a sequence.
        y: (n,) int32 classes, or float32 targets of a regression; (n, T) uint8 classes for sequences, PAD_TOKEN
            where there is nothing to predict.
        client: (n,) int64, whose example it is, 0..K-1; None where the data set has no natural clients.
        is_test: (n,) bool, the official test examples; None where there are none.
        num_classes: Classes C; 1 for a regression.
        task: "classification" or "regression".
        name: For titles.
        distribution: (K,) the true distribution of each natural client, where it is known.
        coarse: (n,) int32, the coarse label of each example (the superclass of its class), where there is one.
    """

    x: np.ndarray
    y: np.ndarray
    client: np.ndarray | None
    is_test: np.ndarray | None
    num_classes: int
    task: Task
    name: str
    distribution: np.ndarray | None = None
    coarse: np.ndarray | None = None


class _Request(NamedTuple):
    """The arguments of `load`, with `member` the part of --dataset after the colon."""

    member: str
    data_file: str | None
    data_dir: str | None
    rng: np.random.Generator
    num_clients: int
    num_distributions: int
    dirichlet_alpha: float
    test_examples: int
    text_stride: int
    fraction: float
    standardize: bool
    task: str

    def rows(self, n: int) -> np.ndarray:
        """The examples to keep of n: a uniform subsample, ascending."""
        size = max(1, round(self.fraction * n))
        return np.sort(self.rng.choice(n, size, replace=False)) if size < n else np.arange(n)


def load(
    dataset: str,
    *,
    data_file: str | None = None,
    data_dir: str | None = None,
    seed: int = 0,
    num_clients: int = 16,
    num_distributions: int = 2,
    dirichlet_alpha: float = 0.4,
    test_examples: int = 0,
    text_stride: int = 1,
    fraction: float = 1.0,
    standardize: bool = True,
    task: str = "auto",
) -> Source:
    """Loads a data set.

    Args:
        dataset: A key of READERS; for TFDS "tfds:NAME".
        data_file: The file of the data set npz: x (n, *features), y (n,), optionally client or writer (n,)
            integers or strings, coarse (n,) integers, and is_test (n,) booleans; x of uint8 is read as pixels
            (divided by 255). Or of the data set text: blocks of lines, a blank line between them, each spoken by
            the role that the block's first line "NAME:" names.
        data_dir: Where TFDS keeps its prepared data sets (None: its own default).
        seed: Decides the subsample and whatever is drawn.
        num_clients: On how many successive intervals the sine curve is observed; the clients of synthetic.
        num_distributions: Components of the mixture that synthetic draws from.
        dirichlet_alpha: Concentration of the clients' shares in these components.
        test_examples: How many test examples synthetic draws for each client; 0 for SYNTHETIC_TEST.
        text_stride: How many characters the windows of text are apart.
        fraction: The share of the examples to keep, drawn uniformly.
        standardize: Whether npz and TFDS data get mean 0 and standard deviation 1, per channel for images and
            per feature otherwise, measured on the examples that are not official test examples.
        task: "classification", "regression", or "auto": float targets make a regression.

    Raises:
        UsageError: If the data set is unknown, missing, not prepared or malformed.
    """
    kind, _, member = dataset.partition(":")
    if kind not in READERS or bool(member) != (kind == "tfds"):
        raise unknown("--dataset", dataset, [name + ":NAME" * (name == "tfds") for name in READERS])
    for flag, value, readers in (("--data_file", data_file, ("npz", "text")), ("--data_dir", data_dir, ("tfds",))):
        if value and kind not in readers:
            raise UsageError(f"{flag}={value}: is read with --dataset={' or '.join(readers)} only, not with {dataset}")
    if not 0 < fraction <= 1:
        raise UsageError(f"--data_fraction={fraction}: accepted is a share in (0, 1]")
    return READERS[kind](
        _Request(
            member,
            data_file,
            data_dir,
            generator(seed, "load"),
            num_clients,
            num_distributions,
            dirichlet_alpha,
            test_examples,
            text_stride,
            fraction,
            standardize,
            task,
        )
    )


def generator(seed: int, purpose: str) -> np.random.Generator:
    """A random generator of its own for every purpose, so that no two choices share their draws.

    Raises:
        UsageError: If the seed is negative.
    """
    if seed < 0:
        raise UsageError(f"--seed={seed}: accepted are integers from 0")
    return np.random.default_rng([seed, *purpose.encode()])


def dirichlet_draws(rng: np.random.Generator, draws: int, size: int, alpha: float) -> np.ndarray:
    """(draws, size) shares, each row a symmetric Dirichlet draw of which no share is exactly 0.

    Raises:
        UsageError: If the concentration is not positive and finite.
    """
    check_concentration(alpha)
    return rng.dirichlet(np.full(size, alpha), size=draws) * (1 - 1e-12) + 1e-12 / size


def check_concentration(alpha: float) -> None:
    """Raises UsageError unless the concentration is positive and finite."""
    if not 0 < alpha < np.inf:
        raise UsageError(f"--dirichlet_alpha={alpha}: accepted are positive numbers")


def unknown(flag: str, name: str, accepted: Iterable[str]) -> UsageError:
    """The error for a name that is not one of `accepted`, with the nearest names."""
    accepted = list(accepted)
    near = difflib.get_close_matches(name, accepted)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    return UsageError(f"{flag}={name}: unknown{hint}; accepted: {', '.join(accepted)}")


def _digits(request: _Request) -> Source:
    """The 1,797 images of 8 x 8 pixels that scikit-learn carries, scaled to [0, 1]."""
    from sklearn.datasets import load_digits  # costs a second of import that other data sets need not pay

    images, labels = load_digits(return_X_y=True)
    y, num_classes, task = _targets("--dataset=digits", labels, request.task)
    rows = request.rows(len(y))
    x = (images[rows] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    return Source(x, y[rows], None, None, num_classes, task, "digits")


def _sine(request: _Request) -> Source:
    """Noisy points of one period of the sine, each client on its own interval (FedeRiCo, Figure 1).

    x is the angle mapped to [-1, 1], so that the linear models of all intervals train at one rate.
    """
    if request.num_clients < 1:
        raise UsageError(f"--num_clients={request.num_clients}: --dataset=sine needs at least 1")
    client = np.repeat(np.arange(request.num_clients), SINE_EXAMPLES)
    x = 2 * (client + request.rng.random(client.shape)) / request.num_clients - 1
    y = np.sin(np.pi * (x + 1)) + SINE_NOISE * request.rng.standard_normal(client.shape)
    y, num_classes, task = _targets("--dataset=sine", y, request.task)
    rows = request.rows(len(y))
    x = x[rows, None].astype(np.float32)
    return Source(x, y[rows], client[rows], None, num_classes, task, "sine", np.arange(request.num_clients))


def _synthetic(request: _Request) -> Source:
    """Two classes by the sign of a linear score, of which there are M: a mixture of M tasks (FedEM, Appendix I.1).

    Each client has its own shares in the M components, and every example the class that its component gives it.
    """
    if request.task == "regression":
        raise UsageError("--task=regression: --dataset=synthetic has classes; accepted: classification, auto")
    for flag, value, least in (
        ("--num_clients", request.num_clients, 1),
        ("--num_distributions", request.num_distributions, 1),
        ("--test_examples", request.test_examples, 0),
    ):
        if value < least:
            raise UsageError(f"{flag}={value}: --dataset=synthetic accepts {least} and more")
    rng, least, most = request.rng, *SYNTHETIC_TRAIN
    theta = rng.uniform(-1, 1, (request.num_distributions, SYNTHETIC_FEATURES)).astype(np.float32)
    share = dirichlet_draws(rng, request.num_clients, request.num_distributions, request.dirichlet_alpha)
    train = np.minimum(least + rng.lognormal(4, 2, request.num_clients).astype(int), most)
    sizes = np.stack([train, np.full_like(train, request.test_examples or SYNTHETIC_TEST)], axis=1)
    x = np.empty((sizes.sum(), SYNTHETIC_FEATURES), np.float32)
    y = np.empty(len(x), np.int32)
    ends = np.cumsum(sizes)
    for part, (start, end) in enumerate(zip(ends - sizes.ravel(), ends, strict=True)):
        count = rng.multinomial(end - start, share[part // 2])
        component = rng.permutation(np.repeat(np.arange(len(theta)), count))
        block = x[start:end]  # drawn where it stays: at full size there is a gigabyte of examples
        rng.random(out=block, dtype=np.float32)
        block *= 2
        block -= 1
        score = np.take_along_axis(block @ theta.T, component[:, None], axis=1)[:, 0]
        y[start:end] = score + SYNTHETIC_NOISE * rng.standard_normal(len(score)) > 0
    client = np.repeat(np.arange(request.num_clients), sizes.sum(axis=1))
    is_test = np.repeat(np.arange(sizes.size) % 2 == 1, sizes.ravel())
    rows = request.rows(len(y)) if request.fraction < 1 else slice(None)  # no copy where all are kept
    return Source(x[rows], y[rows], client[rows], is_test[rows], 2, "classification", "synthetic", share.argmax(axis=1))


def _npz(request: _Request) -> Source:
    """A user's own file (see `load`)."""
    if not request.data_file:
        raise UsageError("--dataset=npz: needs --data_file=FILE.npz with x, y, optionally client, coarse, is_test")
    where = f"--data_file={request.data_file}"
    arrays = _read_npz(where, request.data_file)
    shape = arrays["x"].shape
    if not arrays["x"].size or not shape:
        raise UsageError(f"{where}: is empty, x has shape {shape}; accepted is (n, *features)")
    for key, array in arrays.items():
        if key != "x" and array.shape != shape[:1]:
            raise UsageError(f"{where}: {key} {array.shape} does not fit x {shape}; accepted is one value a row")
    y, num_classes, task = _targets(where, arrays["y"], request.task)
    rows = request.rows(len(y))
    x = _features(where, arrays.pop("x")[rows], rows)
    is_test = arrays.get("is_test")
    if is_test is not None:
        if is_test.dtype.kind not in "biu" or not np.isin(is_test, (0, 1)).all():
            raise UsageError(f"{where}: is_test is not boolean")
        is_test = is_test[rows].astype(bool)
        if is_test.all():
            raise UsageError(f"{where}: is_test holds for every example, so there is none to train on")
    if request.standardize:
        _standardize(x, is_test)
    key = next((key for key in ("client", "writer") if key in arrays), None)
    return Source(
        x,
        y[rows],
        _client_ids(where, key, arrays[key][rows]) if key else None,
        is_test,
        num_classes,
        task,
        pathlib.Path(request.data_file).stem,
        coarse=_coarse_labels(where, "coarse", arrays["coarse"][rows]) if "coarse" in arrays else None,
    )


def _read_npz(where: str, path: str) -> dict[str, np.ndarray]:
    """The arrays of an npz that `load` knows, x and y among them; pickled objects are refused."""
    try:
        with open(path, "rb") as file:  # opened here: np.load leaves a file open that turns out to be no npz
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise UsageError(f"{where}: holds a single array; accepted is an npz with x and y (numpy.savez)")
            missing = sorted({"x", "y"} - set(archive.files))
            if missing:
                raise UsageError(
                    f"{where}: lacks {' and '.join(missing)}; accepted is an npz with x and y, found "
                    f"{', '.join(archive.files) or 'nothing'}"
                )
            known = ("x", "y", "client", "writer", "coarse", "is_test")
            return {key: archive[key] for key in known if key in archive.files}
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"{where}: cannot be read ({error.strerror or error})") from error
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(
            f"{where}: is not an npz of plain arrays (numpy.savez; no object arrays or pickles)"
        ) from error


def _text(request: _Request) -> Source:
    """The roles of a play as clients, who speak character by character (Shakespeare of FedAvg and FedEM).

    Each role's lines are divided into a training and a test part, and no window of characters crosses the two.
    """
    if not request.data_file:
        raise UsageError("--dataset=text: needs --data_file=FILE, a text of roles that speak")
    if request.task == "regression":
        raise UsageError("--task=regression: --dataset=text has classes; accepted: classification, auto")
    if request.text_stride < 1:
        raise UsageError(f"--text_stride={request.text_stride}: accepted is at least 1")
    where = f"--data_file={request.data_file}"
    roles = _roles(where, request.data_file)
    letters = sorted(set("\n".join(part for parts in roles for part in parts)))
    if len(letters) >= PAD_TOKEN:
        raise UsageError(f"{where}: has {len(letters)} different characters; accepted are up to {PAD_TOKEN - 1}")
    code = {letter: i for i, letter in enumerate(letters)}
    xs, ys, is_test, client = [], [], [], []
    for k, parts in enumerate(roles):
        for test, part in enumerate(parts):
            x, y = _windows(np.array([code[letter] for letter in part], np.uint8), request.text_stride)
            xs.append(x)
            ys.append(y)
            is_test.append(np.full(len(x), bool(test)))
            client.append(np.full(len(x), k))
    x, y, is_test, client = map(np.concatenate, (xs, ys, is_test, client))
    rows = request.rows(len(x)) if request.fraction < 1 else slice(None)
    name = pathlib.Path(request.data_file).stem
    distribution = np.arange(len(roles))
    return Source(x[rows], y[rows], client[rows], is_test[rows], len(letters), "classification", name, distribution)


def _roles(where: str, path: str) -> list[tuple[str, str]]:
    """The training and the test text of each role with two lines or more, in the order of first appearance."""
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{where}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: is not UTF-8 text (byte {error.start})") from error
    spoken: dict[str, list[str]] = {}
    speaker = None
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.split("\n") if line.strip()]
        if lines and re.fullmatch("[^:]+:", lines[0].strip()):
            speaker = lines.pop(0).strip()
        if speaker:  # what comes before the first heading is nobody's
            spoken.setdefault(speaker, []).extend(lines)
    if not spoken:
        raise UsageError(
            f"{where}: is a text without roles; accepted are blocks of lines with a blank line between them, the "
            'first line of a block "NAME:" and the following ones what NAME speaks'
        )
    roles = []
    for lines in spoken.values():
        cut = min(max(1, int(TEXT_TRAIN * len(lines))), len(lines) - 1)
        parts = "\n".join(lines[:cut]), "\n".join(lines[cut:])
        if min(map(len, parts)) > 1:  # a single character would leave nothing to predict
            roles.append(parts)
    if not roles:
        raise UsageError(f"{where}: no role has two lines, one to train on and one to test on")
    return roles


def _windows(tokens: np.ndarray, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """The windows of tokens (length,), and what follows each token of theirs: both (n, TEXT_WINDOW) uint8.

    A part too short for LEAST_WINDOWS at that stride has them closer together, and the last ones run past its end
    where even that is not enough, so that every role has more than one example.
    """
    starts = np.arange(0, max(len(tokens) - TEXT_WINDOW, 1), stride)
    if len(starts) < LEAST_WINDOWS:
        last = max(len(tokens) - TEXT_WINDOW - 1, min(LEAST_WINDOWS - 1, len(tokens) - 2))
        starts = np.unique(np.linspace(0, last, LEAST_WINDOWS).astype(int))
    missing = max(starts[-1] + TEXT_WINDOW + 1 - len(tokens), 0)
    x, y = np.pad(tokens, (0, missing)), np.pad(tokens, (0, missing), constant_values=PAD_TOKEN)
    view = np.lib.stride_tricks.sliding_window_view
    return view(x, TEXT_WINDOW + 1)[starts, :-1], view(y, TEXT_WINDOW + 1)[starts, 1:]


def _tfds(request: _Request) -> Source:
    """A prepared data set of TFDS, through its random-access reader, which needs no TensorFlow."""
    import tensorflow_datasets as tfds  # slow to import, and only needed here

    where = f"--dataset=tfds:{request.member}"

    def read(split: str):
        # `download=True`, the default, would start a download that needs TensorFlow.
        return tfds.data_source(request.member, split=split, data_dir=request.data_dir, download=False)

    try:
        parts = [read("train")]
        with contextlib.suppress(ValueError):  # "Unknown split": this data set has no official test part
            parts.append(read("test"))
    except tfds.core.DatasetNotFoundError as error:
        near = difflib.get_close_matches(request.member, tfds.list_builders(with_community_datasets=False))
        raise UsageError(f"{where}: TFDS knows no such data set; nearest: {', '.join(near) or 'none'}") from error
    except ValueError as error:  # an unknown configuration, or no split "train"
        raise UsageError(f"{where}: {str(error).splitlines()[0]}") from error
    except (KeyError, OSError, NotImplementedError) as error:  # nothing there, or files without random access
        folder = f", data_dir={request.data_dir!r}" if request.data_dir else ""
        raise UsageError(
            f"{where}: not prepared in --data_dir={request.data_dir or '(the default of TFDS)'}; prepare it "
            "by pip install 'pfljax[prepare]' && python -c \"import tensorflow_datasets as tfds; "
            f"tfds.builder({request.member!r}, file_format='array_record'{folder}).download_and_prepare()\""
        ) from error
    rows = request.rows(sum(map(len, parts)))
    is_test = rows >= len(parts[0])
    if is_test.all():
        raise UsageError(f"{where}: --data_fraction={request.fraction} leaves no training examples")
    examples = [parts[t][int(row) - t * len(parts[0])] for row, t in zip(rows, is_test.astype(int), strict=True)]
    scalars = [key for key, value in examples[0].items() if np.ndim(value) == 0]
    arrays = [key for key in examples[0] if key != "label" and key not in scalars]
    if "label" not in examples[0] or not arrays:
        raise UsageError(f"{where}: needs a label and an array beside it; found {', '.join(examples[0])}")
    feature = "image" if "image" in arrays else arrays[0]

    def column(key: str) -> np.ndarray:
        return np.array([example[key] for example in examples])

    shapes = {np.shape(example[feature]) for example in examples}
    if len(shapes) > 1:
        raise UsageError(f"{where}: examples of one shape are accepted; {feature} has {len(shapes)} shapes")
    y, num_classes, task = _targets(where, column("label"), request.task)
    if task == "classification":  # a subsample may miss the last classes
        num_classes = getattr(parts[0].dataset_info.features["label"], "num_classes", None) or num_classes
    x = _features(where, np.stack([example[feature] for example in examples]), rows)
    if request.standardize:
        _standardize(x, is_test)
    key = next((key for key in CLIENT_FIELDS if key in scalars), None)
    return Source(
        x,
        y,
        _client_ids(where, key, column(key)) if key else None,
        is_test if len(parts) > 1 else None,
        num_classes,
        task,
        request.member,
        coarse=_coarse_labels(where, "coarse_label", column("coarse_label")) if "coarse_label" in scalars else None,
    )


def _targets(where: str, y: np.ndarray, task: str) -> tuple[np.ndarray, int, Task]:
    """Checks the targets (n,); returns them as int32 classes or float32, with C and the task."""
    if y.dtype.kind not in "biuf":
        raise UsageError(f"{where}: y is {y.dtype}; accepted are integers (classes) and floats (a regression)")
    if task == "auto":
        task = "regression" if y.dtype.kind == "f" else "classification"
    with np.errstate(over="ignore"):
        targets = y.astype(np.float32)
    _check_finite(where, "y", targets, np.arange(len(y)))
    if task == "regression":
        return targets, 1, "regression"
    wrong = np.flatnonzero((y < 0) | (y != np.floor(y)))
    if wrong.size:
        raise UsageError(f"{where}: y is {y[wrong[0]]} in row {wrong[0]}; classes are integers 0..C-1")
    if y.max() >= max(len(y), 1000):  # each class has its own output: most likely these are no classes
        raise UsageError(f"{where}: y reaches {y.max()} in {len(y)} rows; classes are 0..C-1, floats a regression")
    return y.astype(np.int32), int(y.max()) + 1, "classification"


def _client_ids(where: str, name: str, client: np.ndarray) -> np.ndarray:
    """Numbers the clients 0..K-1 in sorted order: (n,) int64 from integers or strings."""
    if client.dtype.kind not in "iuUS":
        raise UsageError(f"{where}: {name} is {client.dtype}; accepted are integers and strings")
    return np.unique(client, return_inverse=True)[1].astype(np.int64)


def _coarse_labels(where: str, name: str, coarse: np.ndarray) -> np.ndarray:
    """Checks the coarse labels (n,); returns them as int32."""
    if coarse.dtype.kind not in "iu":
        raise UsageError(f"{where}: {name} is {coarse.dtype}; accepted are integers")
    return coarse.astype(np.int32)


def _features(where: str, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The examples x (n, *features), rows (n,) of their data set, as float32 with a last axis of channels."""
    if x.dtype.kind not in "biuf":
        raise UsageError(f"{where}: x is {x.dtype}; accepted are numbers")
    pixels = x.dtype == np.uint8
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused below
        x = x.astype(np.float32)
    if pixels:
        x /= 255
    _check_finite(where, "x", x, rows)
    return x[..., None] if x.ndim in (1, 3) else x


def _check_finite(where: str, name: str, values: np.ndarray, rows: np.ndarray) -> None:
    bad = rows[~np.isfinite(values).reshape(len(values), -1).all(axis=1)]
    if bad.size:
        raise UsageError(f"{where}: {name} is NaN or infinite in {bad.size} rows, the first is row {bad[0]}")


def _standardize(x: np.ndarray, is_test: np.ndarray | None) -> None:
    """Shifts and scales x (n, *features) in place by what its non-test rows measure."""
    rows = np.arange(len(x)) if is_test is None else np.flatnonzero(~is_test)
    blocks = np.array_split(rows, len(rows) // 1024 + 1)  # no float64 copy of a whole image set
    axes = tuple(range(x.ndim - 1))
    count = len(rows) * x[0, ..., 0].size
    x -= (sum(x[block].sum(axes, dtype=np.float64) for block in blocks) / count).astype(np.float32)
    std = np.sqrt(sum(np.square(x[block], dtype=np.float64).sum(axes) for block in blocks) / count)
    x /= np.where(std > 0, std, 1).astype(np.float32)  # a constant feature becomes 0


READERS: dict[str, Callable[[_Request], Source]] = {
    "digits": _digits,
    "sine": _sine,
    "synthetic": _synthetic,
    "npz": _npz,
    "text": _text,
    "tfds": _tfds,
}
