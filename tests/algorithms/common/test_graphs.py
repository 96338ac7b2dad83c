"""Mixing matrices against their definitions."""

import numpy as np
import pytest

from pfljax.algorithms import DFedEM
from pfljax.algorithms.common import graphs
from pfljax.contract.errors import ArgumentError


def make_mixing(num, **hyperparameters):
    return graphs.make_mixing(num, DFedEM(**hyperparameters))


def dense(mixing, t=0):
    """W_t (K, K) from what clients send."""
    num = mixing.neighbors.shape[1]
    matrix = np.zeros((num, num))
    for k in range(num):
        np.add.at(matrix[:, k], mixing.neighbors[t, k], mixing.weights[t, k])
    return matrix


def test_metropolis_weights_of_a_path_by_hand(tmp_path):
    (tmp_path / "edges.txt").write_text("# a path\n0 1\n1,2\n\n")
    mixing = make_mixing(3, graph="file", edge_file=str(tmp_path / "edges.txt"))
    # Degrees 1, 2, 1: both edges weigh 1 / (1 + 2).
    np.testing.assert_allclose(
        dense(mixing), np.array([[2, 1, 0], [1, 1, 1], [0, 1, 2]]) / 3, rtol=1e-6
    )
    # Eigenvalues 1, 2/3, 0.
    assert dict(mixing.facts)["spectral_gap"] == pytest.approx(1 / 3)
    assert mixing.symmetric and mixing.period == 1


@pytest.mark.parametrize("graph", ["ring", "torus", "erdos_renyi", "random_regular", "complete"])
@pytest.mark.parametrize("mixing", ["metropolis", "fastest"])
def test_matrices_are_doubly_stochastic_and_mix(graph, mixing):
    found = make_mixing(12, graph=graph, mixing=mixing)
    matrix = dense(found)
    assert (matrix >= 0).all()
    np.testing.assert_allclose(matrix.sum(axis=0), 1, atol=1e-6)
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-6)
    gap = dict(found.facts)["spectral_gap"]
    eigenvalues = np.sort(np.abs(np.linalg.eigvalsh(matrix)))
    assert gap == pytest.approx(1 - eigenvalues[-2], abs=1e-5) and gap > 0.01
    np.testing.assert_array_equal(found.neighbors[0, :, 0], np.arange(12))
    degree = {"ring": 2, "torus": 4, "random_regular": 4, "complete": 11}.get(graph)
    if degree:
        others = (found.neighbors[0] != np.arange(12)[:, None]).sum(axis=1)
        assert (others == degree).all() or mixing == "fastest"  # which may leave edges out


def test_the_fastest_matrix_of_a_ring_is_the_known_one():
    num = 9
    gap = dict(make_mixing(num, graph="ring", mixing="fastest").facts)["spectral_gap"]
    # W = circ(1 - 2 w, w): eigenvalues 1 - 2 w (1 - cos t); the best w balances the two ends of the spectrum.
    low, high = (1 - np.cos(2 * np.pi * k / num) for k in (1, num // 2))
    assert gap == pytest.approx(2 * low / (low + high), abs=1e-3)
    assert gap > dict(make_mixing(num, graph="ring").facts)["spectral_gap"]


def test_graphs_in_turn_are_connected_together_only():
    mixing = make_mixing(10, graph="erdos_renyi", edge_probability=0.15, graphs=6)
    assert mixing.period == 6
    reached = np.linalg.multi_dot([dense(mixing, t) for t in range(6)])
    gaps = [1 - np.sort(np.abs(np.linalg.eigvalsh(dense(mixing, t))))[-2] for t in range(6)]
    assert min(gaps) < 1e-6  # none of it mixes alone, at least once
    assert dict(mixing.facts)["spectral_gap_over_6_rounds"] > 1e-3
    np.testing.assert_allclose(reached.sum(axis=0), 1, atol=1e-6)


@pytest.mark.parametrize("suffix", ["npy", "csv", "txt"])
def test_a_matrix_from_a_file(tmp_path, suffix):
    matrix = np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]])
    path = tmp_path / f"w.{suffix}"
    if suffix == "npy":
        np.save(path, matrix)
    else:
        np.savetxt(path, matrix, delimiter="," if suffix == "csv" else " ")
    mixing = make_mixing(3, mixing="file", mixing_file=str(path))
    np.testing.assert_allclose(dense(mixing), matrix)
    assert not mixing.symmetric


def error(num=4, **hyperparameters):
    with pytest.raises(ArgumentError) as found:
        make_mixing(num, **hyperparameters)
    message = str(found.value)
    assert "\n" not in message and found.value.argument in message
    return message


def test_errors_name_the_argument_and_what_is_accepted(tmp_path):
    edges = tmp_path / "edges.txt"
    matrix = tmp_path / "w.txt"
    edges.write_text("0 1\n2 3\n")
    assert "not connected" in error(graph="file", edge_file=str(edges))
    edges.write_text("0 1\n1 7\n")
    message = error(graph="file", edge_file=str(edges))
    assert "line 2" in message and "0 to 3" in message
    assert "edge_file" in error(graph="file")
    assert "edge_file" in error(graph="ring", edge_file=str(edges))
    assert "cannot be read" in error(graph="file", edge_file=str(tmp_path / "none"))
    assert "mixing_file" in error(mixing="file")
    matrix.write_text("0.5 0.5\n0.4 0.5\n")
    assert "row 1 sums to 0.9" in error(2, mixing="file", mixing_file=str(matrix))
    matrix.write_text("1.5 -0.5\n-0.5 1.5\n")
    assert "-0.5" in error(2, mixing="file", mixing_file=str(matrix))
    matrix.write_text("1 0\n0 1\n")
    assert "2 components" in error(2, mixing="file", mixing_file=str(matrix))
    assert "shape (2, 2)" in error(3, mixing="file", mixing_file=str(matrix))
    matrix.write_text("a b\n")
    assert "numbers" in error(2, mixing="file", mixing_file=str(matrix))
    assert "100 draws" in error(40, graph="erdos_renyi", edge_probability=0.01)
    assert "edge_probability" in error(edge_probability=1.5)
    assert "degree" in error(5, graph="random_regular", degree=3)
    assert "torus" in error(7, graph="torus")
    assert "graphs" in error(graph="ring", graphs=2)
    assert "accepted up to" in error(301, graph="ring", mixing="fastest")
    assert "num_clients=1" in error(1, graph="ring")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0 ٣\n", "line 1"),  # a digit to Python, but not one that graphs are written with
        (f"0 {'9' * 5000}\n", "line 1"),
    ],
)
def test_edges_that_are_none_are_refused(tmp_path, content, message):
    edges = tmp_path / "edges.txt"
    edges.write_text(content)
    found = error(graph="file", edge_file=str(edges))
    assert message in found and len(found) < 300


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1 2\n3\n", "not a matrix of numbers"),
        ("inf 0\n0 inf\n", "not finite"),
        (np.array([["a", "b"], ["c", "d"]]), "has dtype <U1; accepted: numbers"),
        (np.zeros((0, 0)), "shape (0, 0)"),
    ],
)
def test_matrices_that_are_none_are_refused(tmp_path, content, message):
    path = tmp_path / ("w.npy" if isinstance(content, np.ndarray) else "w.txt")
    if isinstance(content, np.ndarray):
        np.save(path, content)
    else:
        path.write_text(content)
    assert message in error(2, mixing="file", mixing_file=str(path))
