"""What the entry points share: their flags, and what is built from them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import platform
import re
import socket
import subprocess
import sys
import time
import traceback
import typing
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import optax
from absl import app, flags, logging

from experiments import supervision
from pfljax import algorithms, data, models
from pfljax.core.types import Algorithm, RunError, UsageError
from pfljax.data import Federation, embedding, latent
from pfljax.engine import processes
from pfljax.engine.plan import ExecutionPlan, make_plan
from pfljax.evaluation.fine_tuning import fine_tuned
from pfljax.local.privacy import Privacy
from pfljax.local.problem import Problem
from pfljax.local.solver import Solver
from pfljax.local.training import scheduled
from pfljax.training import profiling
from pfljax.training.loop import Setup

FLAGS = flags.FLAGS
OPTIMIZERS = {"adam": optax.adam, "sgd": optax.sgd}
SCHEDULES = {
    "constant": None,
    "multistep": lambda: optax.piecewise_constant_schedule(
        1.0, {start: 0.1 for start in (FLAGS.rounds // 2, 3 * FLAGS.rounds // 4) if start}
    ),
    "exponential": lambda: optax.exponential_decay(1.0, 1, FLAGS.lr_decay),
}


# The flags of `data.make`.
DATA_FLAGS = (
    *("dataset", "data_file", "data_dir", "data_fraction", "standardize", "partition", "num_clients"),
    *("num_distributions", "dirichlet_alpha", "classes_per_client", "replacement", "official_test"),
    *("train_examples", "test_examples", "test_fraction", "validation_fraction", "text_stride", "targets"),
)


def define_data_flags(dataset: str = "digits") -> None:
    """On what: data set, partition, splits."""
    sources = "digits, sine, synthetic, npz or text (with --data_file) or tfds:NAME (with --data_dir)"
    flags.DEFINE_string("dataset", dataset, sources)
    flags.DEFINE_string(
        "data_file", None, "npz with x, y and, optionally, client or writer, is_test, coarse; or a text of NAME: lines"
    )
    flags.DEFINE_string("data_dir", None, "folder of prepared TFDS data sets")
    flags.DEFINE_float("data_fraction", 1.0, "share of the examples to use, in (0, 1]")
    flags.DEFINE_bool("standardize", True, "zero mean and unit variance for npz and TFDS data, from training examples")
    flags.DEFINE_string(
        "partition",
        "auto",
        "iid, label_groups, label_dirichlet, dirichlet, pathological, pairs, pachinko, latent or natural; auto: "
        "natural where the data name clients, else label_groups",
    )
    flags.DEFINE_integer("num_clients", 0, "K; 0: all clients of a natural partition, else 16")
    flags.DEFINE_integer(
        "num_distributions",
        2,
        "label groups of label_groups and label_dirichlet, clusters of latent, components of synthetic",
    )
    flags.DEFINE_float("dirichlet_alpha", 0.4, "concentration of the Dirichlet partitions and of synthetic mixtures")
    flags.DEFINE_integer("classes_per_client", 2, "classes a client, of pathological and pairs")
    flags.DEFINE_bool("replacement", False, "let clients share examples, for more clients than the examples allow")
    flags.DEFINE_bool("official_test", False, "test on the data's own test examples instead of 20 % of each client's")
    flags.DEFINE_integer("train_examples", 0, "cap on n_k, a client's training examples; 0: none")
    flags.DEFINE_integer("test_examples", 0, "cap on a client's test examples; 0: none (synthetic: draws 5,000)")
    flags.DEFINE_float("test_fraction", 0.2, "share of a client's examples to test on, where they are not given")
    flags.DEFINE_float(
        "validation_fraction",
        0.0,
        "share of a client's training examples for validation; 0.25 makes 60/20/20; 0.2 where a method needs them",
    )
    flags.DEFINE_integer("text_stride", 1, "characters from one window of a text to the next")
    flags.DEFINE_enum(
        "targets", "own", ["own", "shuffled"], "shuffled: deal the clients' (validation, test) parts among them"
    )
    flags.DEFINE_string(
        "embedding", "auto", "of latent: pixels or a --model to train; auto: vgg11 for images of 32 x 32 or more"
    )
    flags.DEFINE_integer("embedding_epochs", 5, "passes over the training images in training it", lower_bound=1)
    flags.DEFINE_float("unseen_clients", 0.0, "share of the clients kept out of training and adapted to afterwards")


def define_training_flags(rounds: int = 150) -> None:
    """What to train, and how; `rounds` is the default of --rounds."""
    flags.DEFINE_string(
        "model", "auto", f"{', '.join(models.NAMES)}; auto: linear for a regression, lstm for a text, else mlp"
    )
    flags.DEFINE_list("hidden", ["64"], "widths of the mlp's hidden layers")
    flags.DEFINE_list("channels", ["128", "128", "128"], "channels of the cnn's convolutions")
    flags.DEFINE_integer("rounds", rounds, "R, communication rounds", lower_bound=1)
    flags.DEFINE_integer("local_epochs", 1, "passes over a client's data in a round", lower_bound=1)
    flags.DEFINE_integer("local_steps", 0, "if positive, steps in a round instead of local_epochs", lower_bound=0)
    flags.DEFINE_integer("batch_size", 0, "B; 0: all of a client's data in one batch", lower_bound=0)
    flags.DEFINE_enum("optimizer", "adam", list(OPTIMIZERS), "of the clients, and of FedeRiCo's model owners")
    flags.DEFINE_float("learning_rate", 0.01, "of the optimizer")
    flags.DEFINE_float("momentum", 0.0, "of sgd")
    flags.DEFINE_float("weight_decay", 0.0, "added to the gradient, times the parameters")
    flags.DEFINE_enum(
        "lr_schedule",
        "constant",
        list(SCHEDULES),
        "multistep: / 10 at 1/2 and at 3/4 of the rounds; exponential: x --lr_decay a round",
    )
    flags.DEFINE_float("lr_decay", 0.99, "factor a round of --lr_schedule=exponential")
    flags.DEFINE_float(
        "dp_noise_multiplier", 0.0, "noise of private training, over --dp_clip_norm; pip install 'pfljax[privacy]'"
    )
    flags.DEFINE_float("dp_clip_norm", float("inf"), "to which the gradient of each example is clipped; inf: not")
    flags.DEFINE_float("dp_delta", 1e-5, "delta for which the privacy ledger states epsilon")
    flags.DEFINE_bool("keep_optimizer", False, "clients keep their optimizer's state for shared models over the rounds")
    flags.DEFINE_integer(
        "fine_tune_epochs", 0, "passes over its data with which each client tunes what is evaluated", lower_bound=0
    )
    flags.DEFINE_bool("common_init", True, "start all clients' own models from the same parameters")
    flags.DEFINE_float("participation", 1.0, "share of the clients in a round's cohort, in (0, 1]")
    flags.DEFINE_integer("eval_every", 10, "rounds between evaluations", lower_bound=1)
    flags.DEFINE_integer("checkpoint_every", 50, "least rounds between checkpoints (after evaluations)", lower_bound=1)
    for name, method in algorithms.METHODS.items():
        _define_config(name, method.config)


def define_device_flags(*, lists: bool = False) -> None:
    """Where and in which order clients are worked on; `lists`: several plans, chunks and numbers of devices."""
    plans = ["auto", "vmap", "map", "chunk"]
    if lists:
        flags.DEFINE_list("plan", ["auto"], f"how a device works on its clients: of {', '.join(plans)}")
        flags.DEFINE_list("chunk", ["8"], "numbers of clients at a time under --plan=chunk")
        flags.DEFINE_list("devices", ["0"], "numbers of devices to use; 0: all, and on a CPU one a core")
    else:
        flags.DEFINE_enum("plan", "auto", plans, "how a device works on its clients")
        flags.DEFINE_integer("chunk", 8, "clients at a time under --plan=chunk", lower_bound=1)
        flags.DEFINE_integer("devices", 0, "devices to use; 0: all, and on a CPU one a core", lower_bound=0)
    flags.DEFINE_enum(
        "exchange",
        "auto",
        ["auto", "gather", "ring"],
        "how clients' models reach others' devices: copied to all, or around the ring of devices; auto: what fits",
    )
    flags.DEFINE_enum(
        "client_store",
        "device",
        ["device", "host"],
        "where clients' state and data are between rounds; host: for more clients than the devices hold",
    )
    flags.DEFINE_string(
        "coordinator", None, "HOST:PORT of process 0 where several processes run together; auto: a TPU pod's or SLURM's"
    )
    flags.DEFINE_integer("num_processes", None, "how many processes run together", lower_bound=1)
    flags.DEFINE_integer("process_id", None, "which of them this is, from 0", lower_bound=0)
    flags.DEFINE_string("profile", None, "folder for a profiler's trace of a few rounds, and a line of what it shows")


def _define_config(name: str, config: type) -> None:
    """A flag NAME.KNOB for each field of a method's dataclass, with its line of the docstring."""
    helps = dict(re.findall(r"^ {4,8}(\w+): (.+)$", config.__doc__ or "", re.MULTILINE))
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        flag, text, hint = f"{name}.{field.name}", helps[field.name], hints[field.name]
        if typing.get_origin(hint) is typing.Literal:
            flags.DEFINE_enum(flag, field.default, list(typing.get_args(hint)), text)
        else:
            define = {
                int: flags.DEFINE_integer,
                float: flags.DEFINE_float,
                bool: flags.DEFINE_bool,
                str: flags.DEFINE_string,
            }[hint]
            define(flag, field.default, text)


def method_config(name: str) -> object:
    """A method's hyper-parameters from its flags."""
    config = algorithms.get(name).config
    return config(**{field.name: FLAGS[f"{name}.{field.name}"].value for field in dataclasses.fields(config)})


def check_knobs(names: Sequence[str]) -> None:
    """Raises UsageError for a knob that is set but belongs to no method of this run."""
    for flag in algorithms.METHODS:
        for field in dataclasses.fields(algorithms.METHODS[flag].config):
            knob = f"{flag}.{field.name}"
            if flag not in names and FLAGS[knob].present:
                raise UsageError(f"--{knob}: no method of this run reads it ({', '.join(names)})")


def set_up_devices(keep_compiled: bool, devices: int) -> None:
    """One XLA device a core on a CPU, and all processes together; must run before anything else touches JAX.

    Args:
        keep_compiled: Whether JAX keeps what it compiles, so that another seed or a second try need not.
        devices: The most that are used; 0: all.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jax.config.update("jax_num_cpu_devices", devices or cores)
    # Devices of one CPU process share a thread pool: with several dispatches in flight their collectives can starve.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if keep_compiled:
        folder = latent.cache_folder() / "compiled"
        with contextlib.suppress(OSError):  # a cache that cannot be written is no reason to stop
            folder.mkdir(parents=True, exist_ok=True)
            jax.config.update("jax_compilation_cache_dir", str(folder))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    if FLAGS.coordinator:
        join_processes()
    for name in ("num_processes", "process_id"):
        if FLAGS[name].value is not None and not FLAGS.coordinator:
            raise UsageError(f"--{name}: needs --coordinator=HOST:PORT")
    found = len(jax.local_devices())
    if devices > found:
        raise UsageError(f"--devices={devices}: accepted: 0 to {found}, the devices found")
    if FLAGS.profile:
        profiling.check(Path(FLAGS.profile))


def join_processes() -> None:
    """Brings all processes together, and sees to it that they were given the same flags; the first alone prints."""
    if FLAGS.coordinator != "auto":
        port = FLAGS.coordinator.rpartition(":")[2]
        if ":" not in FLAGS.coordinator or not port.isdigit() or not 0 < int(port) < 2**16:
            raise UsageError(f"--coordinator={FLAGS.coordinator}: accepted: HOST:PORT, or auto")
        if FLAGS.num_processes is None or FLAGS.process_id is None:
            raise UsageError("--coordinator: needs --num_processes and --process_id, or auto")
        if FLAGS.process_id >= FLAGS.num_processes:
            raise UsageError(f"--process_id={FLAGS.process_id}: accepted: 0 to {FLAGS.num_processes - 1}")
    # Libraries that connect processes write on standard output; what the command itself says goes by another way.
    nowhere, own = os.open(os.devnull, os.O_WRONLY), os.dup(1)
    os.dup2(nowhere, 1)
    if FLAGS.process_id == 0 and FLAGS.coordinator != "auto":
        with socket.socket() as taken:
            if taken.connect_ex(("localhost", int(port))) == 0:
                raise UsageError(f"--coordinator={FLAGS.coordinator}: the port is taken; name a free one")
    processes.start(FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id)
    sys.stdout = open(own if processes.is_first() else nowhere, "w", buffering=1)  # noqa: SIM115
    modules = FLAGS.flags_by_module_dict()  # where that of the command is known by its file
    own = [
        flag for module, found in modules.items() if module == sys.argv[0] or "experiments" in module for flag in found
    ]
    values = {flag.name: flag.value for flag in own}
    for name in ("process_id", "data_file", "data_dir"):  # places may be called otherwise on other hosts
        values.pop(name, None)
    processes.agree(values, "--")


def build_plan() -> ExecutionPlan:
    """The execution plan that the flags ask for."""
    return make_plan(FLAGS.plan, FLAGS.chunk, FLAGS.devices, FLAGS.exchange)


def build_data(seed: int) -> tuple[Federation, Federation | None]:
    """The clients that train, and those kept out of training (or None)."""
    embed = None
    if FLAGS.partition == "latent":
        widths = {"hidden": whole_numbers("hidden"), "channels": whole_numbers("channels")}
        embed = embedding.make(FLAGS.embedding, epochs=FLAGS.embedding_epochs, seed=seed, **widths)
    if not 0 <= FLAGS.unseen_clients < 1:
        raise UsageError(f"--unseen_clients={FLAGS.unseen_clients}: accepted: a share in [0, 1)")
    several = jax.process_count() > 1
    own = build_plan().own_rows
    make = functools.partial(data.make, **{name: FLAGS[name].value for name in DATA_FLAGS}, seed=seed, embed=embed)
    if not FLAGS.unseen_clients:
        federation, unseen = make(own=own if several else None), None
    else:
        federation, unseen = data.split_unseen(make(), FLAGS.unseen_clients, seed)
        if several:
            federation, unseen = (data.keep_own(each, own(each.num_clients)) for each in (federation, unseen))
    processes.agree({"partition": federation.index_digest}, "the ")
    return federation, unseen


# What a data set is about, where the user does not say otherwise: digits with few examples a client, so that
# collaboration matters, and in FedFomo's and pFedMB's partitions with as much of their settings as they bear; the sine
# as in FedeRiCo's Figure 1 (BUILD_NOTES.md says why these knobs); the synthetic mixture as in FedEM's Table 2; texts so
# that a few rounds on a CPU show something. "validated" is for runs with a method that needs validation examples: of 15
# too few would be left; and of 5 groups of two classes no one model suits all.
FEDFOMO_DIGITS = {
    "train_examples": 50,
    "optimizer": "sgd",
    "learning_rate": 0.03,
    "lr_schedule": "exponential",
    "weight_decay": 1e-4,
    "batch_size": 10,
    "local_epochs": 5,
    "rounds": 6,
    "eval_every": 1,
}
PFEDMB_DIGITS = {
    "train_examples": 30,
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "batch_size": 10,
    "local_epochs": 5,
    "rounds": 20,
    "eval_every": 2,
}
DEFAULTS = {
    "synthetic": {
        "official_test": True,
        "num_clients": 300,
        "num_distributions": 3,
        "model": "linear",
        "optimizer": "sgd",
        "learning_rate": 0.1,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "keep_optimizer": True,
        "lr_schedule": "multistep",
        "batch_size": 128,
        "rounds": 200,
    },
    "text": {
        "official_test": True,
        "text_stride": 80,
        "learning_rate": 0.003,
        "keep_optimizer": True,
        "batch_size": 16,
        "rounds": 20,
        "eval_every": 5,
    },
    "digits": {"train_examples": 15, "keep_optimizer": True},
    "digits, validated": {"train_examples": 25, "keep_optimizer": True, "num_distributions": 5},
    "digits, latent": FEDFOMO_DIGITS,
    "digits, pathological": FEDFOMO_DIGITS,
    "digits, pairs": PFEDMB_DIGITS,
    "sine": {"num_clients": 10, "learning_rate": 0.1, "federico.warmup": 75, "federico.tracking": "accumulated"},
}


VALIDATION_FRACTION = 0.2  # where a method of the run needs validation examples; all methods then have the same split


def set_defaults(names: Sequence[str]) -> None:
    """Gives flags that are not on the command line the defaults of the data, its partition and the run's methods."""
    validated = any(algorithms.METHODS[name].validates for name in names)
    kinds = [FLAGS.partition, *(["validated"] if validated else [])]
    found = [DEFAULTS[f"{FLAGS.dataset}, {kind}"] for kind in kinds if f"{FLAGS.dataset}, {kind}" in DEFAULTS]
    defaults = found[0] if found else DEFAULTS.get(FLAGS.dataset, {})
    if validated:
        defaults = defaults | {"validation_fraction": VALIDATION_FRACTION}
    for name, value in defaults.items():
        if not FLAGS[name].present:
            FLAGS[name].value = value


def whole_numbers(flag: str) -> tuple[int, ...]:
    """A list flag's positive whole numbers."""
    try:
        numbers = tuple(int(number) for number in FLAGS[flag].value)
    except ValueError:
        numbers = (0,)
    if min(numbers, default=1) < 1:
        raise UsageError(f"--{flag}={','.join(FLAGS[flag].value)}: accepted: positive numbers, separated by commas")
    return numbers


def build_model(federation: Federation) -> models.Model:
    """The clients' network."""
    name = FLAGS.model
    sequences = federation.train.y.ndim > 2
    if name == "auto":
        name = "lstm" if sequences else "linear" if federation.task == "regression" else "mlp"
    if sequences != (name == "lstm"):
        raise UsageError(f"--model={name}: accepted for {federation.name}: {'lstm' if sequences else 'all but lstm'}")
    shape = federation.train.x.shape[2:]
    widths = {"hidden": whole_numbers("hidden"), "channels": whole_numbers("channels")}
    return models.make(name, shape, federation.task, federation.num_classes, **widths)


def build_solver(model: models.Model) -> Solver:
    """How clients train."""
    if not FLAGS.learning_rate > 0:
        raise UsageError(f"--learning_rate={FLAGS.learning_rate}: accepted: above 0")
    if not 0 < FLAGS.lr_decay <= 1:
        raise UsageError(f"--lr_decay={FLAGS.lr_decay}: accepted: above 0, at most 1")
    if not 0 <= FLAGS.momentum < 1:
        raise UsageError(f"--momentum={FLAGS.momentum}: accepted: 0 to below 1")
    if FLAGS.momentum and FLAGS.optimizer != "sgd":
        raise UsageError(f"--momentum={FLAGS.momentum}: only --optimizer=sgd reads it")
    options = {"momentum": FLAGS.momentum} if FLAGS.momentum else {}
    optimizer = OPTIMIZERS[FLAGS.optimizer](FLAGS.learning_rate, **options)
    if FLAGS.weight_decay:
        optimizer = optax.chain(optax.add_decayed_weights(FLAGS.weight_decay), optimizer)
    optimizer = optax.with_extra_args_support(optimizer)
    if SCHEDULES[FLAGS.lr_schedule]:
        optimizer = scheduled(optimizer, SCHEDULES[FLAGS.lr_schedule]())
    privacy = Privacy(FLAGS.dp_noise_multiplier, FLAGS.dp_clip_norm, FLAGS.dp_delta)
    privacy.check()
    return Solver(model.loss, optimizer, FLAGS.batch_size, FLAGS.local_epochs, FLAGS.local_steps, privacy)


def cohort_size(num_clients: int) -> int:
    """S of K clients."""
    if not 0 < FLAGS.participation <= 1:
        raise UsageError(f"--participation={FLAGS.participation}: accepted: above 0, at most 1")
    return max(1, round(FLAGS.participation * num_clients))


def maker(name: str, model: models.Model, federation: Federation) -> Callable[[ExecutionPlan], Algorithm]:
    """ExecutionPlan -> the named method for this federation, with the method's flags; checks them at once."""
    solver, config, method = build_solver(model), method_config(name), algorithms.get(name)
    size = cohort_size(federation.num_clients)

    def make(plan: ExecutionPlan) -> Algorithm:
        problem = Problem(
            model,
            solver,
            plan,
            federation.num_clients,
            size,
            n_max=federation.train.y.shape[1],
            rounds=FLAGS.rounds,
            common_init=FLAGS.common_init,
            keep_optimizer=FLAGS.keep_optimizer,
            n_min=int(federation.train.size.min()),
        )
        return fine_tuned(problem, method.make(problem, config), FLAGS.fine_tune_epochs)

    if not make(build_plan()).by_rows and FLAGS.client_store == "host":
        raise UsageError(f"--client_store=host: {name} predicts with all clients' states at once; accepted: device")
    return make


def build_setup(name: str, federation: Federation, unseen: Federation | None, seed: int) -> Setup:
    """Everything that a run needs."""
    if FLAGS.client_store == "host" and jax.process_count() > 1:
        raise UsageError("--client_store=host: accepted with one process; with several their devices share the clients")
    if FLAGS.client_store == "host" and unseen is not None:
        raise UsageError(
            "--unseen_clients: accepted with --client_store=device, since newcomers may ask for all states"
        )
    model = build_model(federation)
    make = maker(name, model, federation)
    config = describe_run() | {"data": data.describe(federation)}
    config["flags"] = config["flags"] | {"algorithm": name, "seed": seed}
    return Setup(
        name=name,
        make=make,
        model=model,
        solver=build_solver(model),
        federation=federation,
        unseen=unseen,
        plan=build_plan(),
        rounds=FLAGS.rounds,
        cohort_size=cohort_size(federation.num_clients),
        eval_every=min(FLAGS.eval_every, FLAGS.rounds),
        checkpoint_every=min(FLAGS.checkpoint_every, FLAGS.rounds),
        seed=seed,
        config=config,
        client_store=FLAGS.client_store,
        profile=Path(FLAGS.profile) if FLAGS.profile else None,
    )


def describe_run() -> dict:
    """Flags, versions, device, commit and command of this process."""
    import flax
    import numpy

    module = sys.modules["__main__"].__spec__
    command = f"python -m {module.name}" if module else sys.argv[0]
    own = FLAGS.flags_by_module_dict()
    names = [flag.name for name, group in own.items() if name.startswith("experiments") for flag in group]
    command_of_commit = ["git", "rev-parse", "HEAD"]
    try:
        asked = subprocess.run(
            command_of_commit, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
        commit = asked.stdout.strip() or None
    except OSError:  # there is no git here
        commit = None
    device = jax.local_devices()[0]
    return {
        "flags": {name: FLAGS[name].value for name in sorted(names)},
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "flax": flax.__version__,
            "optax": optax.__version__,
            "numpy": numpy.__version__,
        },
        "device": f"{len(jax.local_devices())} x {device.device_kind} ({device.platform})",
        "git_commit": commit,
        "command": " ".join([command, *sys.argv[1:]]),
    }


def epsilon_text(values: Sequence[float | None]) -> str:
    """The mean of epsilons by the privacy ledger, where None stands for no bound."""
    return "∞" if None in values else f"{sum(values) / len(values):.2f}"


def main(
    run: Callable[[], None], *, keep_compiled: bool = True, devices: Callable[[], int] = lambda: FLAGS.devices
) -> None:
    """Parses the flags and runs; a user's mistake is one line and exit code 2, a failure one line and 1.

    Args:
        run: The command.
        keep_compiled: As in `set_up_devices`; no, where compiling is timed.
        devices: Tells how many devices the flags ask for.
    """

    def parse(argv: list[str]) -> list[str]:
        try:
            rest = FLAGS(argv)
            if len(rest) > 1:
                raise UsageError(f"{rest[1]}: not a flag; flags start with --")
            return rest
        except (flags.Error, UsageError) as error:
            _stop(str(error).split("\n")[0].removeprefix("ERROR:: "), 2)

    def start(_) -> None:
        logging.set_verbosity(logging.WARNING)
        if FLAGS.coordinator:
            if not supervision.is_watched():
                supervision.watch()
            supervision.end_with_the_watcher()
        try:
            set_up_devices(keep_compiled, devices())
            run()
        except UsageError as error:
            _stop(str(error), 2)
        except RunError as error:
            _stop(str(error), 1)
        except OSError as error:
            if jax.distributed.is_initialized() and isinstance(error, TimeoutError):
                _stop(device_failure(str(error)), 1)
            _stop(f"{error.filename or 'a file'}: {error.strerror or error}", 1)
        except jax.errors.JaxRuntimeError as error:
            _stop(device_failure(str(error)), 1)
        except Exception as error:
            if not jax.distributed.is_initialized():
                raise
            traceback.print_exc()
            _stop(f"unexpected: {error}", 1)  # at once: an orderly end would wait for the others
        except KeyboardInterrupt:
            hint = "; --resume goes on from the last checkpoint" if "resume" in FLAGS else ""
            print(f"error: interrupted{hint}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(130)  # taking Python down can crash in what XLA was interrupted in

    app.run(start, flags_parser=parse)


def device_failure(text: str) -> str:
    """What a user should know of an error of the devices or of the connection between processes."""
    first = text.strip().split("\n")[0][:300]
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        advice = "fewer clients at a time (--plan=chunk --chunk), a smaller --participation, or --client_store=host"
        return f"out of memory on a device: {advice} may help: {first}"
    if jax.process_count() > 1:
        return supervision.LOST_TEXT
    return f"a device failed; --resume goes on from the last checkpoint: {first}"


def _stop(message: str, code: int) -> typing.NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    if jax.distributed.is_initialized():  # whose orderly end would wait for the others
        sys.stdout.flush()
        if jax.process_index() == 0:
            time.sleep(1)  # the others, who may be ending for the same reason, need the first to say so
        os._exit(code)
    sys.exit(code)
