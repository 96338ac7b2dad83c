"""Communication graphs and doubly stochastic mixing matrices for training without a server."""

from __future__ import annotations

import functools
from typing import NamedTuple

import networkx as nx
import numpy as np
import scipy.sparse as sp

from pfljax.algorithms.common.communication import CommunicationGraph
from pfljax.contract import optional
from pfljax.contract.errors import ArgumentError
from pfljax.contract.reading import read_npy, read_text

DRAWS = 100  # attempts to draw a connected random graph
LARGEST_PROGRAM = 300  # most clients for the fastest mixing matrix, which takes minutes beyond that
LARGEST_SPECTRUM = 2000  # most clients for the spectral gap, which needs dense matrices
MOST_DIGITS = 9  # in a client's number
RANDOM = ("erdos_renyi", "random_regular")  # random graphs


class Mixing(NamedTuple):
    """T mixing matrices W_t, used in turn, by sender.

    Attributes:
        neighbors: (T, K, J) int32: receivers of client k, itself first and repeated if it has fewer than J.
        weights: (T, K, J) float32: weight W[i, k] that receiver i gives client k; 0 for repeated entries.
        symmetric: Whether all W_t are symmetric.
        facts: Entries for reports: the graph and its spectral gap.
    """

    neighbors: np.ndarray
    weights: np.ndarray
    symmetric: bool
    facts: tuple[tuple[str, str | float], ...]

    @property
    def period(self) -> int:
        """T, the number of matrices."""
        return len(self.neighbors)


@functools.cache
def make_mixing(num_clients: int, knobs: CommunicationGraph) -> Mixing:
    """Draws or reads the graphs and computes the edge weights.

    With mixing "metropolis", W[i, j] = 1 / (1 + max(d_i, d_j)); with "fastest", W is the symmetric matrix on the graph
    with the largest spectral gap (Boyd, Diaconis, Xiao, 2004).

    Raises:
        ArgumentError: if a knob or a file is wrong, a matrix is not doubly stochastic, or the graphs together are not
            connected.
    """
    for name, file, which in (("edge_file", knobs.edge_file, "graph"), ("mixing_file", knobs.mixing_file, "mixing")):
        if getattr(knobs, which) == "file" and not file:
            raise ArgumentError(name, f"required with {which}=file", file)
    if knobs.mixing == "file":
        name, matrices = knobs.mixing_file, [_read_matrix(knobs.mixing_file, num_clients)]
    else:
        drawn = _draw_connected(num_clients, knobs)
        edges = " + ".join(f"{graph.number_of_edges():,}" for graph in drawn)
        name = f"{knobs.graph}, {edges} edges, {knobs.mixing} weights"
        matrices = [(metropolis if knobs.mixing == "metropolis" else fastest)(graph) for graph in drawn]
    width = max(int(np.diff(_others(matrix).indptr).max()) for matrix in matrices) + 1
    neighbors, weights = zip(*(_sends(matrix, width) for matrix in matrices), strict=True)
    symmetric = all(abs(matrix - matrix.T).max() < 1e-9 for matrix in matrices)
    return Mixing(np.stack(neighbors), np.stack(weights), symmetric, (("graph", name), *spectral_gap(matrices)))


def _draw_connected(num: int, knobs: CommunicationGraph) -> list[nx.Graph]:
    """T graphs that together connect all clients."""
    random = knobs.graph in RANDOM
    if knobs.graphs > 1 and not random:
        raise ArgumentError("graphs", f"accepted: 1, or more with {' and '.join(RANDOM)}", knobs.graphs)
    for attempt in range(DRAWS if random else 1):
        seeds = [[knobs.graph_seed, attempt, t] for t in range(knobs.graphs)]
        drawn = [_draw(num, knobs, np.random.default_rng(seed)) for seed in seeds]
        if nx.is_connected(nx.compose_all(drawn)):
            return drawn
    tried = f" in each of {DRAWS} draws" * random + f", {knobs.graphs} rounds together" * (knobs.graphs > 1)
    raise ArgumentError("graph", f"not connected{tried}; accepted: a graph that connects all clients", knobs.graph)


def _draw(num: int, knobs: CommunicationGraph, rng: np.random.Generator) -> nx.Graph:
    """Draws or reads one graph on clients 0..K-1."""
    if num < 2:
        raise ArgumentError("num_clients", "accepted: 2 or more for a communication graph", num)
    if knobs.graph == "ring":
        return nx.cycle_graph(num)
    if knobs.graph == "complete" or (knobs.graph == "erdos_renyi" and knobs.edge_probability == 1):
        return nx.complete_graph(num)
    if knobs.graph == "torus":
        height = max(d for d in range(1, int(num**0.5) + 1) if num % d == 0)
        if height < 3:
            raise ArgumentError("graph", f"num_clients={num}; accepted: products of two numbers above 2", knobs.graph)
        return nx.convert_node_labels_to_integers(nx.grid_2d_graph(height, num // height, periodic=True))
    if knobs.graph == "erdos_renyi":
        return nx.fast_gnp_random_graph(num, knobs.edge_probability, seed=rng)
    if knobs.graph == "random_regular":
        if knobs.degree >= num or knobs.degree * num % 2:
            text = f"accepted: 1 to {num - 1}, such that degree times {num} clients is even"
            raise ArgumentError("degree", text, knobs.degree)
        return nx.random_regular_graph(knobs.degree, num, seed=rng)
    return _read_edges(knobs.edge_file, num)


def _read_edges(path: str, num: int) -> nx.Graph:
    graph = nx.empty_graph(num)
    lines = read_text(path, "edge_file").splitlines()
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].replace(",", " ").split()
        if not words:
            continue
        if len(words) < 2 or not all(is_client(word, num) for word in words[:2]):
            raise ArgumentError(
                "edge_file", f"line {number} is {line[:80]!r}; accepted: two clients, 0 to {num - 1}", path
            )
        graph.add_edge(int(words[0]), int(words[1]))
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    return graph


def is_client(word: str, num: int) -> bool:
    """Whether a word is the number of one of `num` clients."""
    return word.isascii() and word.isdecimal() and len(word) <= MOST_DIGITS and int(word) < num


def _read_matrix(path: str, num: int) -> sp.csr_array:
    """Reads a doubly stochastic matrix with a connected graph."""
    text = "is not a matrix of numbers; accepted: .npy, or text with one row per line"
    if path.endswith(".npy"):
        matrix = read_npy(path, "mixing_file")
        if matrix.dtype.kind not in "biuf":
            raise ArgumentError("mixing_file", f"has dtype {matrix.dtype}; accepted: numbers", path)
    else:
        content = read_text(path, "mixing_file")
        try:
            rows = [line.split("#")[0].replace(",", " ").split() for line in content.splitlines()]
            matrix = np.array([row for row in rows if row], np.float64)
        except ValueError as error:
            raise ArgumentError("mixing_file", text, path) from error
    if matrix.shape != (num, num):
        text = f"has shape {matrix.shape}; accepted: one row and one column for each of {num} clients"
        raise ArgumentError("mixing_file", text, path)
    matrix = sp.csr_array(matrix.astype(np.float64))
    fault = stochastic_fault(matrix)
    if fault:
        raise ArgumentError("mixing_file", f"{fault}; accepted: a doubly stochastic matrix", path)
    parts, _ = sp.csgraph.connected_components(matrix, connection="strong")
    if parts > 1:
        raise ArgumentError("mixing_file", f"its graph has {parts} components; accepted: a connected graph", path)
    return matrix


def stochastic_fault(matrix: sp.csr_array) -> str:
    """Why a matrix is not doubly stochastic (entries of at least 0, rows and columns that sum to 1 within 1e-6)."""
    if not np.isfinite(matrix.data).all():
        return "has entries that are not finite"
    low = matrix.min()
    if low < 0:
        return f"has an entry {low:g}, below 0"
    for axis, name in ((1, "row"), (0, "column")):
        sums = np.asarray(matrix.sum(axis=axis)).ravel()
        worst = int(np.argmax(np.abs(sums - 1)))
        if abs(sums[worst] - 1) > 1e-6:
            return f"{name} {worst} sums to {sums[worst]:g}, not to 1"
    return ""


def metropolis(graph: nx.Graph) -> sp.csr_array:
    """Metropolis-Hastings weights (K, K): W[i, j] = 1 / (1 + max(d_i, d_j)) on edges, the remainder on the diagonal."""
    num = graph.number_of_nodes()
    degree = np.array([graph.degree[k] for k in range(num)])
    i, j = np.array(graph.edges, int).reshape(-1, 2).T
    weights = 1 / (1 + np.maximum(degree[i], degree[j]))
    off = sp.coo_array((np.tile(weights, 2), (np.concatenate([i, j]), np.concatenate([j, i]))), shape=(num, num))
    return sp.csr_array(off + sp.diags_array(1 - np.asarray(off.sum(axis=1)).ravel()))


def fastest(graph: nx.Graph) -> sp.csr_array:
    """The symmetric doubly stochastic W (K, K) on the graph, self-loops allowed, with the smallest ||W - 1 1'/K||_2.

    Raises:
        ArgumentError: for more than LARGEST_PROGRAM clients, or without cvxpy.
    """
    num = graph.number_of_nodes()
    if num > LARGEST_PROGRAM:
        raise ArgumentError("mixing", f"accepted up to {LARGEST_PROGRAM} clients, not {num}; try metropolis", "fastest")
    cp = optional.load("cvxpy", "mixing", "fastest")
    edges = np.array(graph.edges, int).reshape(-1, 2)
    rows = np.arange(len(edges))
    signs = np.tile([1.0, -1.0], len(edges))
    incidence = sp.csc_array((signs, (edges.ravel(), np.repeat(rows, 2))), shape=(num, len(edges)))
    weights, norm = cp.Variable(len(edges), nonneg=True), cp.Variable()
    gap = np.eye(num) - 1 / num - incidence @ cp.diag(weights) @ incidence.T  # W - 1 1'/K, W = I - A diag(w) A'
    bound = norm * np.eye(num)
    constraints = [bound - gap >> 0, bound + gap >> 0, abs(incidence) @ weights <= 1]
    cp.Problem(cp.Minimize(norm), constraints).solve()
    w = np.maximum(np.asarray(weights.value), 0)
    w = w / max(1.0, float((abs(incidence) @ w).max()))  # the solver meets its constraints only to a tolerance
    mixing = sp.csr_array(sp.eye_array(num) - incidence @ sp.diags_array(w) @ incidence.T)
    return sp.csr_array(mixing.maximum(0))


def spectral_gap(matrices: list[sp.csr_array]) -> tuple[tuple[str, float], ...]:
    """1 - ||W_T ... W_1 - 1 1'/K||_2: T rounds shrink any disagreement to at most 1 minus the gap."""
    num = len(matrices[0].indptr) - 1
    if num > LARGEST_SPECTRUM:
        return ()
    product = functools.reduce(lambda total, matrix: matrix @ total, matrices, np.eye(num))
    name = "spectral_gap" if len(matrices) == 1 else f"spectral_gap_over_{len(matrices)}_rounds"
    return ((name, float(1 - np.linalg.norm(product - 1 / num, 2))),)


def _others(matrix: sp.csr_array) -> sp.csc_array:
    """The matrix without its diagonal, in CSC format."""
    off = sp.csc_array(matrix - sp.diags_array(matrix.diagonal()))
    off.eliminate_zeros()
    return off


def _sends(matrix: sp.csr_array, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Receivers of each client and their weights, (K, J) each."""
    num, off = len(matrix.indptr) - 1, _others(matrix)
    count = np.diff(off.indptr)
    sender = np.repeat(np.arange(num), count)
    slot = np.arange(len(sender)) - np.repeat(off.indptr[:-1], count) + 1
    neighbors = np.repeat(np.arange(num, dtype=np.int32)[:, None], width, axis=1)
    weights = np.zeros((num, width), np.float32)
    weights[:, 0] = matrix.diagonal()
    neighbors[sender, slot], weights[sender, slot] = off.indices, off.data
    return neighbors, weights
