"""The flags of the commands, by group. A command registers those that it reads with an absl `FlagValues` of its own."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import flags

import pfljax.algorithms  # noqa: F401  (registers the methods)
from pfljax import models
from pfljax.algorithms.common.attacks import KINDS as ATTACKS
from pfljax.algorithms.common.robust import Aggregator
from pfljax.algorithms.common.sampling import Sampler
from pfljax.core.method import METHODS, out_of_range, value_type
from pfljax.data.sources.builtin import SyntheticLabels
from pfljax.local.augmentation import Augment

WHAT, DATA, HOW, RUNS = "What to train", "On what", "How", "Which runs"
OPTIMIZERS = ("adam", "sgd")
SCHEDULES = ("constant", "multistep", "exponential")
CLASS_WEIGHTS = ("none", "inverse")
PLANS = ("auto", "vmap", "map", "chunk")
PARTITIONS = (
    *("auto", "iid", "label_groups", "label_dirichlet", "dirichlet", "pathological", "pairs", "pachinko"),
    *("latent", "natural"),
)
# The flags of the library's arguments that are called otherwise there.
FLAG_OF = {
    "groups": "num_distributions",
    "balanced": "balanced_groups",
    "clusters": "num_distributions",
    "components": "num_distributions",
    "alpha": "dirichlet_alpha",
    "classes": "classes_per_client",
    "file": "data_file",
    "share": "unseen_clients",
    "fraction": "data_fraction",
    "stride": "text_stride",
    "epochs": "local_epochs",
    "steps": "local_steps",
    "noise_multiplier": "dp_noise_multiplier",
    "clip_norm": "dp_clip_norm",
    "delta": "dp_delta",
    "candidates": "sampler_candidates",
    "algorithm": "algorithms",
    "seed": "seeds",
}
IMPLIED = {"tune": "0.01,0.03,0.1,0.3,1,3"}  # values of flags that are given without one
MOST_DEVICES = 1024
MOST = 2**31 - 1  # of whole numbers, which become 32-bit integers on the devices
# Flags that are read only where another has one of some values, or one of several others.
READ_WITH = {
    "lr_decay": {"lr_schedule": ("exponential",)},
    "momentum": {"optimizer": ("sgd",)},
    "channels": {"model": ("cnn",), "partition": ("latent",)},
    "hidden": {"model": ("auto", "mlp"), "partition": ("latent",)},
    "embedding": {"partition": ("latent",)},
    "embedding_epochs": {"partition": ("latent",)},
    "classes_per_client": {"partition": ("pathological", "pairs")},
    "balanced_groups": {"partition": ("auto", "label_groups", "label_dirichlet")},
    "text_stride": {"dataset": ("text",)},
    "standardize": {"dataset": ("npz", "tfds")},
    "test_fraction": {"official_test": ("False",)},
    "chunk": {"plan": ("chunk",)},
    "sampler_candidates": {"sampler": ("power_of_choice",)},
    "aggregator_trim": {"aggregator": ("trimmed_mean", "krum")},
    "attackers": {"attack": ("label_flip", "sign_flip", "noise", "scale")},
    "attack_strength": {"attack": ("sign_flip", "noise", "scale")},
}
METHOD_FLAGS = ("algorithm", "algorithms")  # which name methods


class Text(flags.ArgumentParser):
    """Reads a text that is not empty."""

    accepted = "a text that is not empty"

    def parse(self, argument: Any) -> str:
        """The text; raises ValueError where there is none."""
        if not str(argument).strip():
            raise ValueError(f"accepted: {self.accepted}")
        return str(argument)


class SwitchOr(flags.BooleanParser):
    """Reads true, false, or a word."""

    def __init__(self, word: str):
        super().__init__()
        self.word, self.accepted = word, f"true, false or {word}"

    def parse(self, argument: Any) -> Any:
        """The value; raises ValueError where it is not accepted."""
        if argument == self.word:
            return argument
        try:
            return super().parse(argument)
        except ValueError:
            raise ValueError(f"accepted: {self.accepted}") from None


class Real(flags.FloatParser):
    """Reads a number within limits."""

    def __init__(self, limits: dict[str, Any]):
        super().__init__()
        self.limits = limits

    @property
    def accepted(self) -> str:
        """What is accepted, in words."""
        return str(out_of_range(math.nan, self.limits))

    def parse(self, argument: Any) -> float:
        """The number; raises ValueError where it is not accepted."""
        value = super().parse(argument)
        if out_of_range(value, self.limits):
            raise ValueError(f"accepted: {self.accepted}")
        return value


class Several(flags.ListParser):
    """Reads values separated by commas: texts, numbers within limits, or some of a few words."""

    def __init__(self, of: Any, distinct: bool, empty: bool, limits: dict[str, Any]):
        """As `Group.several`."""
        super().__init__()
        self.kind, self.words = (of, ()) if of in (str, int, float) else (str, tuple(of))
        self.distinct, self.empty, self.limits = distinct, empty, limits

    @property
    def accepted(self) -> str:
        """What is accepted, in words."""
        limits = {name: limit for name, limit in self.limits.items() if limit != MOST}  # which need not be said
        within = f" {out_of_range(math.nan, limits)}" if limits else ""
        within = within if not within or "above" in within else f" of{within}"
        what = {str: "values", int: "whole numbers", float: "numbers"}[self.kind] + within
        what = ", ".join(self.words) or f"{'different ' * self.distinct}{what}"
        return f"{what}{', each once' * bool(self.words)}, separated by commas{', or none' * self.empty}"

    def parse(self, argument: Any) -> list[str]:
        """The values, as texts; raises ValueError where one is not accepted."""
        texts = super().parse(argument)
        values: list[Any] = [self.kind(text) for text in texts]
        wrong = any(text not in self.words if self.words else not text for text in texts)
        wrong |= self.kind is not str and any(out_of_range(value, self.limits) for value in values)
        if wrong or not (values or self.empty) or (self.distinct and len(set(values)) < len(values)):
            raise ValueError(f"accepted: {self.accepted}")
        return texts


class Rates(flags.ListParser):
    """Reads learning rates of methods: METHOD:RATE, separated by commas."""

    accepted = "pairs such as fedavg:0.1, of different methods and rates above 0"

    def parse(self, argument: Any) -> list[str]:
        """The pairs, as texts; raises ValueError where one is not accepted."""
        pairs = super().parse(argument)
        methods, _, rates = zip(*(pair.partition(":") for pair in pairs), strict=True) if pairs else ((), (), ())
        if not set(methods) <= set(METHODS) or len(set(methods)) < len(methods):
            raise ValueError(f"accepted: {self.accepted}")
        if any(out_of_range(float(rate), {"above": 0}) for rate in rates):
            raise ValueError(f"accepted: {self.accepted}")
        return pairs


class Group(NamedTuple):
    """Registers flags under a heading of the help; a heading that is a method's name holds its knobs."""

    heading: str
    registry: flags.FlagValues

    @property
    def _where(self) -> dict[str, Any]:
        return {"flag_values": self.registry, "module_name": self.heading}

    def text(self, name: str, default: str | None, help: str) -> None:
        """A string; None if it is not given."""
        parser = flags.ArgumentParser() if default == "" else Text()
        flags.DEFINE(parser, name, default, help, serializer=flags.ArgumentSerializer(), **self._where)

    def whole(self, name: str, default: int | None, help: str, least: int | None = None, most: int = MOST) -> None:
        """A whole number."""
        flags.DEFINE_integer(name, default, help, lower_bound=least, upper_bound=most, **self._where)

    def real(self, name: str, default: float | None, help: str, **limits: Any) -> None:
        """A number; None if it is not given. `limits` are as for a knob."""
        parser = Real(limits)
        help += f"; accepted: {parser.accepted}" if limits else ""
        flags.DEFINE(parser, name, default, help, serializer=flags.ArgumentSerializer(), **self._where)

    def switch(self, name: str, default: bool | None, help: str) -> None:
        """true or false; None if it is not given."""
        flags.DEFINE_bool(name, default, help, **self._where)

    def switch_or(self, name: str, default: bool, word: str, help: str) -> None:
        """true, false, or a word."""
        parser, serializer = SwitchOr(word), flags.ArgumentSerializer()
        flag = flags.Flag(parser, serializer, name, default, f"{help}; accepted: {parser.accepted}", boolean=True)
        flags.DEFINE_flag(flag, **self._where)

    def choice(self, name: str, default: Any, accepted: Sequence[str], help: str) -> None:
        """One of several words."""
        flags.DEFINE_enum(name, default, list(accepted), help, **self._where)

    def several(
        self,
        name: str,
        default: Sequence[str],
        help: str,
        of: type | Sequence[str] = str,
        *,
        distinct: bool = True,
        empty: bool = False,
        **limits: Any,
    ) -> None:
        """Values separated by commas.

        Args:
            name: The flag's name.
            default: Its default.
            help: One line.
            of: int, float, or the words that are accepted; str: any text.
            distinct: Whether they must differ.
            empty: Whether there may be none.
            limits: Of the numbers, as for a knob.
        """
        limits = {"at_least": 1, "at_most": MOST, **limits} if of is int else limits
        self.listed(name, default, help, Several(of, distinct, empty, limits))

    def listed(self, name: str, default: Sequence[str], help: str, parser: flags.ListParser) -> None:
        """Values separated by commas, read by a parser of their own."""
        flags.DEFINE(parser, name, list(default), help, serializer=flags.CsvListSerializer(","), **self._where)

    def repeated(self, name: str, help: str) -> None:
        """A flag that may be there several times, each with a value of its own."""
        flags.DEFINE_multi_string(name, [], help, **self._where)
        self.registry[name].help = help  # without what absl adds


def define_data(registry: flags.FlagValues, dataset: str = "digits") -> None:
    """On what: data set, partition, splits."""
    add = Group(DATA, registry)
    add.text(
        "dataset", dataset, "digits, sine, synthetic, npz or text (with --data_file), or tfds:NAME (with --data_dir)"
    )
    add.text(
        "data_file",
        None,
        "npz: x, y and, if you like, client or writer, is_test, coarse; text: a play of NAME: lines",
    )
    add.text("data_dir", None, "folder of prepared TensorFlow data sets")
    add.real("data_fraction", 1.0, "share of the examples to use", above=0, at_most=1)
    add.switch("standardize", True, "scale npz and tfds data to mean 0 and variance 1, from the training examples")
    add.choice(
        "partition",
        "auto",
        PARTITIONS,
        "who has which examples; auto is natural where the data name clients, else label_groups (iid for a regression)",
    )
    add.whole("num_clients", 0, "number of clients K; 0 is all clients of a natural partition, else 16", least=0)
    add.whole(
        "num_distributions",
        2,
        "number of label groups (label_groups, label_dirichlet), of clusters (latent) or of components (synthetic)",
        least=1,
    )
    add.switch("balanced_groups", True, "give label groups equally many clients; off: draw each client's group")
    add.real("dirichlet_alpha", 0.4, "concentration of the Dirichlet partitions and of synthetic mixtures", above=0)
    add.whole("classes_per_client", 2, "number of classes per client (pathological, pairs)", least=1)
    add.choice(
        "synthetic.labels",
        "mixture",
        typing.get_args(SyntheticLabels),
        "published is the data of FedEM's authors, whose generator has a slip: a quarter of the labels are constant",
    )
    _define_splits(add)
    add.text(
        "embedding",
        "auto",
        "what latent clusters: pixels, classes, or the features of a --model trained for it; auto is pixels below "
        "32 x 32, else classes where there are as many distributions, else vgg11",
    )
    add.whole("embedding_epochs", 5, "number of epochs for which the embedding is trained", least=1)
    add.real(
        "unseen_clients",
        0.0,
        "share of the clients kept out of training, and scored afterwards",
        at_least=0,
        below=1,
    )


def _define_splits(add: Group) -> None:
    """How many examples a client has, and of which parts."""
    add.switch("replacement", False, "let clients share examples, for more clients than there are examples for")
    text = "test on the data set's own test examples, not on a share of each client's"
    add.switch("official_test", False, f"{text}; on for an npz file with is_test, unless --test_fraction is given")
    add.whole("train_examples", 0, "most training examples per client; 0 is no limit", least=0)
    add.whole("test_examples", 0, "most test examples per client; 0 is no limit (synthetic draws 5,000)", least=0)
    add.real(
        "test_fraction",
        0.2,
        "share of a client's examples to test on, without --official_test",
        above=0,
        below=1,
    )
    add.real(
        "validation_fraction",
        0.0,
        "share of a client's training examples to validate on; 0.2 where a method needs them",
        at_least=0,
        below=1,
    )
    add.whole("text_stride", 1, "number of characters from one window of a text to the next", least=1)
    add.choice("targets", "own", ["own", "shuffled"], "shuffled deals the clients' validation and test parts anew")


def define_training(registry: flags.FlagValues, rounds: int = 150) -> None:
    """What to train and how; `rounds` is the default of --rounds. Every registered method adds its knobs."""
    add = Group(WHAT, registry)
    add.text(
        "model",
        "auto",
        f"{', '.join(models.NAMES)}, or FILE.py:NAME, a callable of your own that takes num_classes; "
        "auto is linear for a regression, lstm for a text, else mlp",
    )
    add.several("hidden", ["64"], "widths of the mlp's hidden layers", int, distinct=False, empty=True)
    channels = ["128", "128", "128"]
    add.several("channels", channels, "numbers of channels of the cnn's convolutions", int, distinct=False)
    add.whole("rounds", rounds, "number of communication rounds R", least=1)
    add.whole("local_epochs", 1, "number of epochs over a client's data in a round", least=1)
    add.whole("local_steps", 0, "number of steps in a round, in place of --local_epochs; 0 is by epochs", least=0)
    add.whole("batch_size", 0, "examples per mini-batch B; 0 is all of a client's data", least=0)
    add.choice("augment", "none", typing.get_args(Augment), "random crops and flips of the images that are trained on")
    add.choice("optimizer", "adam", OPTIMIZERS, "optimizer of the clients, and of FedeRiCo's model owners")
    add.real("learning_rate", 0.01, "learning rate", above=0)
    rates = "METHOD:RATE, of methods that have another one; not read with --learning_rate"
    add.listed("learning_rates", [], rates, Rates())
    add.real("momentum", 0.0, "momentum of sgd", at_least=0, below=1)
    add.real("weight_decay", 0.0, "multiple of the parameters that is added to their gradient", at_least=0)
    add.choice(
        "lr_schedule",
        "constant",
        SCHEDULES,
        "multistep divides the rate by 10 at 1/2 and at 3/4 of the rounds; exponential multiplies it by --lr_decay",
    )
    add.real("lr_decay", 0.99, "factor per round of --lr_schedule=exponential", above=0, at_most=1)
    add.choice(
        "class_weights",
        "none",
        CLASS_WEIGHTS,
        "weights of the classes in the training loss; inverse: by inverse frequency, at most that of an average class",
    )
    add.switch("keep_optimizer", False, "keep each client's optimizer state for shared models from round to round")
    add.switch(
        "common_init",
        None,
        "start clients' models from the same parameters; by default yes, but no for local and both federico",
    )
    add.real("participation", 1.0, "share of the clients in a round's cohort", above=0, at_most=1)
    add.whole("eval_clients", 0, "number of clients that are scored, a uniform sample of them; 0 is all", least=0)
    add.whole("fine_tune_epochs", 0, "epochs for which each client tunes the evaluated model on its data", least=0)
    _define_privacy(add)
    _define_server(add)
    for name, method in METHODS.items():
        _define_knobs(Group(name, registry), method)


def _define_privacy(add: Group) -> None:
    """Private training."""
    add.real(
        "dp_noise_multiplier",
        0.0,
        "noise of private training, over --dp_clip_norm; needs pip install 'pfljax[privacy]'",
        at_least=0,
    )
    add.real(
        "dp_clip_norm",
        float("inf"),
        "norm to which each example's gradient is clipped; inf is no clipping",
        above=0,
        infinite=True,
    )
    add.real("dp_delta", 1e-5, "delta for which the privacy ledger states epsilon", above=0, below=1)


def _define_server(add: Group) -> None:
    """What surrounds the method: cohorts, aggregation, attackers."""
    add.choice(
        "sampler",
        "uniform",
        typing.get_args(Sampler),
        "how a round's cohort is drawn: weighted by numbers of examples, or of so drawn candidates those of most loss",
    )
    add.whole("sampler_candidates", 0, "candidates of power_of_choice; 0 is twice as many as take part", least=0)
    add.choice("aggregator", "mean", typing.get_args(Aggregator), "what the server makes of the models that come back")
    add.real(
        "aggregator_trim",
        0.2,
        "share of attackers that trimmed_mean and krum expect",
        at_least=0,
        below=0.5,
    )
    add.choice("attack", "none", ATTACKS, "what attackers do; they are not scored")
    add.real(
        "attackers",
        0.2,
        "share of the clients that attack, if there is an attack",
        at_least=0,
        below=1,
    )
    add.real("attack_strength", 4.0, "factor of what attackers send by sign_flip, noise and scale", above=0)


def _define_knobs(add: Group, method: Any) -> None:
    """A flag NAME.KNOB for each knob of a method."""
    hints = typing.get_type_hints(method)
    for field in dataclasses.fields(method):
        name, text = f"{add.heading}.{field.name}", field.metadata["help"]
        default, hint = field.default, value_type(hints[field.name])
        if hint in (int, float):
            text += f"; accepted: {out_of_range(math.nan, field.metadata)}"
        if typing.get_origin(hint) is typing.Literal:
            add.choice(name, default, typing.get_args(hint), text)
        else:
            {int: add.whole, float: add.real, bool: add.switch, str: add.text}[hint](name, default, text)


def define_devices(registry: flags.FlagValues, *, lists: bool = False) -> None:
    """Where clients are worked on, and in which order; `lists` takes several plans, chunks and numbers of devices."""
    add = Group(HOW, registry)
    if lists:
        add.several("plan", ["auto"], "how a device works on its clients: one plan, or several", PLANS)
        add.several("chunk", ["8"], "numbers of clients at a time under --plan=chunk", int)
        devices = "numbers of devices; 0 is all (of a CPU, one per core)"
        add.several("devices", ["0"], devices, int, at_least=0, at_most=MOST_DEVICES)
    else:
        add.choice("plan", "auto", PLANS, "how a device works on its clients: all at once, one by one, or in chunks")
        add.whole("chunk", 8, "number of clients at a time under --plan=chunk", least=1)
        add.whole("devices", 0, "number of devices; 0 is all (of a CPU, one per core)", least=0, most=MOST_DEVICES)
    add.choice(
        "exchange",
        "auto",
        ["auto", "gather", "ring"],
        "how clients' models reach other devices: copied to all, or around a ring of devices; auto is what fits",
    )
    add.choice(
        "client_store",
        "device",
        ["device", "host", "disk"],
        "where clients' state is between rounds; host takes more clients than the devices hold, and disk more than the "
        "host holds",
    )
    add.text("profile", None, "folder for a profiler's trace of a few rounds; its summary is printed")
    add.text(
        "coordinator",
        None,
        "HOST:PORT of process 0, where several processes run together; auto finds a TPU pod's or SLURM's",
    )
    add.whole("num_processes", None, "number of processes that run together", least=1)
    add.whole("process_id", None, "number of this process, from 0", least=0)


def define_evaluation(registry: flags.FlagValues) -> None:
    """How often a run is evaluated and saved."""
    add = Group(HOW, registry)
    add.whole("eval_every", 10, "number of rounds from one evaluation to the next", least=1)
    add.whole("checkpoint_every", 50, "least number of rounds between checkpoints, which follow evaluations", least=1)
    text = "write every evaluation for TensorBoard, into tensorboard/ in the run's folder"
    add.switch("tensorboard", False, f"{text}; needs pip install 'pfljax[tensorboard]'")


def define_sweep(registry: flags.FlagValues, methods: Sequence[str], seeds: Sequence[str], out: str) -> None:
    """Which methods on which seeds into which folder, and tuning."""
    Group(WHAT, registry).several("algorithms", methods, "methods, or all; also FILE.py:NAME")
    add = Group(RUNS, registry)
    each = "each decides its own split, initial models, cohorts, batches and sampling"
    add.several("seeds", seeds, each, int, at_least=0)
    each = "splits of the data; every seed is trained on each of them, and then decides all but the split"
    add.several("splits", [], each, int, empty=True, at_least=0)
    add.choice(
        "replicate",
        "no",
        ["no", "vmap"],
        "vmap runs a method's trials in one kernel, stacked where clients' state is on the devices",
    )
    add.text("out", out, "folder of the table; finished cells in it are kept")
    add.several(
        "tune",
        [],
        f"learning rates; each method takes the one of best validation accuracy; --tune alone is {IMPLIED['tune']}",
        float,
        empty=True,
        above=0,
    )
    add.switch("tune_knobs", False, "each method takes the best values of the knobs that its paper tunes, too")
