"""The examples run, and reach what a user would expect of them."""

import ast
import importlib.util
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from quadratics import RATE, SIZES
from toys import load_example as load

from pfljax.cli import compare, launch
from pfljax.contract import tree


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least"),
    [  # chance is 0.5 or 0.1
        ("own_data", 0.85),
        ("own_linen_model", 0.75),
        ("own_nnx_model", 0.75),
        ("own_loss", 0.6),
        ("own_inputs", 0.8),
        ("own_target", 0.8),  # 0.75 of the pixels are outside of the square
    ],
)
def test_examples_learn(name, least):
    assert load(name).main().accuracy > least


@pytest.mark.slow
def test_a_folder_of_pfllib_is_trained_on_with_its_own_tests(tmp_path):
    example = load("from_pfllib")
    folder = tmp_path / "Cifar10"
    result = example.main(folder, rounds=20)
    assert result.accuracy > 0.8  # chance is 0.5
    sizes = [
        len(np.load(folder / "test" / f"{client}.npz", allow_pickle=True)["data"].item()["y"])
        for client in range(6)
    ]
    assert result.clients.test.size.tolist() == sizes


@pytest.mark.slow
def test_a_data_set_of_hugging_face_is_divided_and_learned():
    pytest.importorskip("datasets")
    pytest.importorskip("PIL.Image")
    table = load("from_hugging_face").main(rounds=20)
    assert [row["method"] for row in table.rows] == ["local", "fedavg", "ditto"]
    assert min(row["score_mean"] for row in table.rows) > 0.6  # chance is 0.1


@pytest.mark.long
def test_clients_whose_labels_change_recover_with_models_of_their_own(tmp_path):
    table = load("drift").main(rounds=60, seeds=1, figure=str(tmp_path / "drift.png"))
    after = {row["method"]: row["drift"][0]["after"]["20"] for row in table.rows}
    assert after["local"] > 0.5 > 0.3 > after["fedavg"]
    assert (tmp_path / "drift.png").stat().st_size


@pytest.mark.slow
def test_a_pytorch_network_learns_and_is_one_again(capsys):
    pytest.importorskip("torch", reason="needs the extra torch")
    if importlib.util.find_spec("torchax") is None:
        pytest.skip("needs the extra torch")
    result = load("own_torch_model").main()
    assert result.accuracy > 0.75  # chance is 0.2
    in_torch = re.findall(r"in PyTorch (\S+)", capsys.readouterr().out)
    assert list(map(float, in_torch)) == pytest.approx(result.per_client_accuracy, abs=1e-3)


@pytest.mark.long
def test_a_comparison_for_a_paper_writes_its_figures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = load("paper_comparison").main(rounds=20, seeds=2)
    assert {row["method"] for row in table.rows} == {
        "local",
        "fedavg",
        "ditto",
        "fedem",
        "federico_friends",
    }
    assert (tmp_path / "runs/paper/figures/clients-federico_friends.pdf").exists()
    assert (tmp_path / "runs/paper/report.html").exists()


@pytest.mark.slow
def test_the_hospital_study_is_scored_by_auroc(tmp_path):
    hospitals = load("hospital_study")
    hospitals.write_patients(tmp_path / "patients.csv")
    table = hospitals.study(
        tmp_path / "patients.csv", tmp_path / "study", rounds=4, seeds=range(2), rates=(0.1, 0.3)
    )
    assert (table.score, table.higher_is_better) == ("auroc", True)
    by_client = table.by_client().to_pandas()
    assert set(by_client["client"]) == set(hospitals.PATIENTS)
    for name in ("table.tex", "by_client.tex", "by_client.csv", "report.html"):
        assert (tmp_path / "study" / name).stat().st_size
    assert list((tmp_path / "study" / "figures").glob("*.pdf"))


def test_the_hospital_study_takes_at_most_fifteen_lines_of_python():
    study = load("hospital_study").study
    function = ast.parse(inspect.getsource(study)).body[0]
    docstring, first = function.body[:2]
    assert ast.get_docstring(function) and docstring.end_lineno < first.lineno
    assert function.end_lineno - docstring.end_lineno <= 15


@pytest.mark.slow
def test_the_command_of_the_hospital_study_makes_the_same_table(tmp_path, monkeypatch):
    hospitals = load("hospital_study")
    monkeypatch.chdir(tmp_path)
    hospitals.write_patients(tmp_path / "patients.csv")
    table = hospitals.study(tmp_path / "patients.csv", tmp_path / "python", 2, range(2), (0.1,))
    command = re.search(r"pfljax compare (.*--out=\S+)", hospitals.__doc__, re.DOTALL)[1]
    fewer = {"--rounds": "2", "--seeds": "0,1", "--tune": "0.1", "--out": "command"}
    flags = dict(flag.split("=", 1) for flag in command.replace("\\\n", " ").split())
    assert fewer.keys() <= flags.keys()
    with pytest.raises(SystemExit) as ended:
        launch.main(compare.COMMAND, [f"{name}={value}" for name, value in (flags | fewer).items()])
    assert not ended.value.code
    written = (tmp_path / "command" / "table.csv").read_text()
    assert written == (tmp_path / "python" / "table.csv").read_text()
    assert [row["method"] for row in table.rows] == flags["--methods"].split(",")


@pytest.mark.long
def test_networks_differ_and_learn():
    table = load("different_networks").main(rounds=20, seeds=[0])
    sent = {row["method"]: row["megabytes_per_round"] for row in table.rows}
    assert sent["local"] == 0 < sent["fedproto"] < sent["fml"]
    assert all(row["score_mean"] > 0.5 for row in table.rows)


@pytest.mark.long
def test_adapters_send_less_than_the_network():
    table = load("adapters").main(rounds=6)
    sent = {row["method"]: row["megabytes_per_round"] for row in table.rows}
    assert sent["local"] == 0 < sent["fedsa_lora"] < sent["fedit"] < sent["federico_friends"]


@pytest.mark.slow
def test_the_mean_gives_in_to_attackers_and_medians_do_not(tmp_path):
    found = load("robust_servers").main(rounds=40, figure=str(tmp_path / "figure.png"))
    assert found["mean"][-1] < 0.3 < min(found["median"][-1], found["geometric_median"][-1])
    assert (tmp_path / "figure.png").exists()


@pytest.mark.slow
def test_more_noise_promises_more():
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    (_, none), (_, some), (_, more) = load("private_clients").main(rounds=4, num_clients=20)
    assert none is None and some > more > 0


@pytest.mark.slow
def test_studies_resume_load_and_share_their_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("resume_and_load").main(rounds=20).accuracy > 0.4  # chance is 0.1 to 0.2
    assert load("a_million_clients").main(num_clients=600, cohort=20, rounds=2).accuracy > 0.05
    assert sorted(load("sweep_over_workers").main(rounds=2)) == [0.03, 0.1, 0.3]


@pytest.mark.slow
def test_a_plan_for_a_tpu():
    pytest.importorskip("libtpu", reason="needs the extra tpu-target")
    assert load("estimate_for_a_tpu").main(num_clients=8).recommended


@pytest.mark.slow
def test_metrics_of_one_s_own_are_in_the_table():
    table = load("own_metric").main()
    heads, body = table.columns()
    place = heads.index("f1")
    assert heads[place + 1] == "worst recall"
    for row, cells in zip(table.rows, body, strict=True):
        scores = [row["metrics"][name]["mean"] for name in ("f1", "worst_recall")]
        assert (
            scores[0] > 0.4
            and scores[0] > scores[1]
            and cells[place].startswith(f"{scores[0]:.3f} ")
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "other", "own"),
    [
        ("own_method", "fedavg", "fedclip"),
        ("own_phases", "fedrep", "bodyfirst"),
        ("own_personal_head", "fedrep", "personalhead"),
    ],
)
def test_a_method_of_one_s_own_is_compared(name, other, own):
    rows = load(name).main().rows
    assert [row["method"] for row in rows] == [other, own]
    assert all(row["score_mean"] > 0.6 for row in rows)  # chance is 0.1 to 0.5


@pytest.mark.slow
def test_a_proximal_head_and_server_momentum_are_their_equations():
    """Two rounds by hand: two steps of the head, pulled to its start; two of the body; server momentum on the body."""
    federation = toys.make_federation(SIZES)
    strength = 2.0
    momentum = 0.5
    problem = toys.make_problem(federation, optax.sgd(RATE), hidden=(3,), epochs=2)
    algorithm = load("own_personal_head").PersonalHead(strength, momentum).build(problem)
    states, _ = toys.train(algorithm, problem, federation.client_data, 2)
    # the server has no momentum of heads
    assert jax.tree.leaves(states[0].server.opt_state[0].trace["Dense_1"]) == []
    theta = tree.first(states[0].models["Dense_0"])
    heads = [jax.tree.map(lambda leaf, k=k: leaf[k], states[0].rows["Dense_1"]) for k in range(4)]
    speed = jax.tree.map(jnp.zeros_like, theta)
    for state in states[1:]:
        bodies = []
        for k in range(4):
            x = federation.train.x[k, : SIZES[k]]
            y = federation.train.y[k, : SIZES[k]]
            slope = jax.jit(
                jax.grad(lambda params, x=x, y=y: problem.model.loss(params, x, y).mean())
            )
            phi = heads[k]
            body = theta
            for _ in range(2):
                step = slope({"Dense_0": theta, "Dense_1": phi})["Dense_1"]

                def pulled(p, g, start):
                    return p - RATE * (g + strength * (p - start))

                phi = jax.tree.map(pulled, phi, step, heads[k])
            for _ in range(2):
                step = slope({"Dense_0": body, "Dense_1": phi})["Dense_0"]
                body = jax.tree.map(lambda p, g: p - RATE * g, body, step)
            heads[k] = phi
            bodies.append(body)
            own = jax.tree.map(lambda leaf, k=k: leaf[k], state.rows["Dense_1"])
            toys.assert_trees_close(own, phi, rtol=1e-4, atol=1e-6)
        mean = jax.tree.map(lambda *leaves: np.average(leaves, axis=0, weights=SIZES), *bodies)
        speed = jax.tree.map(lambda v, old, new: momentum * v + old - new, speed, theta, mean)
        theta = jax.tree.map(jnp.subtract, theta, speed)
        toys.assert_trees_close(tree.first(state.models["Dense_0"]), theta, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_run_on_flower_has_the_scores_of_its_simulation():
    pytest.importorskip("flwr")
    simulated, deployed = load("deploy_on_flower").main(rounds=3)
    np.testing.assert_allclose(deployed, simulated, atol=1e-6)
