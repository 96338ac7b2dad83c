"""Attacks by some of a federation's clients, for any method.

An attacker plays its round but sends something other than its result: the attack replaces what it uploads, such as its
update d = theta_k - theta, without weights and counts. The report's arrays of floats, such as FedPAC's heads, are
replaced like an upload; its scalars stay honest. A squared norm of the update, named "square", is that of the update
that is sent. With strength s:

- "label_flip": it trains honestly on labels C - 1 - y.
- "sign_flip": it sends -s d.
- "noise": it sends s |d| u, with u drawn uniformly from the unit sphere.
- "scale": it trains on labels C - 1 - y and sends s d.
- "free_ride": it sends an update of zero.
- "backdoor": it trains honestly on examples of which a share shows a trigger and is labelled with one class; see
  `backdoor`. "replacement": the same, and it sends s d, where s = n / eta replaces the global model: n clients of
  equal weight in a round, at the server's rate eta (Bagdasaryan et al., AISTATS 2020, Eq. 3).
- "alie", "ipm", "min_max", "min_sum": all send the same; see `collusion`.

"label_flip", "noise" and "scale" follow the attacks A1 to A3 of Ditto's paper (Li, Hu, Beirami, Smith, ICML 2021,
Section 3).

Departures from the paper: with more than two classes, its A1 draws labels uniformly at random. Its A2 sends Gaussian
parameters, whatever the length of the update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.fields import knob, settings
from pfljax.contract.types import Algorithm, Array, Key, PyTree, Report
from pfljax.local.problem import Problem
from pfljax.stages import messages
from pfljax.stages.backdoor import SUCCESS, Trigger
from pfljax.stages.collusion import Collusion

Kind = Literal[
    "none",
    "label_flip",
    "sign_flip",
    "noise",
    "scale",
    "free_ride",
    "backdoor",
    "replacement",
    "alie",
    "ipm",
    "min_max",
    "min_sum",
]
SCALED = ("sign_flip", "noise", "scale", "ipm", "replacement")  # attacks that read the strength
STAMPED = ("backdoor", "replacement")  # attacks with a trigger
ATTACK = 0xA77AC  # folded into a client's key for a round to draw its attack


@settings
class Attack:
    """Who attacks, and how.

    Attributes:
        kind: What attackers do; attackers are not evaluated.
        attackers: Share of clients that attack; drawn with the run's seed.
        strength: Factor s of "sign_flip", "noise", "scale", "ipm" and "replacement".
        z: Standard deviations that "alie" stays below the honest mean; 0: what its paper's formula gives, which is next
            to nothing with few attackers.
        target: Class that a backdoor's trigger stands for.
        poisoned: Share of an attacker's examples that show the trigger.
        trigger: Value of the trigger's pixels or features, on the scale of the model's inputs: 1 is white where pixels
            are between 0 and 1, and one standard deviation where inputs are standardized. Integers get 255.
    """

    kind: Kind = "none"
    attackers: float = knob(0.2, at_least=0, below=1, read_with={"kind": get_args(Kind)[1:]})
    strength: float = knob(4.0, above=0, read_with={"kind": SCALED})
    z: float = knob(1.5, at_least=0, read_with=("kind", "alie"))
    target: int = knob(0, at_least=0, read_with={"kind": STAMPED})
    poisoned: float = knob(0.5, above=0, at_most=1, read_with={"kind": STAMPED})
    trigger: float = knob(1.0, read_with={"kind": STAMPED})

    @property
    def backdoor(self) -> Trigger | None:
        """The trigger; None: there is none, or nobody attacks."""
        return Trigger(self.trigger, self.target, self.poisoned) if self.active and self.kind in STAMPED else None

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of the metrics that `on` adds."""
        return (SUCCESS,) if self.backdoor else ()

    @property
    def collusion(self) -> Collusion | None:
        """What attackers that see all updates do; None: they act alone, or nobody attacks."""
        return cast(Collusion, self.kind) if self.active and self.kind in get_args(Collusion) else None

    @property
    def factor(self) -> float | None:
        """The factor of a collusion; see `colluded`."""
        return (self.z or None) if self.kind == "alie" else self.strength

    @property
    def active(self) -> bool:
        """Whether anyone attacks."""
        return self.kind != "none" and self.attackers > 0

    def on(self, problem: Problem, algorithm: Algorithm) -> Algorithm:
        """The algorithm with the attackers that `ClientData.attacker` marks.

        Raises:
            ArgumentError: if labels are to be flipped in a regression, or examples have no place for a trigger.
        """
        if not self.active:
            return algorithm
        if self.collusion:
            return dataclasses.replace(algorithm, report=self._report(algorithm))
        flips, sends = self.kind in ("label_flip", "scale"), self.kind not in ("label_flip", "backdoor")
        if (backdoor := self.backdoor) is not None:
            self._check_trigger(problem)
            measures = {**algorithm.measures, SUCCESS: backdoor.success}
            algorithm = dataclasses.replace(algorithm, measures=measures)
        if flips and problem.model.task != "classification":
            text = f"there are no classes to flip in data for {problem.model.task}; accepted: sign_flip, noise"
            raise ArgumentError("attack", text, self.kind)
        num_classes = problem.model.output_shape[-1]

        def client_update(context, models, row, data):
            if flips:
                flip = lambda split: split._replace(y=Flipped(split.y, num_classes, data.attacker))
                data = data._replace(train=flip(data.train), validation=flip(data.validation))
            if backdoor is not None:
                data = data._replace(train=backdoor.poisoned(data.train, data.attacker))
            out = algorithm.client_update(context, models, row, data)
            if not sends:
                return out
            key = jax.random.fold_in(context.key, ATTACK)
            honest = out.upload, out.report
            in_upload = messages.payload(out.upload)
            in_report = messages.payload(out.report, axes=0, report=True)
            report = self._of_update(jax.random.fold_in(key, ATTACK), out.report, in_report)
            attacked = self._of_update(key, out.upload, in_upload), report
            lie = lambda new, old: jnp.where(data.attacker, new, old)
            upload, report = jax.tree.map(lie, attacked, honest)
            return out._replace(upload=upload, report=report)

        return dataclasses.replace(algorithm, client_update=client_update, report=self._report(algorithm))

    def _check_trigger(self, problem: Problem) -> None:
        """Raises `ArgumentError` if examples are not arrays of numbers with one class each, the target among them."""
        model = problem.model
        if model.task != "classification" or model.targets.ndim != 1:
            raise ArgumentError("attack", "accepted for data without a class per example: no backdoors", self.kind)
        leaves = jax.tree.leaves(model.example_input)
        if len(leaves) != 1 or not jnp.issubdtype(leaves[0].dtype, jnp.floating):
            text = "accepted for inputs that are tokens, or several arrays: no backdoors"
            raise ArgumentError("attack", text, self.kind)
        if self.target >= model.output_shape[-1]:
            text = f"accepted: a class, 0 to {model.output_shape[-1] - 1}"
            raise ArgumentError("target", text, self.target, owner="attack")

    def _report(self, algorithm: Algorithm) -> Report:
        return dataclasses.replace(algorithm.report, scored=f"{algorithm.report.scored}, of honest clients")

    def _of_update(self, key: Key, update: PyTree, attacked: PyTree) -> PyTree:
        """The update or report that an attacker sends instead of its own.

        Args:
            key: Key of the noise.
            update: Its own.
            attacked: A tree of bools, which leaves it replaces; see `messages.payload`.
        """
        values, rest = tree.partition(update, attacked)
        sent = random_of_length(key, values) if self.kind == "noise" else values
        factor = {"sign_flip": -self.strength, "free_ride": 0.0}.get(self.kind, self.strength)
        if isinstance(rest, Mapping) and rest.get("square") is not None:
            rest = {**rest, "square": factor**2 * rest["square"]}
        return tree.combine(jax.tree.map(lambda leaf: factor * leaf, sent), rest)


def random_of_length(key: Key, values: PyTree) -> PyTree:
    """Random numbers in place of a tree of floats, as one vector of the same length in a uniformly drawn direction."""
    leaves, form = jax.tree.flatten(values)
    keys = jax.random.split(key, max(len(leaves), 1))
    normal = [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=False)]
    drawn = jax.tree.unflatten(form, normal)
    length = jnp.sqrt(tree.inner(drawn, drawn))
    return tree.scale(drawn, jnp.sqrt(tree.inner(values, values)) / jnp.where(length > 0, length, 1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Flipped:
    """A client's classes, read by indexing: C - 1 - y for an attacker, y for the others."""

    classes: Any
    num: int = dataclasses.field(metadata={"static": True})
    attacker: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the classes."""
        return self.classes.shape

    def __getitem__(self, index) -> Array:
        y = self.classes[index]
        # Positions of a sequence with nothing to predict hold no class.
        return jnp.where(self.attacker & (y < self.num), (self.num - 1 - y).astype(y.dtype), y)
