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
def make_mixing(num_clients: int, hyperparameters: CommunicationGraph) -> Mixing:
    """Draws or reads the graphs and computes the edge weights.

    With mixing "metropolis", W[i, j] = 1 / (1 + max(d_i, d_j)); with "fastest", W is the symmetric matrix on the graph
    with the largest spectral gap (Boyd, Diaconis, Xiao, 2004).

    Raises:
        ArgumentError: if a hyperparameter or a file is wrong, a matrix is not doubly stochastic, or the graphs
            together are not connected.
    """
    files = (
        ("edge_file", hyperparameters.edge_file, "graph", hyperparameters.graph),
        ("mixing_file", hyperparameters.mixing_file, "mixing", hyperparameters.mixing),
    )
    for name, file, hyperparameter, value in files:
        if value == "file" and not file:
            raise ArgumentError(name, f"required with {hyperparameter}=file", file)
    if hyperparameters.mixing == "file":
        name = hyperparameters.mixing_file
        matrices = [_read_matrix(hyperparameters.mixing_file, num_clients)]
    else:
        graphs = _draw_connected(num_clients, hyperparameters)
        edges = " + ".join(f"{graph.number_of_edges():,}" for graph in graphs)
        name = f"{hyperparameters.graph}, {edges} edges, {hyperparameters.mixing} weights"
        mix = metropolis if hyperparameters.mixing == "metropolis" else fastest
        matrices = [mix(graph) for graph in graphs]

    # All clients have as many receivers as the one with the most, which makes J.
    num_receivers = max(_most_receivers(matrix) for matrix in matrices) + 1
    sends = [_sends(matrix, num_receivers) for matrix in matrices]
    return Mixing(
        neighbors=np.stack([neighbors for neighbors, _ in sends]),
        weights=np.stack([weights for _, weights in sends]),
        symmetric=all(abs(matrix - matrix.T).max() < 1e-9 for matrix in matrices),
        facts=(("graph", name), *spectral_gap(matrices)),
    )


def _draw_connected(num: int, hyperparameters: CommunicationGraph) -> list[nx.Graph]:
    """T graphs that together connect all clients."""
    is_random = hyperparameters.graph in RANDOM
    if hyperparameters.graphs > 1 and not is_random:
        text = f"accepted: 1, or more with {' and '.join(RANDOM)}"
        raise ArgumentError("graphs", text, hyperparameters.graphs)
    for attempt in range(DRAWS if is_random else 1):
        seeds = [[hyperparameters.graph_seed, attempt, t] for t in range(hyperparameters.graphs)]
        drawn = [_draw(num, hyperparameters, np.random.default_rng(seed)) for seed in seeds]
        if nx.is_connected(nx.compose_all(drawn)):
            return drawn
    tried = f" in each of {DRAWS} draws" if is_random else ""
    if hyperparameters.graphs > 1:
        tried += f", {hyperparameters.graphs} rounds together"
    text = f"not connected{tried}; accepted: a graph that connects all clients"
    raise ArgumentError("graph", text, hyperparameters.graph)


def _draw(num: int, hyperparameters: CommunicationGraph, rng: np.random.Generator) -> nx.Graph:
    """Draws or reads one graph on clients 0..K-1."""
    if num < 2:
        raise ArgumentError("num_clients", "accepted: 2 or more for a communication graph", num)
    if hyperparameters.graph == "ring":
        return nx.cycle_graph(num)
    has_all_edges = hyperparameters.graph == "erdos_renyi" and hyperparameters.edge_probability == 1
    if hyperparameters.graph == "complete" or has_all_edges:
        return nx.complete_graph(num)
    if hyperparameters.graph == "torus":
        height = max(d for d in range(1, int(num**0.5) + 1) if num % d == 0)
        if height < 3:
            text = f"num_clients={num}; accepted: products of two numbers above 2"
            raise ArgumentError("graph", text, hyperparameters.graph)
        grid = nx.grid_2d_graph(height, num // height, periodic=True)
        return nx.convert_node_labels_to_integers(grid)
    if hyperparameters.graph == "erdos_renyi":
        return nx.fast_gnp_random_graph(num, hyperparameters.edge_probability, seed=rng)
    if hyperparameters.graph == "random_regular":
        if hyperparameters.degree >= num or hyperparameters.degree * num % 2:
            text = f"accepted: 1 to {num - 1}, such that degree times {num} clients is even"
            raise ArgumentError("degree", text, hyperparameters.degree)
        return nx.random_regular_graph(hyperparameters.degree, num, seed=rng)
    return _read_edges(hyperparameters.edge_file, num)


def _read_edges(path: str, num: int) -> nx.Graph:
    """Reads a graph from a file with one edge a line."""
    graph = nx.empty_graph(num)
    lines = read_text(path, "edge_file").splitlines()
    for number, line in enumerate(lines, 1):
        words = _words(line)
        if not words:
            continue
        if len(words) < 2 or not all(is_client(word, num) for word in words[:2]):
            text = f"line {number} is {line[:80]!r}; accepted: two clients, 0 to {num - 1}"
            raise ArgumentError("edge_file", text, path)
        graph.add_edge(int(words[0]), int(words[1]))
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    return graph


def _words(line: str) -> list[str]:
    """The words of a line, divided by spaces or commas, without comments."""
    return line.split("#")[0].replace(",", " ").split()


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
            rows = [_words(line) for line in content.splitlines()]
            matrix = np.array([row for row in rows if row], np.float64)
        except ValueError as error:
            raise ArgumentError("mixing_file", text, path) from error
    if matrix.shape != (num, num):
        text = (
            f"has shape {matrix.shape}; accepted: one row and one column for each of {num} clients"
        )
        raise ArgumentError("mixing_file", text, path)
    matrix = sp.csr_array(matrix.astype(np.float64))
    fault = stochastic_fault(matrix)
    if fault:
        raise ArgumentError("mixing_file", f"{fault}; accepted: a doubly stochastic matrix", path)
    num_components, _ = sp.csgraph.connected_components(matrix, connection="strong")
    if num_components > 1:
        text = f"its graph has {num_components} components; accepted: a connected graph"
        raise ArgumentError("mixing_file", text, path)
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

    # Each edge is two entries, and each row sums to 1.
    rows = np.concatenate([i, j])
    columns = np.concatenate([j, i])
    on_edges = sp.coo_array((np.tile(weights, 2), (rows, columns)), shape=(num, num))
    row_sums = np.asarray(on_edges.sum(axis=1)).ravel()
    return sp.csr_array(on_edges + sp.diags_array(1 - row_sums))


def fastest(graph: nx.Graph) -> sp.csr_array:
    """The symmetric doubly stochastic W (K, K) on the graph, self-loops allowed, with the smallest ||W - 1 1'/K||_2.

    Raises:
        ArgumentError: for more than LARGEST_PROGRAM clients, or without cvxpy.
    """
    num = graph.number_of_nodes()
    if num > LARGEST_PROGRAM:
        text = f"accepted up to {LARGEST_PROGRAM} clients, not {num}; try metropolis"
        raise ArgumentError("mixing", text, "fastest")
    cp = optional.load("cvxpy", "mixing", "fastest")

    # A, (K, edges): 1 and -1 at an edge's two clients. W = I - A diag(w) A'.
    edges = np.array(graph.edges, int).reshape(-1, 2)
    num_edges = len(edges)
    signs = np.tile([1.0, -1.0], num_edges)
    edge_numbers = np.arange(num_edges)
    positions = (edges.ravel(), np.repeat(edge_numbers, 2))
    incidence = sp.csc_array((signs, positions), shape=(num, num_edges))

    # Minimize the norm of W - 1 1'/K over edge weights w >= 0 that sum to at most 1 at each client.
    weights = cp.Variable(num_edges, nonneg=True)
    norm = cp.Variable()
    gap = np.eye(num) - 1 / num - incidence @ cp.diag(weights) @ incidence.T
    bound = norm * np.eye(num)
    constraints = [bound - gap >> 0, bound + gap >> 0, abs(incidence) @ weights <= 1]
    cp.Problem(cp.Minimize(norm), constraints).solve()

    # The solver meets its constraints only to a tolerance.
    w = np.maximum(np.asarray(weights.value), 0)
    largest_sum = float((abs(incidence) @ w).max())
    w = w / max(1.0, largest_sum)
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


def _most_receivers(matrix: sp.csr_array) -> int:
    """The largest number of other clients that one client sends to."""
    return int(np.diff(_others(matrix).indptr).max())


def _sends(matrix: sp.csr_array, num_receivers: int) -> tuple[np.ndarray, np.ndarray]:
    """Receivers of each client and their weights, (K, J) each."""
    num = len(matrix.indptr) - 1
    others = _others(matrix)

    # For each entry W[i, k] off the diagonal: its sender k, and its place among those of k.
    count = np.diff(others.indptr)
    sender = np.repeat(np.arange(num), count)
    first = np.repeat(others.indptr[:-1], count)
    position = np.arange(len(sender)) - first + 1

    clients = np.arange(num, dtype=np.int32)
    neighbors = np.repeat(clients[:, None], num_receivers, axis=1)
    neighbors[sender, position] = others.indices
    weights = np.zeros((num, num_receivers), np.float32)
    weights[:, 0] = matrix.diagonal()
    weights[sender, position] = others.data
    return neighbors, weights
