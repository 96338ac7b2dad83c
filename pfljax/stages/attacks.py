"""Attacks by some of a federation's clients, for any method.

An attacker plays its round but sends something other than its result: the attack replaces what it uploads, such as its
update d = theta_k - theta, without weights and counts. Arrays of floats that it tells the server, such as FedPAC's
heads, are replaced like an upload; its scalars stay honest. The squared norm that it tells is that of the update that
is sent. With strength s:

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
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.lazy import LazyArray
from pfljax.contract.types import Algorithm, Array, ClientOutput, ClientReport, Key, PyTree, Split
from pfljax.local.problem import Problem
from pfljax.settings.fields import hyperparameter, settings
from pfljax.stages.backdoor import SUCCESS, Trigger
from pfljax.stages.collusion import Collusion
from pfljax.stages.messages import LocalWork, choose, is_float, values_of, with_new_values
from pfljax.stages.stage import Stage, StageState

if TYPE_CHECKING:
    from pfljax.stages.pipeline import Pipeline

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
FLIPPING = ("label_flip", "scale")  # attacks on labels C - 1 - y
TRAINING_ONLY = ("label_flip", "backdoor")  # attackers send what they have trained
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

    Examples:
        >>> import pfljax as pfl
        >>> attack = pfl.Attack("sign_flip", attackers=0.1, strength=2.0)
        >>> attack.active
        True
    """

    kind: Kind = "none"
    attackers: float = hyperparameter(
        0.2, at_least=0, below=1, read_with={"kind": get_args(Kind)[1:]}
    )
    strength: float = hyperparameter(4.0, above=0, read_with={"kind": SCALED})
    z: float = hyperparameter(1.5, at_least=0, read_with=("kind", "alie"))
    target: int = hyperparameter(0, at_least=0, read_with={"kind": STAMPED})
    poisoned: float = hyperparameter(0.5, above=0, at_most=1, read_with={"kind": STAMPED})
    trigger: float = hyperparameter(1.0, read_with={"kind": STAMPED})

    @property
    def backdoor(self) -> Trigger | None:
        """The trigger; None: there is none, or nobody attacks."""
        return (
            Trigger(self.trigger, self.target, self.poisoned)
            if self.active and self.kind in STAMPED
            else None
        )

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of the metrics that the stage adds."""
        return (SUCCESS,) if self.backdoor else ()

    @property
    def collusion(self) -> Collusion | None:
        """What attackers that see all updates do; None: they act alone, or nobody attacks."""
        return (
            cast(Collusion, self.kind) if self.active and self.kind in get_args(Collusion) else None
        )

    @property
    def factor(self) -> float | None:
        """The factor of a collusion; see `colluded`."""
        return (self.z or None) if self.kind == "alie" else self.strength

    @property
    def active(self) -> bool:
        """Whether anyone attacks."""
        return self.kind != "none" and self.attackers > 0

    def stage(self, problem: Problem, pipeline: Pipeline) -> Attacking | None:
        """The stage of the attackers that `ClientData.attacker` marks, if there are any.

        Raises:
            ArgumentError: if labels are to be flipped in a regression, or examples have no place
                for a trigger.
        """
        if not self.active:
            return None
        if self.backdoor is not None:
            self.check_trigger(problem)
        task = problem.model.task
        if self.kind in FLIPPING and task != "classification":
            text = f"there are no classes to flip in data for {task}; accepted: sign_flip, noise"
            raise ArgumentError("attack", text, self.kind)
        return Attacking(self, problem.model.output_shape[-1])

    def check_trigger(self, problem: Problem) -> None:
        """Raises `ArgumentError` if examples are not arrays of numbers with one class each, the target among them."""
        model = problem.model
        if model.task != "classification" or model.targets.ndim != 1:
            raise ArgumentError(
                "attack", "accepted for data without a class per example: no backdoors", self.kind
            )
        leaves = jax.tree.leaves(model.example_input)
        if len(leaves) != 1 or not jnp.issubdtype(leaves[0].dtype, jnp.floating):
            text = "accepted for inputs that are tokens, or several arrays: no backdoors"
            raise ArgumentError("attack", text, self.kind)
        if self.target >= model.output_shape[-1]:
            text = f"accepted: a class, 0 to {model.output_shape[-1] - 1}"
            raise ArgumentError("target", text, self.target, owner="attack")


@dataclasses.dataclass(frozen=True)
class Attacking(Stage):
    """Attackers poison what they train on, and send something other than they have trained."""

    name = "attack"
    attack: Attack
    num_classes: int

    def declare(self, method: Algorithm) -> Algorithm:
        scored = f"{method.report.scored}, of honest clients"
        report = dataclasses.replace(method.report, scored=scored)
        measures = dict(method.engine.measures)
        if self.attack.backdoor is not None:
            measures[SUCCESS] = self.attack.backdoor.success
        engine = method.engine._replace(measures=measures)
        return dataclasses.replace(method, report=report, engine=engine)

    def before_client(self, work: LocalWork, note: StageState) -> LocalWork:
        data = work.data
        attacker = data.attacker
        if attacker is None:
            return work
        if self.attack.kind in FLIPPING:
            train = self._flipped(data.train, attacker)
            validation = self._flipped(data.validation, attacker)
            data = data._replace(train=train, validation=validation)
        if self.attack.backdoor is not None:
            train = self.attack.backdoor.poisoned(data.train, attacker)
            data = data._replace(train=train)
        return work._replace(data=data)

    def after_client(
        self, work: LocalWork, output: ClientOutput, note: StageState
    ) -> tuple[ClientOutput, PyTree]:
        attacker = work.data.attacker
        sends_what_it_trained = self.attack.kind in TRAINING_ONLY or self.attack.collusion
        if attacker is None or sends_what_it_trained:
            return output, note.client
        key = jax.random.fold_in(work.context.key, ATTACK)

        honest = values_of(output.upload)
        crafted = self._sent_instead(key, honest)
        attacked = with_new_values(output, crafted)
        report = self._told_instead(jax.random.fold_in(key, ATTACK), attacked.report)
        upload = choose(attacker, attacked.upload, output.upload)
        report = choose(attacker, report, output.report)
        return output._replace(upload=upload, report=report), note.client

    def _told_instead(self, key: Key, honest: ClientReport) -> ClientReport:
        """What an attacker tells: its arrays of floats are attacked, its numbers are honest."""

        def is_attacked(leaf: Array) -> bool:
            return is_float(leaf) and jnp.ndim(leaf) > 0

        mask = jax.tree.map(is_attacked, honest.entries)
        arrays, others = tree.partition(honest.entries, mask)
        crafted = self._sent_instead(key, arrays)
        return honest._replace(entries=tree.combine(crafted, others))

    def _sent_instead(self, key: Key, honest: PyTree) -> PyTree:
        """What an attacker sends in place of arrays of floats."""
        kind = self.attack.kind
        strength = self.attack.strength
        if kind == "free_ride":
            return jax.tree.map(jnp.zeros_like, honest)
        if kind == "sign_flip":
            return tree.scale(honest, -strength)
        if kind == "noise":
            # s |d| u
            return tree.scale(random_of_length(key, honest), strength)
        return tree.scale(honest, strength)

    def _flipped(self, split: Split, attacker: Array) -> Split:
        return split._replace(y=Flipped(split.y, self.num_classes, attacker))


def random_of_length(key: Key, values: PyTree) -> PyTree:
    """Random numbers in place of a tree of floats: one vector of its length in a uniformly drawn direction."""
    leaves, form = jax.tree.flatten(values)
    keys = jax.random.split(key, max(len(leaves), 1))
    normal = []
    for leaf_key, leaf in zip(keys, leaves, strict=False):
        normal.append(jax.random.normal(leaf_key, leaf.shape, leaf.dtype))
    drawn = jax.tree.unflatten(form, normal)
    drawn_length = jnp.sqrt(tree.inner(drawn, drawn))
    length = jnp.sqrt(tree.inner(values, values))
    return tree.scale(drawn, length / jnp.where(drawn_length > 0, drawn_length, 1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Flipped(LazyArray):
    """A client's classes, read by indexing: C - 1 - y for an attacker, y for the others."""

    classes: Any
    num: int = dataclasses.field(metadata={"static": True})
    attacker: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the classes."""
        return self.classes.shape

    def __getitem__(self, index: Any) -> Array:
        y = self.classes[index]
        # Positions of a sequence with nothing to predict hold no class.
        return jnp.where(self.attacker & (y < self.num), (self.num - 1 - y).astype(y.dtype), y)
