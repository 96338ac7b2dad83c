"""Training on a file larger than memory: resident memory, and the time of a pass beside the same data in memory.

    python -m experiments.streaming --folder=FOLDER --gigabytes=20
    python -m experiments.streaming --folder=FOLDER --gigabytes=2 --kinds=npy,arrayrecord,memory --turns=2

It writes random images of 32 x 32 x 3 bytes as x.npy (a file that is there is read), with 66 images to a client, and
trains FedAvg on cohorts of 100 clients. A pass visits as many clients as there are. For the kind arrayrecord, the same
images are written as TFDS writes them; --encoding and --writer say how. Resident memory is the process's largest since
the run before it, or since its imports, files' pages included (VmHWM). On a busy machine, the time that a round takes
of all cores tells more than the time that passes.
"""

from __future__ import annotations

import argparse
import io
import time
from pathlib import Path

import flax.linen as nn
import numpy as np
import optax

import pfljax as pfl
from pfljax.data import digest

EACH = 66
SHAPE = (32, 32, 3)
BLOCK = 6600


class Small(nn.Module):
    """A hidden layer of 32 on pixels divided by 255."""

    outputs: int | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32)(x.reshape(len(x), -1) / 255))
        return nn.Dense(self.outputs or 10)(x)


def write(folder: Path, gigabytes: float) -> None:
    """Writes x.npy, y.npy and client.npy; every block of 100 clients has one image in 16 that tells its class."""
    clients = int(gigabytes * 1e9 / (EACH * np.prod(SHAPE))) // 100 * 100
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    y = rng.integers(10, size=clients * EACH)
    np.save(folder / "y.npy", y)
    np.save(folder / "client.npy", np.repeat(np.arange(clients), EACH))
    with open(folder / "x.npy", "wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": (len(y), *SHAPE)}
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(y), BLOCK):
            images = rng.integers(128, size=(len(y[start : start + BLOCK]), *SHAPE), dtype=np.uint8)
            # a bright column
            images[np.arange(len(images)), :, y[start : start + BLOCK] * 3] += 100
            file.write(images.tobytes())


def write_records(folder: Path, encoding: str, options: str) -> None:
    """Writes the arrays in a folder as TFDS writes a data set with file_format=array_record."""
    import tensorflow_datasets as tfds
    from array_record.python.array_record_module import ArrayRecordWriter
    from PIL import Image
    from tensorflow_datasets.core.example_serializer import ExampleSerializer

    x, y, client = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("x", "y", "client"))
    of = tfds.features
    png = encoding == "png"
    image = (
        of.Image(shape=SHAPE, encoding_format="png")
        if png
        else of.Tensor(shape=SHAPE, dtype=np.uint8, encoding=encoding)
    )
    features = of.FeaturesDict(
        {"image": image, "label": of.ClassLabel(num_classes=10), "client": np.int64}
    )
    features.save_config(folder)
    serializer = ExampleSerializer(features.get_serialized_info())
    writer = ArrayRecordWriter(str(folder / "images-train.array_record-00000-of-00001"), options)
    for pixels, label, who in zip(x, y, client, strict=True):
        if png:
            Image.fromarray(pixels).save(stored := io.BytesIO(), "png")
            stored.seek(0)
        example = {"image": stored if png else pixels, "label": label, "client": who}
        writer.write(serializer.serialize_example(features.encode_example(example)))
    writer.close()


def status(name: str) -> float:
    """An entry of /proc/self/status, in MiB."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return int(line.split()[1]) / 1024


def measure(title: str, clients: pfl.Federation, cohort: int, rounds: int) -> None:
    """Trains `rounds` rounds after one that compiles, and prints the time of a pass."""
    begin = time.perf_counter()
    digest(clients)
    digested = time.perf_counter() - begin
    options = {"participation": cohort / clients.num_clients, "eval_clients": 100}
    execution = pfl.Execution(client_store="disk")
    local = pfl.LocalTraining(optax.sgd(0.05), batch_size=EACH)
    run = pfl.Run(pfl.FedAvg(), clients, Small(), local, execution=execution, **options)
    run.train(rounds=1, eval_every=1)
    before = run.train(rounds=2, eval_every=1).summary["last"]["seconds"]
    used = time.process_time()
    result = run.train(rounds=2 + rounds, eval_every=rounds)
    each = (result.summary["last"]["seconds"] - before) / rounds
    used = (time.process_time() - used) / rounds
    told = (
        f"{clients.num_clients:,} clients, digest {digested:.0f} s, {1e3 * each:.1f} ms per round"
    )
    told += f" ({1e3 * used:.1f} ms of all cores)"
    told += f", a pass {each * clients.num_clients / cohort:.0f} s, accuracy {result.accuracy:.3f}"
    print(f"{title}: {told}, resident {status('VmHWM'):.0f} MiB", flush=True)


def clients_of(kind: str, folder: Path) -> pfl.Federation:
    """The clients of a kind of file, or with their arrays in memory."""
    if kind != "memory":
        own = {"client": "client"} if kind == "arrayrecord" else {}
        return pfl.data.read(folder, format=kind, standardize=False, **own)
    x, y, client = (np.load(folder / f"{name}.npy") for name in ("x", "y", "client"))
    return pfl.Federation.from_arrays(x, y, client=client, standardize=False)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument(
        "--kinds", default="npy", help="npy, arrayrecord, memory: where the images are, in turns"
    )
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument(
        "--encoding", choices=("bytes", "none", "png"), default="bytes", help="of arrayrecord"
    )
    parser.add_argument(
        "--writer", default="group_size:1", help="options of arrayrecord's writer; those of TFDS"
    )
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=0, help="0: a pass")
    args = parser.parse_args()
    if not (args.folder / "x.npy").exists():
        write(args.folder, args.gigabytes)
    kinds = args.kinds.split(",")
    if "arrayrecord" in kinds and not (args.folder / "features.json").exists():
        write_records(args.folder, args.encoding, args.writer)
    print(
        f"{(args.folder / 'x.npy').stat().st_size / 1e9:.1f} GB, resident {status('VmRSS'):.0f} MiB",
        flush=True,
    )
    held = {}
    for _ in range(args.turns):
        for kind in kinds:
            Path("/proc/self/clear_refs").write_text("5")  # forgets the largest so far
            begin = time.perf_counter()
            held[kind] = held.get(kind) or clients_of(kind, args.folder)
            title = f"{kind}, opened in {time.perf_counter() - begin:.0f} s"
            measure(
                title, held[kind], args.cohort, args.rounds or held[kind].num_clients // args.cohort
            )


if __name__ == "__main__":
    main()
