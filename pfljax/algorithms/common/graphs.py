"""Who mixes with whom without a server: communication graphs and doubly stochastic mixing matrices."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from pfljax.core.errors import ArgumentError
from pfljax.core.method import knob

if TYPE_CHECKING:  # both are slow to import, and few methods need them
    import networkx as nx
    import scipy.sparse as sp

DRAWS = 100  # of a random graph, until one is connected
LARGEST_PROGRAM = 300  # clients for whom the fastest mixing matrix is computed: minutes beyond that
LARGEST_SPECTRUM = 2000  # clients for whom the spectral gap is computed, from dense matrices
RANDOM = ("erdos_renyi", "random_regular")


@dataclasses.dataclass(frozen=True)
class CommunicationGraph:
    """Knobs of a decentralized method: who mixes with whom, and with which weights."""

    graph: Literal["erdos_renyi", "ring", "torus", "random_regular", "complete", "file"] = knob(
        "erdos_renyi", help="who mixes with whom"
    )
    edge_probability: float = knob(0.5, above=0, at_most=1, help="probability of an edge of erdos_renyi")
    degree: int = knob(4, at_least=1, help="number of neighbors in random_regular")
    edge_file: str = knob("", help='file of graph=file: a line "i j" for each edge, clients from 0')
    graphs: int = knob(
        1, at_least=1, help="number of graphs that are used in turn, round after round (erdos_renyi, random_regular)"
    )
    mixing: Literal["metropolis", "fastest", "file"] = knob(
        "metropolis", help="mixing matrix on the graph; fastest has the largest spectral gap"
    )
    mixing_file: str = knob("", help="file of mixing=file: K x K numbers (.npy or text), which say the graph too")
    graph_seed: int = knob(0, at_least=0, help="seed of random graphs")


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
def make_mixing(num_clients: int, knobs: CommunicationGraph, owner: str = "") -> Mixing:
    """Draws or reads the graphs, and weighs their edges.

    Metropolis weights are W[i, j] = 1 / (1 + max(d_i, d_j)); the fastest ones have the largest spectral gap of all
    symmetric W on the graph (Boyd, Diaconis, Xiao, 2004).

    Args:
        num_clients: K.
        knobs: The graph and its weights.
        owner: Registered name of the method whose knobs they are.

    Raises:
        ArgumentError: if a knob or a file is wrong, a matrix is not doubly stochastic, or the graphs together are not
            connected.
    """
    error = functools.partial(ArgumentError, owner=owner)
    for name, chosen in (("edge_file", "graph"), ("mixing_file", "mixing")):
        if bool(getattr(knobs, name)) != (getattr(knobs, chosen) == "file"):
            raise error(name, f"is read with {chosen}=file, and has to be given there", getattr(knobs, name))
    if knobs.mixing == "file":
        source, name = ("mixing_file", knobs.mixing_file), knobs.mixing_file
        matrices = [_read_matrix(error, knobs.mixing_file, num_clients)]
    else:
        drawn = _draw_connected(error, num_clients, knobs)
        edges = " + ".join(f"{graph.number_of_edges():,}" for graph in drawn)
        source, name = ("mixing", knobs.mixing), f"{knobs.graph}, {edges} edges, {knobs.mixing} weights"
        weigh = metropolis if knobs.mixing == "metropolis" else functools.partial(fastest, owner=owner)
        matrices = [weigh(graph) for graph in drawn]
    for matrix in matrices:
        check_doubly_stochastic(matrix, *source, owner=owner)
    if knobs.mixing == "file":
        _check_connected(error, matrices[0], knobs.mixing_file)
    width = max(int(np.diff(_others(matrix).indptr).max()) for matrix in matrices) + 1
    neighbors, weights = zip(*(_sends(matrix, width) for matrix in matrices), strict=True)
    symmetric = all(abs(matrix - matrix.T).max() < 1e-9 for matrix in matrices)
    facts = (("graph", name), *spectral_gap(matrices))
    return Mixing(np.stack(neighbors), np.stack(weights), symmetric, facts)


def _check_connected(error, matrix: sp.csr_array, path: str) -> None:
    from scipy.sparse.csgraph import connected_components

    parts, _ = connected_components(matrix, connection="strong")
    if parts > 1:
        raise error("mixing_file", f"its graph falls into {parts} parts; accepted: one that joins all clients", path)


def _draw_connected(error, num_clients: int, knobs: CommunicationGraph) -> list[nx.Graph]:
    """The graphs of all rounds of a period, which together are connected."""
    import networkx as nx

    if knobs.graphs > 1 and knobs.graph not in RANDOM:
        raise error("graphs", f"accepted: 1, and more for {' and '.join(RANDOM)}", knobs.graphs)
    for attempt in range(DRAWS if knobs.graph in RANDOM else 1):
        seeds = [[knobs.graph_seed, attempt, t] for t in range(knobs.graphs)]
        drawn = [_draw(error, num_clients, knobs, np.random.default_rng(seed)) for seed in seeds]
        if nx.is_connected(nx.compose_all(drawn)):
            return drawn
    tried = f" in each of {DRAWS} draws" * (knobs.graph in RANDOM)
    tried += f", {knobs.graphs} rounds together" * (knobs.graphs > 1)
    raise error("graph", f"not connected{tried}; accepted: a graph that joins all clients", knobs.graph)


def _draw(error, num: int, knobs: CommunicationGraph, rng: np.random.Generator) -> nx.Graph:
    """One graph on clients 0..K-1."""
    import networkx as nx

    if num < 2:
        raise ArgumentError("num_clients", "a communication graph needs 2 or more", num)
    if knobs.graph == "ring":
        return nx.cycle_graph(num)
    if knobs.graph == "complete":
        return nx.complete_graph(num)
    if knobs.graph == "torus":
        height = max(d for d in range(1, int(num**0.5) + 1) if num % d == 0)
        if height < 3:
            raise error("graph", f"num_clients={num}; accepted: products of two numbers from 3 on", "torus")
        return nx.convert_node_labels_to_integers(nx.grid_2d_graph(height, num // height, periodic=True))
    if knobs.graph == "erdos_renyi":
        probability = knobs.edge_probability
        return nx.fast_gnp_random_graph(num, probability, seed=rng) if probability < 1 else nx.complete_graph(num)
    if knobs.graph == "random_regular":
        if not knobs.degree < num or knobs.degree * num % 2:
            accepted = f"accepted: 1 to {num - 1}, the degree times the {num} clients being even"
            raise error("degree", accepted, knobs.degree)
        return nx.random_regular_graph(knobs.degree, num, seed=rng)
    return _read_edges(error, knobs.edge_file, num)


def _read_edges(error, path: str, num: int) -> nx.Graph:
    import networkx as nx

    error, graph = functools.partial(error, "edge_file", value=path), nx.empty_graph(num)
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as reason:
        raise error(f"cannot be read ({getattr(reason, 'strerror', None) or 'not a text'})") from reason
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].replace(",", " ").split()
        if not words:
            continue
        if len(words) < 2 or not all(word.isdecimal() and int(word) < num for word in words[:2]):
            raise error(f"line {number} is {line!r}; accepted: two clients, 0 to {num - 1}")
        graph.add_edge(int(words[0]), int(words[1]))
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    return graph


def _read_matrix(error, path: str, num: int) -> sp.csr_array:
    import scipy.sparse as sp

    error = functools.partial(error, "mixing_file", value=path)
    try:
        if path.endswith(".npy"):
            matrix = np.load(path, allow_pickle=False)
        else:
            matrix = np.loadtxt(path, delimiter="," if "," in Path(path).read_text() else None, ndmin=2)
        matrix = np.asarray(matrix, np.float64)
    except OSError as reason:
        raise error(f"cannot be read ({reason.strerror or reason})") from reason
    except (ValueError, UnicodeDecodeError) as reason:
        raise error("is no matrix of numbers; accepted: .npy, or text with a row a line") from reason
    if matrix.shape != (num, num):
        raise error(f"has shape {matrix.shape}; accepted: a row and a column for each of {num} clients")
    return sp.csr_array(matrix)


def check_doubly_stochastic(matrix: sp.csr_array, argument: str, value: str, *, owner: str = "") -> None:
    """Raises `ArgumentError` unless entries are 0 or more and every row and column sums to 1 (to 1e-6)."""
    error = functools.partial(ArgumentError, argument, value=value, owner=owner)
    low = matrix.min()
    if not low >= 0:
        raise error(f"holds {low:g}; accepted: a doubly stochastic matrix, with entries of 0 or more")
    for axis, name in ((1, "row"), (0, "column")):
        sums = np.asarray(matrix.sum(axis=axis)).ravel()
        worst = int(np.argmax(np.abs(sums - 1)))
        if not abs(sums[worst] - 1) <= 1e-6:
            accepted = "accepted: a doubly stochastic matrix, rows and columns summing to 1"
            raise error(f"{name} {worst} sums to {sums[worst]:g}; {accepted}")


def metropolis(graph: nx.Graph) -> sp.csr_array:
    """Metropolis-Hastings weights (K, K): W[i, j] = 1 / (1 + max(d_i, d_j)) on edges, the rest on the diagonal."""
    import scipy.sparse as sp

    num = graph.number_of_nodes()
    degree = np.array([graph.degree[k] for k in range(num)])
    i, j = np.array(graph.edges, int).reshape(-1, 2).T
    weights = 1 / (1 + np.maximum(degree[i], degree[j]))
    off = sp.coo_array((np.tile(weights, 2), (np.concatenate([i, j]), np.concatenate([j, i]))), shape=(num, num))
    return sp.csr_array(off + sp.diags_array(1 - np.asarray(off.sum(axis=1)).ravel()))


def fastest(graph: nx.Graph, owner: str = "") -> sp.csr_array:
    """The symmetric doubly stochastic W (K, K) on the graph, self loops allowed, of the smallest ||W - 1 1'/K||_2.

    Raises:
        ArgumentError: for more than LARGEST_PROGRAM clients, or without cvxpy.
    """
    import scipy.sparse as sp

    num, error = graph.number_of_nodes(), functools.partial(ArgumentError, "mixing", value="fastest", owner=owner)
    if num > LARGEST_PROGRAM:
        raise error(f"accepted up to {LARGEST_PROGRAM} clients, not {num}; try metropolis")
    try:
        import cvxpy as cp
    except ImportError as reason:
        raise error("needs cvxpy: pip install 'pfljax[mixing]'") from reason
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
    import scipy.sparse as sp

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
