"""Local training as users specify it: optimizer, mini-batches and duration."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, cast

import jax
import numpy as np
import optax
from jax.typing import DTypeLike

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array, Params, PyTree
from pfljax.local import augmentation, checking
from pfljax.local.privacy import Privacy
from pfljax.local.solver import Solver
from pfljax.models import Model, losses
from pfljax.settings.fields import hyperparameter, settings

# `jax.default_matmul_precision` also accepts algorithms, such as TF32_TF32_F32, but each works on few platforms.
Precision = Literal["default", "high", "highest", "bfloat16", "tensorfloat32", "float32"]
LEARNING_RATE = 0.01  # the default of optimizers that are functions of it


@settings
class LocalTraining:
    """A client's local training in a round.

    Attributes:
        optimizer: A function of the learning rate that returns an optax transformation, such as `optax.sgd`; or any
            transformation. It does not update batch statistics: each step replaces them with the new ones.
        learning_rate: Learning rate, if `optimizer` is a function of it; 0.01 by default.
        batch_size: B; 0: all of a client's examples in one step.
        epochs: Passes over a client's data in a round.
        steps: If positive, number of steps per round, instead of `epochs`.
        schedule: Number of the round -> factor of the optimizer's updates; None: always 1.
        keep_optimizer: Whether a client's optimizer for shared models keeps all of its state over rounds. Otherwise,
            counts of steps go on, such as those of a schedule in `optimizer`; moments start anew, and the counts that
            correct their bias.
        common_init: Whether clients' own models all start from the same parameters; None: the method decides (no for
            FedeRiCo and Local, yes for the others).
        privacy: Clipping and noise for the gradients of mean losses.
        loss: auto (by the targets: cross_entropy for classes, mse for numbers, bce for several labels), cross_entropy,
            mse, huber, bce, or a function (outputs (B, ...), y (B, ...)) -> losses (B,); see `pfljax.models.losses`.
            Evaluation uses it, too.
        label_smoothing: Share of the target of the training cross entropy that is spread evenly over the classes. It
            also applies to losses by which methods weight models (but those of FedeRiCoFriends), and not to evaluation.
        class_weights: (C,) per-class factors of the training cross entropy; "inverse": by the inverse of the classes'
            shares of all training labels, capped at the weight of an average class; None: 1. They also apply to the
            losses that methods use to weight models (except to those of FedeRiCoFriends), as in the code of FedEM's
            authors, but not to evaluation.
        augment: Augmentation of mini-batch images: "crop_flip", random crops with a margin of 4 pixels and random
            mirroring, or "none". Evaluation and validation use the original images.
        dtype: What networks compute in, forward and backward, in evaluation too: float32, in their own types; or
            bfloat16, with float32 parameters, optimizer states, batch statistics, sums and losses, so that updates too
            small for a bfloat16 parameter add up.
        matmul_precision: What a float32 product means in all of the run's programs, see `jax.default_matmul_precision`:
            default, high, highest, or in other words bfloat16, tensorfloat32, float32; None: JAX's own setting, by
            which a TPU multiplies in bfloat16.

    Examples:
        >>> import optax
        >>> import pfljax as pfl
        >>> local = pfl.LocalTraining(optax.sgd, 0.1, batch_size=4, epochs=2)
        >>> clients = pfl.data.digits(num_clients=4, train_examples=8)
        >>> run = pfl.Run(pfl.FedAvg(), clients, pfl.models.MLP(hidden=(4,)), local)
        >>> run.train(rounds=1, progress=False).history[-1]["round"]
        1
    """

    optimizer: optax.GradientTransformation | Callable[[Any], optax.GradientTransformation] = (
        hyperparameter(
            optax.adam,
            accepted="a function of the learning rate, such as optax.sgd, or an optax transformation",
        )
    )
    learning_rate: float | None = hyperparameter(None, above=0)  # traced if runs share a kernel
    _: dataclasses.KW_ONLY
    batch_size: int = hyperparameter(0, at_least=0)
    epochs: int = hyperparameter(1, at_least=1)
    steps: int = hyperparameter(0, at_least=0)
    schedule: optax.Schedule | None = hyperparameter(
        None, accepted="a function of the round's number, or None"
    )
    keep_optimizer: bool = False
    common_init: bool | None = None
    privacy: Privacy = hyperparameter(Privacy(), accepted="a pfljax.Privacy")
    loss: str | Callable[[Any, Any], Any] = hyperparameter(
        "auto", accepted=f"auto, {', '.join(losses.LOSSES)}, or a function"
    )
    label_smoothing: float = hyperparameter(
        0.0, at_least=0, below=1, read_with={"loss": ("auto", "cross_entropy")}
    )
    class_weights: Sequence[float] | Literal["inverse"] | None = hyperparameter(
        None, accepted="positive numbers, one per class, or inverse"
    )
    augment: augmentation.Augment = "none"
    dtype: DTypeLike = hyperparameter("float32", choices=("float32", "bfloat16"))
    matmul_precision: Precision | None = None

    def __post_init__(self):
        is_transformation = isinstance(self.optimizer, optax.GradientTransformation)
        if is_transformation and self.learning_rate is not None:
            text = "only if `optimizer` is a function of it, such as optax.sgd without (...)"
            raise ArgumentError("learning_rate", f"accepted {text}", self.learning_rate)
        if not is_transformation and self.learning_rate is None:
            object.__setattr__(self, "learning_rate", LEARNING_RATE)
        if isinstance(self.loss, str):
            losses.check_name(self.loss)

    def bind(self, model: Model) -> Solver:
        """Returns the solver for a model."""
        optimizer: Any = self.optimizer
        if self.learning_rate is not None:
            optimizer = checking.make_optimizer(optimizer, self.learning_rate)
        optimizer = optax.with_extra_args_support(optimizer)
        checking.check_optimizer(optimizer, jax.eval_shape(model.init, jax.random.key(0)))
        if self.schedule is not None:
            checking.check_schedule(self.schedule)
            optimizer = scheduled(optimizer, self.schedule)
        statistics = model.statistics if model.network.statistics else None
        if statistics is not None:
            if self.privacy.active:
                text = "batch statistics reveal all examples of a mini-batch; use a model without batch statistics"
                raise ArgumentError("privacy", text)
            optimizer = beside_statistics(optimizer, statistics)
        loss = model.loss
        if self.class_weights is not None:
            class_weights = checked_weights(self.class_weights, model)
            loss = functools.partial(loss, class_weights=class_weights)
        if self.label_smoothing:
            check_cross_entropy("label_smoothing", self.label_smoothing, model)
            loss = functools.partial(loss, label_smoothing=self.label_smoothing)
        return Solver(
            loss=loss,
            optimizer=optimizer,
            batch_size=self.batch_size,
            epochs=self.epochs,
            steps=self.steps,
            privacy=self.privacy,
            keyed=model.network.stochastic or statistics is not None,
            statistics=statistics,
            augment=augmentation.augmentation(
                self.augment, model.example_input, model.channels_first
            ),
        )


def checked_weights(weights: Sequence[float] | str, model: Model) -> np.ndarray:
    """Class weights (C,) as an array, which `Run` has measured if they are "inverse".

    Raises:
        ArgumentError: if they are not positive numbers, one per class.
    """
    check_cross_entropy("class_weights", weights, model)
    class_weights = np.asarray(weights, np.float32)
    num_classes = model.output_shape[-1]
    is_positive = np.isfinite(class_weights) & (class_weights > 0)
    if class_weights.shape != (num_classes,) or not is_positive.all():
        text = f"accepted: {num_classes} positive numbers, one per class"
        raise ArgumentError("class_weights", text, weights)
    return class_weights


def check_cross_entropy(argument: str, value: Any, model: Model) -> None:
    """Raises `ArgumentError` for an argument of the cross entropy if a model has another loss."""
    if model.task != "classification" or model.criterion is not None:
        raise ArgumentError(
            argument, "accepted only for classification with loss=cross_entropy", value
        )


def beside_statistics(
    optimizer: optax.GradientTransformation, statistics: Callable[[Params], PyTree]
) -> optax.GradientTransformationExtraArgs:
    """Applies the optimizer to parameters, and SGD at rate 1 to batch statistics, which sets them to the new ones.

    Args:
        optimizer: Optimizer for parameters.
        statistics: Parameters -> a tree of bools, which leaves are statistics.
    """
    optimizers: dict[Hashable, optax.GradientTransformation] = {
        "parameter": optimizer,
        "statistic": optax.sgd(1.0),
    }

    def labels(params: Params) -> PyTree:
        def label(is_statistic: bool) -> str:
            return "statistic" if is_statistic else "parameter"

        return jax.tree.map(label, statistics(params))

    return optax.partition(optimizers, labels)


def scheduled(
    optimizer: optax.GradientTransformation, schedule: optax.Schedule
) -> optax.GradientTransformationExtraArgs:
    """The optimizer with updates scaled by schedule(round number), so that rates decay over rounds, not steps."""

    def update(
        updates: PyTree, state: PyTree, params: Any = None, *, round_number: Array, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        del params, extra
        return jax.tree.map(lambda leaf: leaf * schedule(round_number), updates), state

    scale = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), cast(Any, update)
    )
    return optax.chain(optimizer, scale)
