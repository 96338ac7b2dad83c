"""What a registered method is, as JSON, for programs that choose or call methods."""

from __future__ import annotations

import functools
import re
import sys
import typing
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from pfljax import models
from pfljax.contract.errors import PACKAGE, ArgumentError
from pfljax.contract.types import Topology
from pfljax.exchange.plan import make_plan
from pfljax.folder import files
from pfljax.local.problem import Problem
from pfljax.local.training import LocalTraining
from pfljax.models import Model, adapters
from pfljax.settings import method, recorded
from pfljax.settings.fields import (
    REQUIRED,
    Field,
    fields_of,
    item_type,
    types_in,
    words_of,
)

SHAPE = (4, 4, 1)  # of an example
CLASSES = 2
BOUNDS = ("at_least", "above", "at_most", "below")
# a title in quotes, and where it was published
CITATION = re.compile(r'.*"[^"]+"\s\([^)]*\)', re.DOTALL)


def describe(name: str) -> dict[str, Any]:
    """Describes a registered method, as plain Python that `json.dumps` accepts.

    Args:
        name: Registered name, in any case.

    Returns:
        A dict of these entries, which are None or empty if they do not apply:

        - "name", "title", "class", "file" and "paper", the citation;
        - "topology", what moves between clients: "own" (nothing), "shared" (models of a server), "peers" (other
          clients' models) or "push" (models to neighbors in a graph). None if the method fits no network that is tried;
        - "keeps" and "sends", what a client keeps and what travels in a round;
        - "needs_validation", and "knows", what the method is told that others are not;
        - "hyperparameters", a list of dicts with "name", "type", "default" (None if infinite), the bounds "at_least",
          "above", "at_most" and "below", "choices", "grid" (the values that tuning tries), "read_with" (values of other
          hyperparameters, one of which it needs to be read) and "help".

    Raises:
        ArgumentError: if there is no such method.

    Examples:
        >>> import pfljax as pfl
        >>> ditto = pfl.methods.describe("ditto")
        >>> ditto["title"], ditto["topology"], ditto["sends"]
        ('Ditto (Li et al., 2021)', 'shared', 'the global model, both ways')
        >>> [(entry["name"], entry["default"]) for entry in ditto["hyperparameters"]]
        [('mu', 0.1)]
    """
    cls = method.get(name)
    info = cls.info
    topology = topology_of(cls)
    hyperparameters = [_hyperparameter(field) for field in fields_of(cls).values()]
    return files.plain(
        {
            "name": info.name,
            "title": info.title,
            "class": cls.__name__,
            "file": file_of(cls),
            "paper": paper_of(cls),
            "topology": None if topology is None else str(topology),
            "keeps": info.keeps,
            "sends": info.travels,
            "needs_validation": info.validates,
            "knows": info.knows,
            "hyperparameters": hyperparameters,
        }
    )


def file_of(cls: type) -> str | None:
    """Returns the file of a method, from the package on for those of the package; None for a method of a notebook."""
    file = recorded.file_of(cls.__module__)
    if file is None or not file.startswith(PACKAGE):
        return file
    return Path(file).relative_to(Path(PACKAGE).parent).as_posix()


def paper_of(cls: type) -> str | None:
    """Returns the citation at the beginning of a method's file, its second paragraph; None if that cites nothing."""
    doc = getattr(sys.modules.get(cls.__module__), "__doc__", None) or ""
    paragraphs = doc.split("\n\n")
    citation = CITATION.match(paragraphs[1]) if len(paragraphs) > 1 else None
    return " ".join(citation[0].split()) if citation else None


def topology_of(cls: Any) -> Topology | None:
    """Returns what a method, with its defaults, moves between clients; None if it fits none of a few networks."""
    instance = cls()
    for problem in _problems():
        try:
            return instance.build(problem).topology
        except ArgumentError:  # it needs another network
            continue
    return None


@functools.cache
def _problems() -> list[Problem]:
    """Small problems: with a plain network, with attention, and with adapters of a frozen network."""
    plan = make_plan("map", devices=1)
    mlp = models.MLP(hidden=(4,))
    vit = models.ViT(patch=2, width=4, depth=1, heads=1)
    frozen = models.MLP(hidden=(4,), outputs=CLASSES).init(
        jax.random.key(0), jnp.zeros((1, *SHAPE))
    )
    lora = adapters.lora(rank=2, where="Dense_0")
    adapted = Model(mlp, frozen=frozen, trainable=[lora, adapters.head()])
    training = LocalTraining(optax.sgd(0.1))
    problems = []
    for network in (mlp, vit, adapted):
        model = models.build(network, SHAPE, "classification", CLASSES)
        problem = Problem(
            model=model,
            solver=training.bind(model),
            plan=plan,
            num_clients=10,
            cohort_size=10,
            n_max=20,
            rounds=10,
            learning_rate=0.1,
        )
        problems.append(problem)
    return problems


def _type_text(hint: Any) -> str:
    """Returns the type of a field in words, such as "float or null"; words to choose from are "text"."""
    names = []
    for kind in types_in(hint):
        item = item_type(kind)
        if kind is type(None):
            names.append("null")
        elif item is not None:
            names.append(f"list of {_type_text(item)}")
        elif kind is str or typing.get_origin(kind) is Literal:
            names.append("text")
        else:
            names.append(kind.__name__)
    return " or ".join(names)


def _hyperparameter(field: Field) -> dict[str, Any]:
    """Describes a hyperparameter."""
    bounds = {name: field.limits.get(name) for name in BOUNDS}
    return {
        "name": field.name,
        "type": _type_text(field.hint),
        "default": None if field.default is REQUIRED else field.default,
        **bounds,
        "choices": words_of(field.hint, field.limits),
        "grid": list(field.limits.get("grid", ())),
        "read_with": {other: list(values) for other, values in field.conditions.items()},
        "help": field.limits.get("help", ""),
    }
