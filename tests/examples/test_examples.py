"""The examples run, and reach what a user would expect of them."""

import pytest
from toys import load_example as load


@pytest.mark.parametrize(
    ("name", "least"),
    [  # chance is 0.5 or 0.1
        pytest.param("own_data", 0.85, marks=pytest.mark.slow),
        pytest.param("own_linen_model", 0.75, marks=pytest.mark.slow),
        pytest.param("own_nnx_model", 0.75, marks=pytest.mark.slow),
        ("own_loss", 0.6),
        ("own_inputs", 0.8),
        ("own_target", 0.8),  # 0.75 of the pixels are outside of the square
    ],
)
def test_examples_learn(name, least):
    assert load(name).main().accuracy > least


def test_metrics_of_one_s_own_are_in_the_table():
    table = load("own_metric").main()
    heads, body = table.columns()
    assert [heads[place] for place in (4, 5)] == ["f1", "worst recall"]
    for row, cells in zip(table.rows, body, strict=True):
        scores = [row["metrics"][name]["mean"] for name in ("f1", "worst_recall")]
        assert scores[0] > 0.4 and scores[0] > scores[1] and cells[4] == f"{scores[0]:.3f}"


@pytest.mark.parametrize(
    ("name", "other", "own"),
    [
        ("own_method", "fedavg", "fedclip"),
        pytest.param("own_phases", "fedrep", "bodyfirst", marks=pytest.mark.slow),
        pytest.param("own_personal_head", "fedrep", "personalhead", marks=pytest.mark.slow),
    ],
)
def test_a_method_of_one_s_own_is_compared(name, other, own):
    rows = load(name).main().rows
    assert [row["algorithm"] for row in rows] == [other, own]
    assert all(row["accuracy_mean"] > 0.6 for row in rows)  # chance is 0.1 to 0.5
