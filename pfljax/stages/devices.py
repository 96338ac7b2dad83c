"""A simulated clock: how long clients compute and send, and when they are available.

A client with the device k computes a gradient of a mini-batch in c_k seconds and receives and sends b_k megabits in a
second. So a round takes it

    seconds = gradients c_k + 8 bytes / (10^6 b_k).

c_k and b_k are drawn for each client, or read from a file of measured devices: FedScale (Lai, Dai, Singapuram, Liu,
Zhu, Madhyastha, Chowdhury, ICML 2022) has "computation", milliseconds of inference per example, and "communication",
kilobits per second, by device. Its simulator counts a gradient as three inferences of each example.
"""

from __future__ import annotations

import functools
import json
import math
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.contract.paths import expanded
from pfljax.contract.types import Array, Key
from pfljax.settings.fields import hyperparameter, settings

DAY = 86_400.0  # seconds
INFERENCES = 3  # in FedScale, a gradient takes as long
COMPUTE, BANDWIDTH, PHASE = range(3)  # uses of a device's key
DRAWN = "constant:VALUE, lognormal:MEDIAN:SIGMA, two_class:VALUE:SHARE:FACTOR"
TIMES = "always, daily:SHARE, or the path of a file in FedScale's layout"


@settings
class Clock:
    """How long clients work, and how long the server waits for them.

    Attributes:
        compute: Seconds per gradient of a mini-batch: "constant:VALUE"; "lognormal:MEDIAN:SIGMA"; or
            "two_class:VALUE:SHARE:FACTOR", where the share of clients is slower by the factor.
        bandwidth: Megabits per second, in the same forms.
        devices: A file of devices' capacities in FedScale's layout, as pickle or JSON, in place of both; client k has
            the k-th device, and again from the first one if there are fewer. Empty: drawn.
        availability: When clients can be in a cohort: "always"; "daily:SHARE", for that share of a day, which begins at
            a time of their own; or a file of devices' times in FedScale's layout.
        deadline: Seconds after which a round ends. What arrives later is lost.
        over_selection: Share of clients that are asked in addition. A round has the first ones that are done.
        turns: Most clients, the first ones to finish, whose turn ends in a round while the others work on; each
            begins again at once, and ends one turn a round. For methods without a server's model. 0: a round waits for
            all.
        concurrency: Number of clients at work at once, under a server that waits for nobody (FedBuff, FedAsync); 0:
            twice as many as send their updates in a round, if there are.
        seed: Seed for the devices; the same for all runs of a comparison.

    Examples:
        >>> import pfljax as pfl
        >>> clock = pfl.Clock(compute="constant:0.2", bandwidth="constant:5", deadline=30)
        >>> clock.described
        'constant:0.2 s per gradient, constant:5 Mbit/s, until 30 s'

        10 gradients of 0.2 s each, and 5 megabits:

        >>> float(clock.seconds(client=0, gradients=10, examples=32, num_bytes=625_000))
        3.0
    """

    compute: str = hyperparameter("lognormal:0.1:1", accepted=DRAWN)
    bandwidth: str = hyperparameter("lognormal:10:1", accepted=DRAWN)
    devices: str = ""
    availability: str = hyperparameter("always", accepted=TIMES)
    deadline: float = hyperparameter(math.inf, above=0, infinite=True)
    over_selection: float = hyperparameter(0.0, at_least=0, at_most=10)
    turns: int = hyperparameter(0, at_least=0)
    concurrency: int = hyperparameter(0, at_least=0)
    seed: int = hyperparameter(0, at_least=0)

    def __post_init__(self):
        for name in ("compute", "bandwidth"):
            Drawn.parsed(name, getattr(self, name))
        if self.devices:
            self.check_unset("devices, whose file has them", "compute", "bandwidth")
            capacities(self.devices)
        if self._from_file is None:
            self._share_of_day()

    @property
    def described(self) -> str:
        """What takes how long, in words."""
        texts = [f"devices of {self.devices}"] if self.devices else []
        texts = texts or [f"{self.compute} s per gradient", f"{self.bandwidth} Mbit/s"]
        texts += [f"available {self.availability}"] * (self.availability != "always")
        texts += [f"{self.over_selection:.0%} over-selected"] * (self.over_selection > 0)
        texts += [f"until {self.deadline:g} s"] * math.isfinite(self.deadline)
        texts += [f"at most {self.turns} turns a round"] * (self.turns > 0)
        return ", ".join(
            [*texts, *[f"{self.concurrency} clients at work"] * (self.concurrency > 0)]
        )

    @property
    def chooses(self) -> bool:
        """Whether cohorts depend on the clock."""
        return self.over_selection > 0 or self.availability != "always"

    def check_unset(self, where: str, *names: str) -> None:
        """Raises `ArgumentError` if one of these settings has another value than its default."""
        for name in names:
            value = getattr(self, name)
            default = type(self).__dataclass_fields__[name].default
            if value != default:
                raise ArgumentError(name, f"accepted with {where}: {default}", value)

    def _share_of_day(self) -> float:
        kind, _, share = self.availability.partition(":")
        if kind == "always" and not share:
            return 1.0
        share_of_day = _number(share) if kind == "daily" else math.nan
        if not 0 < share_of_day <= 1:
            raise ArgumentError("availability", f"accepted: {TIMES}", self.availability)
        return share_of_day

    @property
    def _from_file(self) -> Times | None:
        return (
            times(self.availability)
            if Path(expanded(self.availability, "availability")).is_file()
            else None
        )

    def seconds(self, client: Array, gradients: Array, examples: Array, num_bytes: Array) -> Array:
        """() seconds of a client's work.

        Args:
            client: () int32, its number.
            gradients: Number of gradients of mini-batches.
            examples: Number of examples in a mini-batch.
            num_bytes: Bytes that it receives and sends.
        """
        if self.devices:
            device_capacities = jnp.asarray(capacities(self.devices))
            computation, communication = device_capacities[client % len(device_capacities)]
            drawn_seconds = INFERENCES * examples * computation / 1000
            megabits = communication / 1000
        else:
            key = functools.partial(jax.random.fold_in, self._key(client))
            drawn_seconds = Drawn.parsed("compute", self.compute)(key(COMPUTE), slower=1)
            megabits = Drawn.parsed("bandwidth", self.bandwidth)(key(BANDWIDTH), slower=-1)
        return jnp.asarray(
            gradients * drawn_seconds + 8 * num_bytes / (1e6 * megabits), jnp.float32
        )

    def available(self, client: Array, now: Array) -> Array:
        """() whether a client is available at a time in seconds."""
        if (recorded_times := self._from_file) is not None:
            device = client % len(recorded_times.period)
            at = now % jnp.asarray(recorded_times.period)[device]
            begins, ends = (
                jnp.asarray(part)[device] for part in (recorded_times.begins, recorded_times.ends)
            )
            return ((begins <= at) & (at <= ends)).any()
        begin = jax.random.uniform(jax.random.fold_in(self._key(client), PHASE))
        return (now / DAY + begin) % 1 < self._share_of_day()

    def _key(self, client: Array) -> Key:
        return jax.random.fold_in(jax.random.key(self.seed), client)


class Drawn(NamedTuple):
    """A distribution of a device's capacity: "constant", "lognormal" or "two_class"."""

    kind: str
    numbers: tuple[float, ...]

    @classmethod
    def parsed(cls, field: str, text: str) -> Drawn:
        """A distribution from "KIND:NUMBER:...". Raises `ArgumentError` if it is none."""
        kind, *arguments = text.split(":")
        drawn_numbers = tuple(_number(part) for part in arguments)
        known = {"constant": 1, "lognormal": 2, "two_class": 3}.get(kind) == len(drawn_numbers)
        fits = (
            known
            and all(map(math.isfinite, drawn_numbers))
            and drawn_numbers[0] > 0
            and min(drawn_numbers) >= 0
        )
        if not fits or (kind == "two_class" and not (drawn_numbers[1] <= 1 <= drawn_numbers[2])):
            text_of_shares = "; a SHARE is at most 1, a FACTOR at least 1"
            raise ArgumentError(
                field, f"accepted: {DRAWN}{text_of_shares if kind == 'two_class' else ''}", text
            )
        return cls(kind, drawn_numbers)

    def __call__(self, key: Key, slower: int) -> Array:
        """() a draw; `slower` is 1 if slow devices have large values, and -1 if they have small ones."""
        middle, *rest = self.numbers
        if self.kind == "lognormal":
            return middle * jnp.exp(rest[0] * jax.random.normal(key))
        if self.kind == "two_class":
            return jnp.where(jax.random.uniform(key) < rest[0], middle * rest[1] ** slower, middle)
        return jnp.asarray(middle)


class Times(NamedTuple):
    """When devices are available, in seconds; `begins` and `ends` are filled up with infinities.

    Attributes:
        begins: (n, T) when they become available.
        ends: (n, T) when they stop.
        period: (n,) after which their times repeat.
    """

    begins: np.ndarray
    ends: np.ndarray
    period: np.ndarray


class _Plain(pickle.Unpickler):
    """Reads numbers, texts, lists and dicts; a file with anything else could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(
            f"it has {module}.{name}, and not only numbers, lists and dicts"
        )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _read(field: str, path: str) -> list[dict]:
    """The entries of a file, in the order of their ids."""
    try:
        with Path(expanded(path, field)).open("rb") as file:
            content = json.load(file) if path.endswith(".json") else _Plain(file).load()
        entries = (
            [content[key] for key in sorted(content, key=int)]
            if isinstance(content, dict)
            else list(content)
        )
        if not entries:
            raise ValueError("it has no devices")
        return entries
    except Exception as error:  # a damaged pickle can raise anything
        raise ArgumentError(
            field, f"cannot be read: {error}; accepted: pickle or .json, devices by id", path
        ) from error


@functools.lru_cache(maxsize=4)
def capacities(path: str) -> np.ndarray:
    """(n, 2) float32: milliseconds per inference and kilobits per second of the devices in a file.

    Raises:
        ArgumentError: if the file is none of devices' capacities.
    """
    entries = _read("devices", path)
    try:
        device_capacities = np.array(
            [
                (drawn_seconds["computation"], drawn_seconds["communication"])
                for drawn_seconds in entries
            ],
            np.float32,
        )
        if not (np.isfinite(device_capacities).all() and (device_capacities > 0).all()):
            raise ValueError("a value is not above 0")
    except (KeyError, TypeError, ValueError) as error:
        text = f"accepted: a file with a positive computation and communication of each device; {error}"
        raise ArgumentError("devices", text, path) from error
    return device_capacities


@functools.lru_cache(maxsize=4)
def times(path: str) -> Times:
    """When the devices in a file are available.

    Raises:
        ArgumentError: if the file is none of devices' times.
    """
    entries = _read("availability", path)
    try:
        pairs = [(list(entry["active"]), list(entry["inactive"])) for entry in entries]
        most = max(len(begins) for begins, _ in pairs)

        def fill(values: list[float]) -> np.ndarray:
            """Times of one device (most,), with infinity behind the last."""
            padding = (0, most - len(values))
            return np.pad(np.array(values, np.float32), padding, constant_values=np.inf)

        if any(len(begins) != len(ends) for begins, ends in pairs):
            raise ValueError("a device has not as many times in active as in inactive")
        begins = np.stack([fill(active) for active, _ in pairs])
        ends = np.stack([fill(inactive) for _, inactive in pairs])
        period = np.array([entry["finish_time"] for entry in entries], np.float32)
        if period.ndim != 1 or not (np.isfinite(period).all() and (period > 0).all()):
            raise ValueError("a finish_time is not above 0")
        if np.isnan(begins).any() or not (begins < np.minimum(ends, period[:, None])).any():
            raise ValueError("no device is ever available")
        return Times(begins, ends, period)
    except (KeyError, TypeError, ValueError) as error:
        text = f"accepted: a file with active, inactive and finish_time of each device; {error}"
        raise ArgumentError("availability", text, path) from error
