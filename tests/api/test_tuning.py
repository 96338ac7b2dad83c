"""Grid search: runs of several rates and hyperparameters in one kernel, and the point that is chosen."""

import jax
import numpy as np
import optax
import pytest

import pfljax as pfl
from pfljax.api import Point, comparison, grid, search
from pfljax.api.tuning import papers_hyperparameters, scores_of
from pfljax.contract.errors import OutOfMemory
from pfljax.run.experiment import differences
from pfljax.training import loop

MODEL = pfl.models.MLP(hidden=(4,))
LOCAL = pfl.LocalTraining(optax.sgd, 0.1, batch_size=4)


def clients(seed=0, groups=2):
    partition = pfl.partitions.LabelGroups(groups=groups)
    splits = {"train_examples": 12, "validation_fraction": 0.25}
    return pfl.data.digits(num_clients=4, partition=partition, seed=seed, **splits)


FEDERATIONS = [clients(0), clients(1)]


def run_of(point, seed, method=None):
    local = pfl.LocalTraining(optax.sgd, point.learning_rate or 0.1, batch_size=4)
    return pfl.Run(
        (method or pfl.FedProx)(**point.hyperparameters), FEDERATIONS[seed], MODEL, local, seed=seed
    )


def vector(models):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(models)])


@pytest.mark.slow
def test_rates_and_hyperparameters_in_one_kernel_are_those_of_single_runs():
    points = grid([0.03, 0.3], {"mu": [0.0, 2.0]})
    assert [str(point) for point in points[:2]] == [
        "learning rate 0.03, mu 0",
        "learning rate 0.03, mu 2",
    ]
    cases = [(points[0], 0), (points[3], 0), (points[3], 1)]
    together = pfl.train_replicates([run_of(*case) for case in cases], 3)
    found = [vector(result.state.models) for result in together]
    for place in (0, 2):
        alone = run_of(*cases[place]).train(3, progress=False)
        np.testing.assert_allclose(found[place], vector(alone.state.models), atol=2e-4)
        assert together[place].loss == pytest.approx(alone.loss, abs=2e-4)
    assert len({models.tobytes() for models in found}) == len(cases)  # every number is read


@pytest.mark.slow
def test_a_score_is_the_mean_over_seeds_and_the_best_is_taken():
    points = grid([1e-6, 0.3])
    tuning = search(points, [0, 1], run_of, 4, widen=0)
    alone = [
        run_of(points[1], seed).train(4, progress=False).history[-1]["validation_accuracy"]
        for seed in (0, 1)
    ]
    assert tuning.scores[1] == pytest.approx(np.mean(alone)) and alone[0] != alone[1]
    assert tuning.best == points[1] and tuning.scores[1] > tuning.scores[0]


@pytest.mark.long
def test_a_point_that_diverges_is_out_and_leaves_the_others_as_they_are():
    rates = [0.1, 1e20]
    tuning = search(grid(rates), [0], run_of, 3, widen=0)
    assert np.isnan(tuning.scores).tolist() == [False, True] and tuning.best.learning_rate == 0.1
    assert tuning.scores[0] == search(grid([0.1]), [0], run_of, 3).scores[0]
    with pytest.raises(pfl.RunError, match="fedprox diverges at every point of the grid"):
        search(grid([1e20]), [0], run_of, 3)


@pytest.mark.long
def test_what_is_no_number_gets_a_kernel_of_its_own(monkeypatch):
    """IFCA's number of clusters decides shapes."""
    sizes = []

    def start(runs, *args, **options):
        sizes.append(len(runs))
        return begin(runs, *args, **options)

    begin = pfl.api.tuning.start
    monkeypatch.setattr(pfl.api.tuning, "start", start)
    common = {
        "rounds": 1,
        "learning_rates": [0.1, 0.2],
        "hyperparameters": {"clusters": [1, 2]},
        "widen": 0,
    }
    tuning = pfl.tune(pfl.IFCA(), FEDERATIONS[0], MODEL, LOCAL, **common)
    assert sizes == [2, 2] and len(tuning.scores) == 4


def test_numbers_that_decide_shapes_are_not_traced():
    """The share of FedAvg with data sharing decides how many examples there are: each has a kernel of its own."""
    few, many = (
        run_of(Point(0.1, {"share": share}), 0, pfl.methods.FedAvgData).experiment
        for share in (0.1, 0.2)
    )
    assert few.numbers.hyperparameters == many.numbers.hyperparameters == {}
    assert differences(few, many) == ["method.share"]


@pytest.mark.slow
def test_each_further_hyperparameter_is_tried_at_the_best_values_so_far(tmp_path, said):
    """A search over all combinations has the same scores at the points that both try."""
    common = {
        "rounds": 2,
        "learning_rates": [0.01, 0.3],
        "hyperparameters": {"server_learning_rate": [0.01, 0.1], "tau": [1e-3, 0.1, 1.0]},
        "widen": 0,
        "seeds": [7],
    }

    def tuned(**options):
        return pfl.tune(pfl.FedAdam(), FEDERATIONS[0], MODEL, LOCAL, **common, **options)

    tuning = tuned(out=tmp_path)
    whole = tuned(in_turn=False)
    (first,) = tuning.before
    assert first.points == grid([0.01, 0.3], {"server_learning_rate": [0.01, 0.1]})
    assert tuning.points == [
        first.best._replace(hyperparameters=first.best.hyperparameters | {"tau": tau})
        for tau in (1e-3, 0.1, 1.0)
    ]
    score = dict(zip(map(str, whole.points), whole.scores, strict=True))
    assert tuning.scores == pytest.approx([score[str(point)] for point in tuning.points])
    assert {path.name for path in tmp_path.glob("*.json")} == {"tuning.json", "tuning-tau.json"}
    assert tuned(out=tmp_path) == tuning
    assert sum("already tuned" in line for line in said) == 2


@pytest.mark.slow
def test_a_comparison_takes_tuned_methods(monkeypatch):
    """Scores decide: the larger rate and the smaller mu. Local is compared as it is."""
    rated(monkeypatch, lambda rate, method: rate - method.mu)
    common = {
        "rounds": 1,
        "learning_rates": [0.1, 0.3],
        "hyperparameters": {"mu": [0.5, 1.0]},
        "widen": 0,
        "seeds": [7],
    }
    tuning = pfl.tune(pfl.FedProx(), FEDERATIONS[0], MODEL, LOCAL, **common)
    assert (tuning.method, tuning.local.learning_rate) == (pfl.FedProx(mu=0.5), 0.3)
    assert repr(tuning).startswith(
        "Tuning(best: learning rate 0.3 (edge), mu 0.5 (edge); scores: learning rate 0.1, mu 0.5 (-0.4000); "
    )
    made = []

    def noted(method, clients, model, local, **options):
        made.append((method, local))
        return pfl.Run(method, clients, model, local, **options)

    monkeypatch.setattr(comparison, "Run", noted)
    options = {"rounds": 1, "seeds": [0], "execution": pfl.Execution("map", devices=1)}
    table = pfl.compare([pfl.Local(), ("Tuned", tuning)], FEDERATIONS[0], MODEL, LOCAL, **options)
    assert made == [(pfl.Local(), LOCAL), (pfl.FedProx(mu=0.5), tuning.local)]
    heads, body = table.columns()
    assert [line[heads.index("tuned")] for line in body] == [
        "-",
        "learning rate 0.3 (edge), mu 0.5 (edge)",
    ]


def test_hyperparameters_are_tuned_in_turn(monkeypatch):
    """Scores decide: the larger rate with the smaller rate of the server, and then the middle tau."""
    rated(
        monkeypatch,
        lambda rate, method: rate - method.server_learning_rate - abs(np.log10(method.tau) + 1),
    )
    hyperparameters = {"server_learning_rate": [0.01, 0.1], "tau": [1e-3, 0.1, 1.0]}
    common = {
        "rounds": 1,
        "learning_rates": [0.1, 0.3],
        "hyperparameters": hyperparameters,
        "widen": 0,
        "seeds": [7],
    }
    tuning = pfl.tune(pfl.FedAdam(), FEDERATIONS[0], MODEL, LOCAL, **common)
    (first,) = tuning.before
    assert first.points == grid(
        [0.1, 0.3], {"server_learning_rate": [0.01, 0.1]}
    ) and first.best == Point(0.3, {"server_learning_rate": 0.01})
    assert tuning.points == [
        Point(0.3, {"server_learning_rate": 0.01, "tau": tau}) for tau in (1e-3, 0.1, 1.0)
    ]
    assert tuning.method == pfl.FedAdam(server_learning_rate=0.01, tau=0.1)


def test_a_wrong_value_of_a_later_hyperparameter_is_found_before_the_first_search(tmp_path):
    hyperparameters = {"server_learning_rate": [0.01], "tau": [-1.0]}
    with pytest.raises(pfl.ArgumentError, match=r"^fedadam.tau"):
        pfl.tune(
            pfl.FedAdam(),
            FEDERATIONS[0],
            MODEL,
            rounds=1,
            hyperparameters=hyperparameters,
            out=tmp_path / "new",
        )
    assert not (tmp_path / "new").exists()


def test_the_papers_hyperparameters_are_those_with_a_grid():
    known = pfl.FedAdam.__dataclass_fields__
    assert papers_hyperparameters(pfl.FedAdam()) == {
        name: known[name].metadata["grid"] for name in ("server_learning_rate", "tau")
    }
    assert papers_hyperparameters(pfl.FedAvg) == {}
    assert (
        list(papers_hyperparameters(pfl.IFCA)) == ["clusters"]
        and papers_hyperparameters(pfl.IFCA(), tell_groups=True) == {}
    )


def rated(monkeypatch, score):
    """Scores runs by a function of their rate and their method, without training them."""

    def scores(runs):
        return [score(run.experiment.local.learning_rate, run.experiment.method) for run in runs]

    monkeypatch.setattr(
        pfl.api.tuning, "scores_of", lambda runs, *_: (scores(runs), [0.0] * len(runs))
    )


@pytest.mark.slow
def test_a_grid_whose_edge_wins_is_widened_until_it_does_not(monkeypatch, tmp_path, said):
    """The best rate is 100; of mu the best is 0, beyond which there is none."""
    rated(monkeypatch, lambda rate, method: -abs(np.log10(rate) - 2) - method.mu)
    points = grid([0.01, 0.1, 1.0], {"mu": [0.0, 1.0]})

    def tried(tuning):
        return [point.learning_rate for point in tuning.points[len(points) :]]

    common = {"path": tmp_path / "tuning.json"}
    tuning = search(points, [0], run_of, 1, **common)
    assert tried(tuning) == [10, 100, 1000] and tuning.points[: len(points)] == points
    assert tuning.best == Point(100, {"mu": 0.0}) and tuning.at_edge == []
    assert search(points, [0], run_of, 1, **common) == tuning
    assert any("already tuned" in line for line in said)
    fewer = search(points, [0], run_of, 1, widen=2)
    assert tried(fewer) == [10, 100] and fewer.at_edge == ["learning_rate"]
    with pytest.raises(pfl.ArgumentError, match=r"something else \(widen changed\)"):
        search(points, [0], run_of, 1, widen=2, **common)
    assert tried(search(points, [0], run_of, 1, widen=0)) == []


def test_what_the_network_does_not_accept_is_the_end_of_a_grid(monkeypatch):
    """A network of two layers has at most two personal ones; 0 is another method."""
    for sign, best in ((1, 2), (-1, 1)):
        rated(monkeypatch, lambda rate, method, sign=sign: sign * method.personal_layers)

        def make(point, seed):
            return run_of(point, seed, pfl.FedPer)

        tuning = search(grid(hyperparameters={"personal_layers": [1, 2]}), [0], make, 1)
        assert (
            tuning.best.hyperparameters == {"personal_layers": best}
            and len(tuning.points) == 2
            and tuning.at_edge == []
        )


@pytest.mark.long
def test_what_does_not_fit_together_is_scored_in_parts(monkeypatch):
    compile_to_fit = loop.compile_to_fit

    def limited(experiment, clients, length, replicates):
        if replicates.num > 2:
            raise OutOfMemory("out of memory")
        return compile_to_fit(experiment, clients, length, replicates)

    whole = scores_of([run_of(Point(rate), 0) for rate in (0.01, 0.1, 1.0)], 1, 2)
    monkeypatch.setattr(loop, "compile_to_fit", limited)
    parts = scores_of([run_of(Point(rate), 0) for rate in (0.01, 0.1, 1.0)], 1, 2)
    np.testing.assert_allclose(parts, whole, atol=2e-4)


def test_the_validation_loss_decides_among_equal_scores():
    points = grid([0.1, 0.2, 0.3, 0.4])
    assert pfl.Tuning(points, [0.9, 0.9, 0.8, np.nan], [0.5, 0.4, 0.1, np.nan]).best == points[1]


def test_runs_that_differ_in_more_than_numbers_are_refused():
    words = r"number 1 differs from number 0 in method \(\w+ and FedAvg\).*accepted in one kernel"
    with pytest.raises(pfl.ArgumentError, match=words):
        pfl.train_replicates([run_of(Point(), 0), run_of(Point(), 0, pfl.FedAvg)], 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pfl.LocalTraining(optax.sgd, 0.0), "learning_rate=0.0: accepted: above 0"),
        (
            lambda: pfl.LocalTraining(optax.sgd(0.1), 0.1),
            "learning_rate=0.1: accepted only if `optimizer` is a function",
        ),
        (
            lambda: pfl.LocalTraining("sgd"),
            "optimizer=sgd: accepted: a function of the learning rate",
        ),
        (
            lambda: pfl.tune(
                pfl.FedProx(), clients(), MODEL, rounds=1, hyperparameters={"lambda": [1]}
            ),
            "hyperparameters=lambda: accepted: values",
        ),
    ],
)
def test_mistakes_are_named(make, words):
    with pytest.raises(pfl.ArgumentError) as error:
        make()
    assert str(error.value).startswith(words)


@pytest.mark.slow
def test_clients_without_validation_examples_are_refused():
    federation = pfl.data.digits(num_clients=4, train_examples=8)
    with pytest.raises(pfl.ArgumentError, match="no validation examples to tune on"):
        pfl.tune(pfl.FedAvg(), federation, MODEL, LOCAL, rounds=1, learning_rates=[0.1, 0.2])


@pytest.mark.long
def test_the_rate_is_read():
    """One step of SGD from the same model goes ten times as far at ten times the rate."""
    start, *moved = (
        vector(
            pfl.Run(pfl.Local(), FEDERATIONS[0], MODEL, pfl.LocalTraining(optax.sgd, rate))
            .train(1)
            .state.models
        )
        for rate in (1e-9, 1e-3, 1e-2)
    )
    near, far = (models - start for models in moved)
    np.testing.assert_allclose(far, 10 * near, atol=1e-5)
    assert np.abs(near).max() > 1e-5


def digits_of(split):
    return pfl.data.digits(
        num_clients=4, train_examples=8, validation_fraction=0.25, test_examples=10, seed=split
    )


def contents(clients, part):
    """The examples of all clients' parts, by content."""
    return {
        x.tobytes()
        for number in range(clients.num_clients)
        for x in clients.examples(number, part)[0]
    }


def test_a_function_of_the_split_is_tuned_on_the_splits_of_the_table():
    common = {"rounds": 1, "learning_rates": [0.1, 0.3], "widen": 0}
    with pytest.raises(
        pfl.ArgumentError,
        match=r"^splits: required if clients are a function: .* the table's splits",
    ):
        pfl.tune(pfl.FedAvg(), digits_of, MODEL, LOCAL, seeds=[100], **common)
    with pytest.raises(
        pfl.ArgumentError, match=r"^splits: accepted only if clients are a function of the split"
    ):
        pfl.compare([pfl.FedAvg()], digits_of(0), MODEL, LOCAL, rounds=1, splits=[0])
    asked = []

    def noted(split):
        asked.append(split)
        return digits_of(split)

    tuning = pfl.tune(pfl.FedAvg(), noted, MODEL, LOCAL, seeds=[100], splits=range(3), **common)
    assert asked == [0, 1, 2]
    tests = [contents(digits_of(split), "test") for split in range(3)]
    chosen_by = [contents(digits_of(split), "validation") for split in range(3)]
    assert not any(own & other for own, other in zip(tests, chosen_by, strict=True))
    asked.clear()
    table = pfl.compare([tuning], noted, MODEL, rounds=1, seeds=[0, 1], splits=range(3))
    assert asked == [0, 1, 2]
    found = [(row["seed"], row["split"]) for row in table.rows[0]["seeds"]]
    assert found == [(seed, split) for split in range(3) for seed in (0, 1)]
    assert "over seeds 0, 1 on splits 0, 1, 2" in table.title


def test_a_grid_is_widened_as_often_as_allowed(monkeypatch):
    """The best rate is 100, two steps beyond the largest."""
    rated(monkeypatch, lambda rate, method: -abs(np.log10(rate) - 2))
    points = grid([0.1, 1.0])
    for widen, further, at_edge in (
        (0, [], ["learning_rate"]),
        (1, [10], ["learning_rate"]),
        (3, [10, 100, 1000], []),
    ):
        tuning = search(points, [0], run_of, 1, widen=widen)
        assert [point.learning_rate for point in tuning.points[len(points) :]] == further
        assert tuning.at_edge == at_edge


def test_the_former_argument_is_accepted_with_a_warning(monkeypatch):
    rated(monkeypatch, lambda rate, method: -abs(method.mu - 0.5))
    common = {"rounds": 1, "learning_rates": [0.1], "widen": 0, "seeds": [7]}
    with pytest.warns(FutureWarning) as warned:
        tuning = pfl.tune(
            pfl.Ditto(),
            FEDERATIONS[0],
            MODEL,
            LOCAL,
            knobs={"strength": [0.1, 0.5]},  # former name
            **common,
        )
    assert tuning.method == pfl.Ditto(mu=0.5)
    assert [str(warning.message) for warning in warned] == [
        "knobs is now hyperparameters",  # former name
        "ditto.strength is now ditto.mu",
    ]
