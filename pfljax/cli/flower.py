"""Writes a run as a Flower app: a folder that `flwr run` starts on nodes with their own data.

    pfljax flower apps/ditto --method=ditto --dataset=table --data_file=example.csv --data_label=outcome
    flwr run apps/ditto

Takes the flags of `pfljax train`, but trains nothing. The data says what examples look like and how many clients there
are; no example gets into the app. A node reads its own file: flower-supernode --node-config='partition-id=0
data="/srv/clinic.csv"'. Without one it plays a client of a data set that pfljax makes itself, such as digits.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import pprint
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags as absl_flags

from pfljax import api, data, flower
from pfljax.cli import again, build, train
from pfljax.cli.launch import Command
from pfljax.cli.settings import FlagError, Settings
from pfljax.contract.errors import ArgumentError
from pfljax.contract.pooled import is_pooled
from pfljax.contract.types import Split
from pfljax.data import Federation, columns, partitions, sources
from pfljax.data.sources.files import names_in
from pfljax.data.sources.source import Scaling
from pfljax.flower.apps import NEWEST, OLDEST, check_version
from pfljax.flower.deployment import Deployment, Rows
from pfljax.folder import files
from pfljax.settings import own_files, recorded
from pfljax.settings.method import METHODS
from pfljax.training.evaluating import USUAL
from pfljax.training.saving import AUTO

PACKAGE = Path(api.__file__).resolve().parents[1]
# Reason -> flags that do not apply.
REFUSED = {
    "nothing is trained here": ("resume", "profile", "tracker", "coordinator", "checkpoint_every"),
    "a node is one client, on its own device": (
        "plan",
        "chunk",
        "devices",
        "model_devices",
        "exchange",
        "client_store",
    ),
    "nodes' data are their own": ("drift",),
    "nodes with newcomer=true are the unseen clients": ("unseen",),
    "all clients are scored": ("eval_clients",),
    "the run has all its rounds": ("patience",),
}
OWN = ("model", "loss", "score")  # flags that may name a file of the user's
APP_FILES = ("pyproject.toml", "task.py", "client_app.py", "server_app.py")
TASK = '''"""The run that the server and its nodes play, as `{command}` wrote it."""

from pathlib import Path

from pfljax.cli import flower

FLAGS = {flags}

CLIENTS = {clients}


def make_run():
    """Returns the run, with clients that have no examples."""
    return flower.make_run(FLAGS, CLIENTS, Path(__file__).parent)
'''
CLIENT_APP = '''"""A node's side: one client, which reads its own data."""

import pfljax as pfl
from pfljax.cli import flower
from task import FLAGS, make_run

app = pfl.flower.client_app(make_run(), read=flower.reader(FLAGS))
'''
SERVER_APP = '''"""The server's side."""

import pfljax as pfl
from task import FLAGS, make_run

app = pfl.flower.server_app(
    make_run(), rounds=FLAGS["rounds"], eval_every=FLAGS["eval_every"]
)
'''
PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "{method} of pfljax {version}"
license = "Apache-2.0"
dependencies = ["pfljax[flower]>={version}", "flwr>={oldest},<{after}"]

[tool.flwr.app]
publisher = "pfljax"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]
rounds = {rounds}
eval-every = {eval_every}
out = ""  # a folder on the server's machine, for results; "": none
scaling = "federated"  # or "node": inputs are standardized by each node's own examples
start = 600.0  # seconds that the server waits for all clients
answer = 3600.0  # seconds that it waits for an answer
rejoin = 0.0  # seconds that a round waits for a client whose node is gone
"""


def define(registry: absl_flags.FlagValues) -> None:
    train.define(registry)


def run(settings: Settings) -> dict[str, Any]:
    check_version()
    names = build.read_methods(settings)
    for why, refused in REFUSED.items():
        for flag in refused:
            settings.refuse(flag, why)
    if not settings.out:
        raise FlagError("OUT: expected a new folder, such as pfljax flower apps/ditto")
    out = Path(settings.out)
    files.check_new(out, "out", "a new folder")
    settings = settings.with_defaults(names)
    settings.check_read()
    trial = build.Trial(settings.seed, settings.split)
    clients, _ = build.build_clients(settings, trial.data_seed)
    if settings.data_text or settings.dataset == "text":
        flag = "data_text" if settings.data_text else "dataset"
        text = "accepted in an app: no texts; each node's file would number its characters anew"
        raise settings.error(flag, text)
    if not is_array(clients.train.x):
        raise settings.error("dataset", "accepted in an app: examples that are one array each")

    # What server and nodes will build, to find mistakes now.
    values = files.plain(build.config(settings, names[0], trial)["flags"])
    flags = flags_of_app(values, names[0])
    if flags["eval_every"] == AUTO:  # nobody knows the nodes' numbers of examples
        flags["eval_every"] = USUAL
    flags["eval_every"] = int(flags["eval_every"])
    flags, own = with_names_in_app(flags)
    form = form_of(clients)
    with tempfile.TemporaryDirectory() as folder:
        for file_name, content in own.items():
            files.write_text(Path(folder) / file_name, content)
        run_of_app = make_run(flags, form, folder)
        experiment = run_of_app.experiment.with_rounds(settings.rounds)
        Deployment(experiment, Rows(1, form["validation"]))

    write(out, names[0], flags, form, own)
    print(f"{names[0]} for {clients.num_clients} clients: {out}")
    print(f"start it with: flwr run {out}")
    return {
        "out": str(out),
        "method": names[0],
        "num_clients": clients.num_clients,
        "rounds": settings.rounds,
        "files": sorted([*APP_FILES, *own]),
    }


def with_names_in_app(flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The flags of an app whose own files are next to its others, and the content of these files, by name.

    A file's own imports from its folder are in the app, too.

    Raises:
        ArgumentError: if a file cannot be loaded, or has the name of another one.
    """
    flags = dict(flags)
    paths: list[tuple[str, Path]] = []

    def in_app(flag: str, text: str) -> str:
        if not own_files.is_file_and_name(text):
            return text
        own_files.load(flag, text)
        file, _, name = text.rpartition(":")
        path = Path(file).expanduser().resolve()
        paths.append((flag, path))
        return f"{path.name}:{name}"

    for flag in OWN:
        if flags[flag]:
            flags[flag] = in_app(flag, flags[flag])
    flags["metrics"] = [in_app("metrics", text) for text in flags["metrics"]]
    own_method = METHODS[flags["method"]]
    file = recorded.file_of(own_method.__module__)
    if file and not Path(file).is_relative_to(PACKAGE):
        flags["own_method"] = in_app("method", f"{file}:{own_method.__qualname__}")

    for flag, path in list(paths):
        for module in list(sys.modules.values()):
            other = getattr(module, "__file__", None)
            if (
                other
                and Path(other).suffix == ".py"
                and Path(other).resolve().parent == path.parent
            ):
                paths.append((flag, Path(other).resolve()))
    contents: dict[str, str] = {}
    for flag, path in dict.fromkeys(paths):
        content = path.read_text()
        if path.name in APP_FILES or contents.get(path.name, content) != content:
            raise ArgumentError(flag, "the app has another file of this name", path.name)
        contents[path.name] = content
    return flags, contents


def with_own_files(flags: Mapping[str, Any], folder: str | Path) -> dict[str, Any]:
    """The flags of an app with the paths of its own files; registers a method of the user's."""
    flags = dict(flags)

    def path_of(text: str) -> str:
        return f"{folder}/{text}" if own_files.is_file_and_name(text) else text

    for flag in OWN:
        if flags[flag]:
            flags[flag] = path_of(flags[flag])
    flags["metrics"] = [path_of(text) for text in flags["metrics"]]
    if "own_method" in flags and flags["method"] not in METHODS:
        own_files.load_method(path_of(flags["own_method"]))
    return flags


def write(
    out: Path,
    method: str,
    flags: Mapping[str, Any],
    form: Mapping[str, Any],
    own: Mapping[str, str],
) -> None:
    """Writes the app's files, and the user's own ones."""
    name = f"pfljax-{method.replace('_', '-')}"
    project = PROJECT.format(
        name=name,
        method=method,
        version=importlib.metadata.version("pfljax"),
        oldest=".".join(map(str, OLDEST)),
        after=f"{NEWEST[0]}.{NEWEST[1] + 1}",
        rounds=flags["rounds"],
        eval_every=flags["eval_every"],
    )
    shown_flags = pprint.pformat(dict(flags), sort_dicts=True)
    shown_form = pprint.pformat(dict(form), sort_dicts=False)
    task = TASK.format(command=build.command(), flags=shown_flags, clients=shown_form)
    contents = {
        "pyproject.toml": project,
        "task.py": task,
        "client_app.py": CLIENT_APP,
        "server_app.py": SERVER_APP,
        **own,
    }
    for file_name, content in contents.items():
        files.write_text(out / file_name, content)


def flags_of_app(values: Mapping[str, Any], method: str) -> dict[str, Any]:
    """The flags that an app needs, as literals of Python: none of other methods, and no paths of this machine."""
    flags: dict[str, Any] = {}
    for name, value in values.items():
        owner, dot, _ = name.partition(".")
        if dot and owner != method:
            continue
        flags[name] = str(value) if isinstance(value, Path) else value
    return flags | {"out": None, "data_file": "", "data_dir": ""}


def is_array(x: Any) -> bool:
    """Whether examples are one array."""
    return is_pooled(x) or isinstance(x, np.ndarray)


def form_of(clients: Federation) -> dict[str, Any]:
    """What clients' examples look like, as literals of Python."""
    x = clients.inputs
    y = clients.train.y
    scaling = None if clients.scaling is None else list(np.shape(clients.scaling.mean))
    return {
        "num_clients": clients.num_clients,
        "name": clients.name,
        "task": str(clients.task),
        "num_classes": clients.num_classes,
        "class_names": list(clients.class_names),
        "feature_names": list(clients.feature_names),
        "tokens": clients.tokens,
        "x": {"shape": list(x.shape), "dtype": str(np.dtype(x.dtype))},
        "y": {"shape": list(y.shape[2:]), "dtype": str(np.dtype(y.dtype))},
        "validation": int(clients.validation.y.shape[1] > 0),
        "scaling": scaling,
    }


def make_run(
    flags: Mapping[str, Any], form: Mapping[str, Any], folder: str | Path = "."
) -> api.Run:
    """Returns the run of an app, with clients that have one example of zeros each.

    Args:
        flags: The flags of `pfljax flower`.
        form: What clients' examples look like.
        folder: The app's folder, which has the files that flags name.
    """
    flags = with_own_files(flags, folder)
    settings = again.settings_of({"flags": dict(flags)}).replace(devices=1)
    clients = stand_ins(form)
    return build.build_run(
        settings, settings.method, (clients, None), again.trial_of({"flags": flags})
    )


def stand_ins(form: Mapping[str, Any]) -> Federation:
    """Clients without examples of their own: zeros of the right form."""
    num_clients = form["num_clients"]

    def split(rows: int) -> Split:
        x = np.zeros((num_clients, rows, *form["x"]["shape"]), form["x"]["dtype"])
        y = np.zeros((num_clients, rows, *form["y"]["shape"]), form["y"]["dtype"])
        return Split(x, y, np.full((num_clients,), rows, np.int32))

    scaling = None
    if form["scaling"] is not None:
        scaling = Scaling(np.zeros(form["scaling"]), np.ones(form["scaling"]))
    return Federation(
        train=split(1),
        validation=split(form["validation"]),
        test=split(1),
        group=None,
        task=form["task"],
        num_classes=form["num_classes"],
        name=form["name"],
        class_names=tuple(form["class_names"]),
        feature_names=tuple(form["feature_names"]),
        tokens=form["tokens"],
        scaling=scaling,
    )


def reader(flags: Mapping[str, Any]) -> flower.Read:
    """Returns what reads the data of an app's node.

    Entries of a node's configuration: `data`, its file, in the format of --dataset; and `client`, the name of its
    client, if the file has several. Without `data`, a data set that pfljax makes itself is made again, and the node
    plays client `partition-id` of it.
    """
    settings = again.settings_of({"flags": dict(flags)})
    seed = again.trial_of({"flags": flags}).data_seed

    def read(config: flower.NodeConfig, clients: Federation) -> Federation:
        path = config.get("data")
        if path is None and settings.dataset in sources.FORMATS:
            text = "the node has no data; expected its file in the node-config"
            raise ArgumentError("data", f'{text}, such as data="/srv/clinic.csv"')
        if path is None:
            federation, _ = build.build_clients(settings, seed)
            return flower.client_of_run(config, federation)
        if not Path(str(path)).exists():
            raise ArgumentError("data", "no such file on the node", path)
        file_settings = settings.replace(data_file=str(path), task=str(clients.task))
        source = read_source(file_settings, seed, clients, config)
        if source.client is None:
            source = dataclasses.replace(source, client=np.zeros(len(source.y), np.int64))
        splits = file_settings.make(data.Splits)
        federation = data.load(source, partitions.Natural(), splits, seed=seed)
        return flower.one_client(federation, number_in(federation, config))

    return read


def read_source(
    settings: Settings, seed: int, clients: Federation, config: flower.NodeConfig
) -> sources.Source:
    """The examples in a node's file; a table has the columns of the run's clients.

    A file without the column of --data_client is that of one client.
    """
    known = clients.feature_names
    if known:
        categorical = names_in(settings.data_categorical)
        numbers = [name for name in known if name.partition("=")[0] not in categorical]
        if not any("," in name for name in numbers):
            settings = settings.replace(data_features=",".join(numbers))
    try:
        source = build.build_source(settings, seed)
    except ArgumentError as error:
        if error.argument != "client" or "client" in config:
            raise
        source = build.build_source(settings.replace(data_client=""), seed)
    return columns.like(source, known, "data")


def number_in(federation: Federation, config: flower.NodeConfig) -> int:
    """The node's client among those of its file."""
    if federation.num_clients == 1:
        return 0
    name = config.get("client")
    if name is None:
        text = f"has {federation.num_clients} clients; expected client=NAME in the node-config"
        raise ArgumentError("data", text, config["data"])
    return federation.client_number(name)


def no_devices(settings: Settings) -> int:
    """Nothing is computed."""
    del settings
    jax.config.update("jax_platforms", "cpu")
    return 1


COMMAND = Command(__doc__ or "", define, run, devices=no_devices, listed="out")
