"""Who mixes with whom without a server: communication graphs and doubly stochastic mixing matrices."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import networkx as nx
import numpy as np
import scipy.sparse as sp

from pfljax.core.types import UsageError

DRAWS = 100  # of a random graph, until one is connected
LARGEST_PROGRAM = 300  # clients for whom the fastest mixing matrix is computed: minutes beyond that
LARGEST_SPECTRUM = 2000  # clients for whom the spectral gap is computed, from dense matrices


class Mixing(NamedTuple):
    """T mixing matrices W_t, used in turn, as what each client sends.

    Attributes:
        neighbors: (T, K, J) int32: to whom client k sends; itself first, and again where it has fewer than J.
        weights: (T, K, J) float32: the weight W[i, k] with which receiver i counts it; 0 where there is none.
        symmetric: Whether all W_t are.
        facts: For reports: the graph and its spectral gap.
    """

    neighbors: np.ndarray
    weights: np.ndarray
    symmetric: bool
    facts: tuple[tuple[str, str | float], ...]

    @property
    def period(self) -> int:
        """T."""
        return len(self.neighbors)


@functools.cache
def make_mixing(
    num_clients: int,
    *,
    graph: str = "erdos_renyi",
    edge_probability: float = 0.5,
    degree: int = 4,
    edge_file: str = "",
    num_graphs: int = 1,
    mixing: str = "metropolis",
    mixing_file: str = "",
    seed: int = 0,
    prefix: str = "--",
) -> Mixing:
    """Draws or reads the graphs, and weighs their edges.

    Args:
        num_clients: K.
        graph: "ring", "torus", "erdos_renyi", "random_regular", "complete" or "file".
        edge_probability: Of erdos_renyi.
        degree: Of random_regular.
        edge_file: A line "i j" for each edge.
        num_graphs: T; a fixed graph has 1.
        mixing: "metropolis": W[i, j] = 1 / (1 + max(d_i, d_j)); "fastest": of all symmetric W on the graph the one of
            the largest spectral gap (Boyd, Diaconis, Xiao, 2004); "file": K x K numbers, which say the graph too.
        mixing_file: .npy or text.
        seed: Decides random graphs.
        prefix: Of the flags that errors name.

    Raises:
        UsageError: If a knob or a file is wrong, a matrix is not doubly stochastic, or the graphs together are not
            connected.
    """
    for knob, file, chosen in (("edge_file", edge_file, graph), ("mixing_file", mixing_file, mixing)):
        if bool(file) != (chosen == "file"):
            which = "graph" if knob == "edge_file" else "mixing"
            raise UsageError(f"{prefix}{knob}={file}: is read with {prefix}{which}=file, and has to be given there")
    if mixing == "file":
        matrices, name = [_read_matrix(f"{prefix}mixing_file={mixing_file}", mixing_file, num_clients)], mixing_file
    else:
        if num_graphs < 1 or (num_graphs > 1 and graph not in ("erdos_renyi", "random_regular")):
            raise UsageError(f"{prefix}graphs={num_graphs}: accepted: 1, and more for erdos_renyi and random_regular")
        options = {"probability": edge_probability, "degree": degree, "edge_file": edge_file, "prefix": prefix}
        random = graph in ("erdos_renyi", "random_regular")
        for attempt in range(DRAWS if random else 1):
            seeds = [[seed, attempt, t] for t in range(num_graphs)]
            drawn = [_draw(graph, num_clients, np.random.default_rng(s), **options) for s in seeds]
            if nx.is_connected(nx.compose_all(drawn)):
                break
        else:
            tried = f" in each of {DRAWS} draws" * random + f", {num_graphs} rounds together" * (num_graphs > 1)
            raise UsageError(f"{prefix}graph={graph}: not connected{tried}; accepted: a graph that joins all clients")
        name = f"{graph}, {' + '.join(f'{g.number_of_edges():,}' for g in drawn)} edges, {mixing} weights"
        weigh = metropolis if mixing == "metropolis" else functools.partial(fastest, prefix=prefix)
        matrices = [weigh(g) for g in drawn]
    source = f"{prefix}mixing_file={mixing_file}" if mixing == "file" else f"{prefix}mixing={mixing}"
    for matrix in matrices:
        check_doubly_stochastic(source, matrix)
    if mixing == "file":
        parts, _ = sp.csgraph.connected_components(matrices[0], connection="strong")
        if parts > 1:
            raise UsageError(f"{source}: its graph falls into {parts} parts; accepted: one that joins all clients")
    width = max(int(np.diff(_others(matrix).indptr).max()) for matrix in matrices) + 1
    neighbors, weights = zip(*(_sends(matrix, width) for matrix in matrices), strict=True)
    symmetric = all(abs(matrix - matrix.T).max() < 1e-9 for matrix in matrices)
    facts = (("graph", name), *spectral_gap(matrices))
    return Mixing(np.stack(neighbors), np.stack(weights), symmetric, facts)


def _draw(
    graph: str, num: int, rng: np.random.Generator, *, probability: float, degree: int, edge_file: str, prefix: str
) -> nx.Graph:
    """One graph on clients 0..K-1."""
    if num < 2:
        raise UsageError(f"--num_clients={num}: a communication graph needs 2 or more")
    if graph == "ring":
        return nx.cycle_graph(num)
    if graph == "complete":
        return nx.complete_graph(num)
    if graph == "torus":
        height = max(d for d in range(1, int(num**0.5) + 1) if num % d == 0)
        if height < 3:
            raise UsageError(f"{prefix}graph=torus: --num_clients={num}; accepted: products of two numbers from 3 on")
        return nx.convert_node_labels_to_integers(nx.grid_2d_graph(height, num // height, periodic=True))
    if graph == "erdos_renyi":
        if not 0 < probability <= 1:
            raise UsageError(f"{prefix}edge_probability={probability}: accepted: above 0, at most 1")
        return nx.fast_gnp_random_graph(num, probability, seed=rng) if probability < 1 else nx.complete_graph(num)
    if graph == "random_regular":
        if not 0 < degree < num or degree * num % 2:
            raise UsageError(
                f"{prefix}degree={degree}: accepted: 1 to {num - 1}, the degree times the {num} clients being even"
            )
        return nx.random_regular_graph(degree, num, seed=rng)
    return _read_edges(f"{prefix}edge_file={edge_file}", edge_file, num)


def _read_edges(where: str, path: str, num: int) -> nx.Graph:
    graph = nx.empty_graph(num)
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{where}: cannot be read ({getattr(error, 'strerror', None) or 'not a text'})") from error
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].replace(",", " ").split()
        if not words:
            continue
        if len(words) < 2 or not all(word.isdigit() and int(word) < num for word in words[:2]):
            raise UsageError(f"{where}: line {number} is {line!r}; accepted: two clients, 0 to {num - 1}")
        graph.add_edge(int(words[0]), int(words[1]))
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    return graph


def _read_matrix(where: str, path: str, num: int) -> sp.csr_array:
    try:
        if path.endswith(".npy"):
            matrix = np.load(path, allow_pickle=False)
        else:
            matrix = np.loadtxt(path, delimiter="," if "," in Path(path).read_text() else None, ndmin=2)
        matrix = np.asarray(matrix, np.float64)
    except OSError as error:
        raise UsageError(f"{where}: cannot be read ({error.strerror or error})") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise UsageError(f"{where}: is no matrix of numbers; accepted: .npy, or text with a row a line") from error
    if matrix.shape != (num, num):
        raise UsageError(f"{where}: has shape {matrix.shape}; accepted: a row and a column for each of {num} clients")
    return sp.csr_array(matrix)


def check_doubly_stochastic(where: str, matrix: sp.csr_array) -> None:
    """Raises UsageError unless entries are 0 or more and every row and column sums to 1 (to 1e-6)."""
    low = matrix.min()
    if not low >= 0:
        raise UsageError(f"{where}: holds {low:g}; accepted: a doubly stochastic matrix, with entries of 0 or more")
    for axis, name in ((1, "row"), (0, "column")):
        sums = np.asarray(matrix.sum(axis=axis)).ravel()
        worst = int(np.argmax(np.abs(sums - 1)))
        if not abs(sums[worst] - 1) <= 1e-6:
            raise UsageError(
                f"{where}: {name} {worst} sums to {sums[worst]:g}; accepted: a doubly stochastic matrix, rows and "
                "columns summing to 1"
            )


def metropolis(graph: nx.Graph) -> sp.csr_array:
    """Metropolis-Hastings weights (K, K): W[i, j] = 1 / (1 + max(d_i, d_j)) on edges, the rest on the diagonal."""
    num = graph.number_of_nodes()
    degree = np.array([graph.degree[k] for k in range(num)])
    i, j = np.array(graph.edges, int).reshape(-1, 2).T
    weights = 1 / (1 + np.maximum(degree[i], degree[j]))
    off = sp.coo_array((np.tile(weights, 2), (np.concatenate([i, j]), np.concatenate([j, i]))), shape=(num, num))
    return sp.csr_array(off + sp.diags_array(1 - np.asarray(off.sum(axis=1)).ravel()))


def fastest(graph: nx.Graph, prefix: str = "--") -> sp.csr_array:
    """The symmetric doubly stochastic W (K, K) on the graph, self loops allowed, of the smallest ||W - 1 1'/K||_2.

    Raises:
        UsageError: for more than LARGEST_PROGRAM clients, or without cvxpy.
    """
    num = graph.number_of_nodes()
    if num > LARGEST_PROGRAM:
        raise UsageError(f"{prefix}mixing=fastest: accepted up to {LARGEST_PROGRAM} clients, not {num}; try metropolis")
    try:
        import cvxpy as cp
    except ImportError as error:
        raise UsageError(f"{prefix}mixing=fastest: needs cvxpy: pip install 'pfljax[mixing]'") from error
    edges = np.array(graph.edges, int).reshape(-1, 2)
    rows = np.arange(len(edges))
    signs = np.tile([1.0, -1.0], len(edges))
    incidence = sp.csc_array((signs, (edges.ravel(), np.repeat(rows, 2))), shape=(num, len(edges)))
    weights, norm = cp.Variable(len(edges), nonneg=True), cp.Variable()
    gap = np.eye(num) - 1 / num - incidence @ cp.diag(weights) @ incidence.T  # W - 1 1'/K, W = I - A diag(w) A'
    bound = norm * np.eye(num)
    constraints = [bound - gap >> 0, bound + gap >> 0, abs(incidence) @ weights <= 1]
    cp.Problem(cp.Minimize(norm), constraints).solve()
    w = np.maximum(weights.value, 0)
    w = w / max(1.0, float((abs(incidence) @ w).max()))  # the solver meets its constraints to a tolerance only
    return sp.csr_array(sp.eye_array(num) - incidence @ sp.diags_array(w) @ incidence.T).maximum(0)


def spectral_gap(matrices: list[sp.csr_array]) -> tuple[tuple[str, float], ...]:
    """1 - ||W_T ... W_1 - 1 1'/K||_2: what is left of a disagreement after the T rounds is 1 minus the gap."""
    num = matrices[0].shape[0]
    if num > LARGEST_SPECTRUM:
        return ()
    product = functools.reduce(lambda total, matrix: matrix @ total, matrices, np.eye(num))
    name = "spectral_gap" if len(matrices) == 1 else f"spectral_gap_over_{len(matrices)}_rounds"
    return ((name, float(1 - np.linalg.norm(product - 1 / num, 2))),)


def _others(matrix: sp.csr_array) -> sp.csc_array:
    """The matrix without its diagonal, by columns."""
    off = sp.csc_array(matrix - sp.diags_array(matrix.diagonal()))
    off.eliminate_zeros()
    return off


def _sends(matrix: sp.csr_array, width: int) -> tuple[np.ndarray, np.ndarray]:
    """To whom each client sends and with which weight, (K, J) each."""
    num, off = matrix.shape[0], _others(matrix)
    count = np.diff(off.indptr)
    sender = np.repeat(np.arange(num), count)
    slot = np.arange(len(sender)) - np.repeat(off.indptr[:-1], count) + 1
    neighbors = np.repeat(np.arange(num, dtype=np.int32)[:, None], width, axis=1)
    weights = np.zeros((num, width), np.float32)
    weights[:, 0] = matrix.diagonal()
    neighbors[sender, slot], weights[sender, slot] = off.indices, off.data
    return neighbors, weights
