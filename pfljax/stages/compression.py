"""Compression of what clients send and receive, for any method.

An upload is a client's update u_k: its model minus the one that it received, or what the method sends in place of that
(gradients, control variates, sums by class). The client sends C(u_k), and the server has the model that u_k belongs to.
With error feedback, the client keeps what was left out: it sends C(u_k + e_k), and e_k <- u_k + e_k - C(u_k + e_k).

- "topk:SHARE", the largest entries by absolute value: Aji, Heafield, "Sparse communication for distributed gradient
  descent" (EMNLP 2017). Each takes 8 bytes: its value and its place.
- "randomk:SHARE", entries drawn at random, whose places follow from a shared seed: Konecny et al., "Federated learning:
  strategies for improving communication efficiency" (2016). Without error feedback, they are divided by the share.
- "quantize:BITS", 2^BITS - 1 equidistant values from -m to m, where m is the largest absolute value in a block of 512,
  rounded at random so that the mean is exact: QSGD (Alistarh, Grubic, Li, Tomioka, Vojnovic, NeurIPS 2017) of updates,
  as in FedPAQ (Reisizadeh et al., AISTATS 2020). One bit: -m or m.
- "sign", the signs times the mean absolute value: Karimireddy, Rebjock, Stich, Jaggi, "Error feedback fixes SignSGD and
  other gradient compression schemes" (ICML 2019).
- "lowrank:RANK", P Q^T for each matrix M: P is an orthonormal basis of M Q, and Q <- M^T P. With error feedback, Q is
  the client's last one, so that power iterations go on from round to round; it is random otherwise, and at first.
  Vogels, Karimireddy, Jaggi, "PowerSGD" (NeurIPS 2019, Algorithm 1). Vectors are sent as they are.

Departures from the papers: QSGD scales by the Euclidean norm and codes its integers in fewer bits; here, every entry
takes BITS bits. PowerSGD averages P over clients before it orthonormalizes, and then Q; here, every client compresses
alone. Arrays that clients tell the server, such as FedPAC's heads, and those in its state are not compressed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    Key,
    PyTree,
    Start,
    Topology,
    Traffic,
    Upload,
)
from pfljax.contract.vectors import orthonormal, over_vectors
from pfljax.exchange.lifting import shapes_of_client
from pfljax.local.problem import Problem
from pfljax.settings.fields import hyperparameter, settings
from pfljax.stages.messages import LocalWork, floats, payload, values_of, with_new_values
from pfljax.stages.stage import Stage, StageState

if TYPE_CHECKING:
    from pfljax.stages.pipeline import Pipeline

COMPRESS = 0xC0DEC  # folded into a client's key for a round to draw its roundings and places
BLOCK = 512  # entries that share a scale
FLOAT = 4  # bytes of a number
POSITION = 4  # bytes of an entry's place
BIASED = ("topk", "randomk", "sign", "lowrank")  # what error feedback corrects
FORMS = "topk:SHARE or randomk:SHARE (above 0, at most 1), quantize:BITS (1 to 8), sign, lowrank:RANK (1 or more)"


@settings
class Compression:
    """How messages are compressed.

    Attributes:
        upload: What clients send of an update: "topk:0.01", "randomk:0.01", "quantize:8", "sign" or "lowrank:2".
        download: How the models that clients receive are compressed: "quantize:8".
        error_feedback: Whether clients add to an update what compression left out of earlier ones.

    Examples:
        >>> import pfljax as pfl
        >>> compression = pfl.Compression("topk:0.01", download="quantize:8")
        >>> compression.described
        'topk:0.01, with error feedback'
    """

    upload: str = hyperparameter("none", accepted=f"none, {FORMS}")
    download: str = hyperparameter("none", accepted="none, quantize:BITS (1 to 8)")
    error_feedback: bool = hyperparameter(True, read_with={"upload": BIASED})

    def __post_init__(self):
        parsed("upload", self.upload, FORMS)
        download = parsed("download", self.download, "quantize:BITS (1 to 8)")
        if download.kind not in ("none", "quantize"):
            raise ArgumentError("download", "accepted: none, quantize:BITS (1 to 8)", self.download)

    @property
    def described(self) -> str:
        """What clients send, in words."""
        return f"{self.upload}, with error feedback" if self.corrects else self.upload

    @property
    def corrects(self) -> bool:
        """Whether clients keep what compression leaves out."""
        return self.error_feedback and parsed("upload", self.upload).kind in BIASED

    def downloads(self, problem: Problem, pipeline: Pipeline) -> Downloads | None:
        """The stage of compressed downloads, if they are compressed.

        Raises:
            ArgumentError: if clients receive no models.
        """
        if self.download == "none":
            return None
        topology = pipeline.method.topology
        if not topology.moves or topology is Topology.PUSH:
            text = "accepted for this method: none; clients receive no models"
            raise ArgumentError("download", text, self.download)
        return Downloads(parsed("download", self.download), topology.reads_others)

    def uploads(self, problem: Problem, pipeline: Pipeline) -> Uploads | None:
        """The stage of compressed uploads, if they are compressed.

        Raises:
            ArgumentError: if the method sends nothing that can be compressed this way.
        """
        if self.upload == "none":
            return None
        method = pipeline.method
        check_upload(problem, method, self.upload)
        compressor = parsed("upload", self.upload)
        if self.corrects:
            return CorrectedUploads(compressor, method)
        return Uploads(compressor, method)


class Compressor(NamedTuple):
    """A way to compress; `amount` is a share, a number of bits or a rank."""

    kind: str
    amount: float = 0.0

    def __call__(self, key: Key, update: PyTree, scaled: bool = True, axes: int = 1) -> PyTree:
        """What arrives of the floats of an update, leaves (J, ...), or (...) without `axes`.

        Args:
            key: Key of the random choices.
            update: The update, or a model.
            scaled: Whether randomly chosen entries are divided by their share.
            axes: Number of leading axes, 0 or 1.
        """
        values, rest = tree.partition(update, floats(update))
        values = values if axes else tree.stack_one(values)
        if self.kind == "lowrank":
            values, _ = self.low_rank(key, values)
        else:
            values = over_vectors(lambda rows: self._compress_vectors(key, rows, scaled), values)
        values = values if axes else tree.first(values)
        return tree.combine(values, rest)

    def low_rank(
        self, key: Key, values: PyTree, last: Sequence[Array] = ()
    ) -> tuple[PyTree, tuple[Array, ...]]:
        """What arrives of leaves (J, ..., outputs), as matrices (J, inputs, outputs); vectors are unchanged.

        Args:
            key: Key of the first Q.
            values: The leaves.
            last: Q (J, outputs, r) of each matrix, with zeros for columns that are drawn; empty: all are drawn.

        Returns:
            What arrives, and each matrix's next Q.
        """
        leaves, structure = jax.tree.flatten(values)
        keys = jax.random.split(key, max(len(leaves), 1))
        arrived = []
        factors = []
        for key, leaf in zip(keys, leaves, strict=False):
            if leaf.ndim > 2 and leaf.size:
                last_factor = last[len(factors)] if last else None
                leaf, factor = self._power_iteration(key, leaf, last_factor)
                factors.append(factor)
            arrived.append(leaf)
        return jax.tree.unflatten(structure, arrived), tuple(factors)

    def _compress_vectors(self, key: Key, rows: Array, scaled: bool) -> Array:
        """What arrives of vectors (J, n)."""
        num, n = rows.shape
        if n == 0:
            return rows
        if self.kind == "sign":
            return jnp.abs(rows).mean(axis=1, keepdims=True) * jnp.sign(rows)
        if self.kind == "quantize":
            return quantized(key, rows, int(self.amount))

        # "topk" or "randomk": the entries with the highest scores.
        num_sent = self.entries(n)
        if self.kind == "topk":
            score = jnp.abs(rows)
        else:
            score = jax.random.uniform(key, rows.shape)
        _, positions = jax.lax.top_k(score, num_sent)
        index = (jnp.arange(num)[:, None], positions)
        sent = jnp.zeros_like(rows).at[index].set(rows[index])
        return n / num_sent * sent if self.kind == "randomk" and scaled else sent

    def _power_iteration(self, key: Key, leaf: Array, last: Array | None) -> tuple[Array, Array]:
        """What arrives of an array (J, ..., outputs), and its next Q (J, outputs, r)."""
        matrices = leaf.reshape(leaf.shape[0], -1, leaf.shape[-1])
        rank = min(int(self.amount), *matrices.shape[1:])
        q = jax.random.normal(key, (matrices.shape[-1], rank))
        if last is not None:
            is_new = (last == 0).all(axis=1, keepdims=True)
            q = jnp.where(is_new, q, last)

        # P^T is an orthonormal basis of (M Q)^T; Q^T <- P^T M; what arrives is P Q^T.
        p_transposed = orthonormal((matrices @ q).mT)
        q_transposed = p_transposed @ matrices
        arrived = p_transposed.mT @ q_transposed
        return arrived.reshape(leaf.shape), q_transposed.mT

    def entries(self, n: int) -> int:
        """Number of entries that are sent of n."""
        return max(1, round(self.amount * n))

    def num_bytes(self, shapes: PyTree) -> float:
        """Bytes of a compressed update or model, given the shapes of one, without a leading axis."""
        values, rest = tree.partition(shapes, floats(shapes))
        leaves = jax.tree.leaves(values)
        if self.kind == "lowrank":
            return tree.num_bytes(rest) + sum(self._low_rank_bytes(leaf.shape) for leaf in leaves)
        n = sum(math.prod(leaf.shape) for leaf in leaves)
        return tree.num_bytes(rest) + self._vector_bytes(n)

    def _vector_bytes(self, n: int) -> float:
        """Bytes of n compressed numbers."""
        if n == 0:
            return 0
        if self.kind == "sign":
            return math.ceil(n / 8) + FLOAT
        if self.kind == "quantize":
            num_scales = math.ceil(n / BLOCK)
            return math.ceil(n * self.amount / 8) + FLOAT * num_scales
        if self.kind == "topk":
            return self.entries(n) * (FLOAT + POSITION)
        return self.entries(n) * FLOAT

    def _low_rank_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of the factors of a matrix, or of an uncompressed vector."""
        if len(shape) < 2:
            return FLOAT * math.prod(shape)
        inputs = math.prod(shape[:-1])
        outputs = shape[-1]
        return FLOAT * min(int(self.amount), inputs, outputs) * (inputs + outputs)


def parsed(field: str, text: str, accepted: str = FORMS) -> Compressor:
    """A compressor from "KIND:AMOUNT". Raises `ArgumentError` if it is none."""
    kind, _, amount = text.partition(":")
    try:
        number = float(amount or 0)
    except ValueError:
        number = math.nan
    whole = number == number and number == int(number)
    fits = {
        "none": not amount,
        "sign": not amount,
        "topk": 0 < number <= 1,
        "randomk": 0 < number <= 1,
        "quantize": whole and 1 <= number <= 8,
        "lowrank": whole and number >= 1,
    }
    if not fits.get(kind, False):
        raise ArgumentError(field, f"accepted: none, {accepted}", text)
    return Compressor(kind, number)


def check_upload(problem: Problem, algorithm: Algorithm, text: str) -> None:
    """Raises `ArgumentError` if what the algorithm sends cannot be compressed this way."""
    if algorithm.topology == "own":
        accepted = "accepted for this method: none; no client sends anything"
        raise ArgumentError("upload", accepted, text)
    if problem.solver.statistics is not None:
        raise ArgumentError("upload", "accepted for a model with batch statistics: none", text)
    if algorithm.sends == "products":
        accepted = "accepted for this method: none; it sends factors of what is averaged"
        raise ArgumentError("upload", accepted, text)
    if algorithm.sends != "updates" and not text.startswith("quantize"):
        accepted = f"accepted for this method: none, quantize:BITS; it sends {algorithm.sends}, not updates"
        raise ArgumentError("upload", accepted, text)


@dataclasses.dataclass(frozen=True)
class Downloads(Stage):
    """Clients train from compressed models; the server applies their updates to its own."""

    name = "download"
    compressor: Compressor
    peers: bool

    def declare(self, method: Algorithm) -> Algorithm:
        def traffic(whole: Traffic) -> Traffic:
            compressed = self.compressor.num_bytes(whole.shapes[0])
            stated = method.traffic(whole) if method.traffic else whole
            share = stated.model / whole.model if whole.model else 1
            return stated._replace(model=share * compressed)

        return dataclasses.replace(method, traffic=traffic)

    def before_client(self, work: LocalWork, note: StageState) -> LocalWork:
        key = jax.random.fold_in(key_of(work.context), COMPRESS)
        received = self.compressor(key, work.models)
        if self.peers:
            is_own = work.context.index == work.context.client  # its own model does not travel
            received = tree.where(is_own, work.models, received)
        return work._replace(models=received)


@dataclasses.dataclass(frozen=True)
class Uploads(Stage):
    """Clients send compressed updates."""

    name = "upload"
    compressor: Compressor
    method: Algorithm

    def declare(self, method: Algorithm) -> Algorithm:
        def traffic(whole: Traffic) -> Traffic:
            upload = whole.shapes[1]
            values, rest = tree.partition(upload, payload(upload, axes=0))
            compressed = self.compressor.num_bytes(values) + tree.num_bytes(rest)
            stated = method.traffic(whole) if method.traffic else whole
            # A method that sends a share of its upload still does.
            share = stated.upload / whole.upload if whole.upload else 1
            return stated._replace(upload=share * compressed)

        return dataclasses.replace(method, traffic=traffic)

    def after_client(
        self, work: LocalWork, output: ClientOutput, note: StageState
    ) -> tuple[ClientOutput, PyTree]:
        topology = self.method.topology
        axes = 0 if topology is Topology.PUSH else 1
        whole = values_of(output.upload, axes)
        sent = self.compressor(key_of(work.context), whole, axes=axes)
        if topology.reads_others and not self.method.via_server:
            num = tree.num_rows(output.upload)
            is_own = work.context.index[:num] == work.context.client  # its own model stays with it
            sent = tree.where(is_own, whole, sent)
        return with_new_values(output, sent, axes), note.client


class Memory(NamedTuple):
    """What a client keeps for its next update.

    Attributes:
        left: e_k, what compression left out, in units of u_k.
        factors: "lowrank": each matrix's Q.
    """

    left: PyTree
    factors: tuple[Array, ...] = ()


@dataclasses.dataclass(frozen=True)
class CorrectedUploads(Uploads):
    """Clients send compressed updates and add to the next one what was left out.

    Clients with nothing to send keep what they have.
    """

    def server_note(self, key: Key, start: Start, clients: ClientData) -> Memory:
        def after_one(upload: Upload) -> Memory:
            values = values_of(upload)
            factors = ()
            if self.compressor.kind == "lowrank":
                _, factors = self.compressor.low_rank(key, values)
            return Memory(values, factors)

        output = first_output(self.method, clients)
        shapes = jax.eval_shape(after_one, output.upload)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def client_note(self, note: Memory, client: Array) -> Memory:
        return note

    def after_client(
        self, work: LocalWork, output: ClientOutput, note: StageState
    ) -> tuple[ClientOutput, Memory]:
        memory = note.client
        key = key_of(work.context)

        # C(u_k + e_k)
        whole = tree.add(values_of(output.upload), memory.left)
        if self.compressor.kind == "lowrank":
            sent, factors = self.compressor.low_rank(key, whole, memory.factors)
        else:
            sent = self.compressor(key, whole, scaled=False)
            factors = ()

        # e_k <- u_k + e_k - C(u_k + e_k)
        new_memory = Memory(tree.subtract(whole, sent), factors)
        if output.sent is not None:
            new_memory = tree.where(output.sent, new_memory, memory)
        return with_new_values(output, sent), new_memory


def first_output(method: Algorithm, clients: ClientData) -> ClientOutput:
    """Shapes of a client's output.

    Raises:
        ArgumentError: if clients do not all contribute to the same models in every round.
    """
    shapes = shapes_of_client(method, clients, cohort_size=1)
    all_alike = method.stale
    if method.topology.on_server and not all_alike:
        all_alike = len(shapes.index) == tree.num_rows(shapes.start.models)
    if not all_alike:
        text = "accepted for this method, whose clients do not all contribute to the same models: False"
        raise ArgumentError("error_feedback", text, True)
    return shapes.output


def key_of(context: ClientContext) -> Key:
    """A client's key for the random choices of an exchange."""
    key = jax.random.fold_in(context.key, COMPRESS)
    return jax.random.fold_in(key, context.step)


def quantized(key: Key, rows: Array, bits: int) -> Array:
    """Vectors (J, n) on grids from -m to m, rounded at random so that the mean is exact; m is that of a block."""
    num, n = rows.shape
    padded = jnp.pad(rows, ((0, 0), (0, -n % BLOCK)))
    blocks = padded.reshape(num, -1, BLOCK)
    largest = jnp.abs(blocks).max(axis=-1, keepdims=True)
    num_steps = 1 if bits == 1 else 2**bits - 2  # an even number, so that 0 is on the grid
    unit = jnp.where(largest > 0, 2 * largest / num_steps, 1)

    # floor(x + u), with u uniform in [0, 1), has the mean x.
    exact = (blocks + largest) / unit
    rounded = jnp.floor(exact + jax.random.uniform(key, blocks.shape))
    values = jnp.clip(rounded, 0, num_steps) * unit - largest
    values = jnp.where(largest > 0, values, 0)
    return values.reshape(num, -1)[:, :n]
