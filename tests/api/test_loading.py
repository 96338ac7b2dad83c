"""A run that is picked up later predicts as it did, and a client's model leaves as a Flax module with its variables."""

import shutil
import subprocess
import sys

import flax.linen as nn
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import toys
from commands import call
from flax import nnx

import pfljax as pfl
from pfljax.cli import train
from pfljax.folder import files
from pfljax.run import memory

MODEL = pfl.models.MLP(hidden=(4,))
OFTEN = {"rounds": 4, "eval_every": 2}


class OfNNX(nnx.Module):
    def __init__(self, num_classes, rngs):
        self.layers = nnx.List([nnx.Linear(64, num_classes, rngs=rngs)])
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.layers[0](self.drop(self.norm(x.reshape(x.shape[0], -1))))


def digits():
    return pfl.data.digits(
        num_clients=4, partition=pfl.partitions.LabelGroups(groups=2), train_examples=8
    )


@pytest.fixture(scope="module")
def clients():
    return digits()


@pytest.fixture(scope="module")
def x(clients):
    return clients.test.x[0, :5]


def trained(method, clients, model=MODEL, local=None, out=None, **options):
    local = local or pfl.LocalTraining(optax.adam, 0.01)
    return pfl.Run(method, clients, model, local, **options).train(**OFTEN, out=out)


def assert_same_results(loaded, result, x):
    np.testing.assert_allclose(loaded.predict(x), result.predict(x), atol=1e-6)
    assert loaded.history == result.history and repr(loaded) == repr(result)
    for name, values in result.collaboration.arrays.items():
        np.testing.assert_array_equal(loaded.collaboration.arrays[name], values)
    assert loaded.plot_scores().axes and loaded.summary == files.read_json(
        result.out / "summary.json"
    )


OTHER = {
    "server": pfl.Server(aggregator="median"),
    "attack": pfl.Attack("sign_flip", 0.5),
    "eval_clients": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "store", "options"),
    [
        pytest.param(pfl.FedeRiCo(neighbors=2), "device", {}, marks=pytest.mark.long),
        pytest.param(pfl.methods.FedAvgPlus(), "host", {}, marks=pytest.mark.long),
        (pfl.Ditto(), "disk", {}),
        # It predicts in a way of its own, and so do its newcomers.
        pytest.param(pfl.methods.FedProto(), "device", {}, marks=pytest.mark.long),
        (pfl.FedAvg(), "device", {"fine_tune_epochs": 1, "seed": 3, **OTHER}),
    ],
)
def test_a_loaded_run_predicts_as_it_did(method, store, options, clients, x, tmp_path):
    options = options | {"execution": pfl.Execution(client_store=store)}
    result = trained(method, clients, out=tmp_path / "run", **options)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert_same_results(pfl.load(tmp_path / "run"), result, x)
    # it only reads
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def inputs_of(clients):
    return np.asarray(clients.train.x).reshape(-1, 64)


@pytest.mark.slow
def test_parts_without_a_name_are_handed_over(clients, x, tmp_path):
    arrays = pfl.Federation.from_arrays(inputs_of(clients), np.arange(32) % 3, num_clients=4)
    model = nn.Sequential([lambda x: x, nn.Dense(3)])
    local = pfl.LocalTraining(optax.adam(0.01))
    out = tmp_path / "run"
    result = trained(pfl.methods.FedAvgPlus(), arrays, model, local, out)
    inputs = np.asarray(arrays.test.x)[0, :2]
    without_model = pfl.load(out, clients=arrays)
    assert without_model.history == result.history
    missing = r"^model: cannot .*pfljax\.load\(path, model=\.\.\.\)$"
    with pytest.raises(pfl.ArgumentError, match=missing):
        without_model.predict(inputs, 0)
    without_data = pfl.load(out, model=model, local=local)
    reads = r"^clients: fedavg_plus reads their examples .*pfljax\.load\(path, clients=\.\.\.\)$"
    with pytest.raises(pfl.ArgumentError, match=reads):
        without_data.predict(inputs, 0)
    other = pfl.Federation.from_arrays(-inputs_of(clients), np.arange(32) % 3, num_clients=4)
    with pytest.raises(
        pfl.ArgumentError, match=r"^clients: expected the clients of the run, but x of client"
    ):
        pfl.load(out, model=model, clients=other)
    found = pfl.load(out, model=model, clients=arrays)
    assert found.history == result.history
    with pytest.raises(
        pfl.ArgumentError, match=r"^local\.optimizer: .*pfljax\.load\(path, local=\.\.\.\)"
    ):
        found.predict(inputs, 0)  # after a pass over the client's examples
    assert_same_results(pfl.load(out, model=model, clients=arrays, local=local), result, inputs)


@pytest.mark.long
def test_another_model_is_refused_and_harms_nothing(clients, x, tmp_path):
    result = trained(
        pfl.Local(), clients, out=tmp_path / "run", execution=pfl.Execution(client_store="disk")
    )
    for other in (pfl.models.MLP(hidden=(5,)), pfl.models.MLP(hidden=(4, 4))):
        with pytest.raises(pfl.ArgumentError, match=r"^model: is not the run's: "):
            pfl.load(tmp_path / "run", model=other)
    assert_same_results(pfl.load(tmp_path / "run"), result, x)


@pytest.mark.slow
def test_folders_without_a_finished_run_are_one_line(clients, tmp_path):
    with pytest.raises(
        pfl.ArgumentError, match=r"^path=.*/none: accepted: the folder of a finished run"
    ):
        pfl.load(tmp_path / "none")
    (tmp_path / "table.json").write_text("[]")
    with pytest.raises(
        pfl.ArgumentError, match="is a comparison's folder; accepted: the folder of one of its runs"
    ):
        pfl.load(tmp_path)
    trained(pfl.FedAvg(), clients, out=tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    with pytest.raises(
        pfl.ArgumentError, match=r"^path=.*/run: has no intact checkpoint of its last round, 4"
    ):
        pfl.load(tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text("{")
    with pytest.raises(
        pfl.ArgumentError, match=r"^path=.*/run: accepted: the folder of a finished run"
    ):
        pfl.load(tmp_path / "run")


OWN = '''
import dataclasses, optax, pfljax as pfl, flax.linen as nn
from pfljax.algorithms.common import averaging

class Net(nn.Module):
    num_classes: int
    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))

@pfl.author.method(keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class Loaded:
    """FedAvg with momentum at the server."""

    rate: float = pfl.author.hyperparameter(0.7, above=0, help="the server's learning rate")

    def build(self, problem):
        return averaging(problem, server_optimizer=optax.sgd(self.rate, momentum=0.9))
'''


@pytest.mark.slow
def test_a_run_of_the_command_line_is_loaded_from_its_flags(tmp_path, monkeypatch):
    """With a method and a model of one's own, and from another folder than that of the command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own.py").write_text(OWN)
    flags = [
        "--method=own.py:Loaded",
        "--model=own.py:Net",
        "--loaded.rate=0.5",
        "--privacy_clip_norm=inf",
        "--rounds=4",
    ]
    call(
        train.COMMAND,
        *flags,
        "--num_clients=4",
        "--optimizer=sgd",
        "--out=run",
        "--split=2",
        "--eval_every=2",
    )
    del pfl.methods.METHODS["loaded"]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code = "import numpy as np, pfljax as pfl; found = pfl.load('../run'); clients = found.experiment.federation; "
    code += "x, y, size = (np.asarray(part)[1] for part in clients.test); "
    code += "print(found.experiment.method.rate, (found.predict(x[:size], 1).argmax(1) == y[:size]).mean())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    rate, accuracy = map(float, done.stdout.split())
    assert rate == 0.5
    assert accuracy == pytest.approx(
        files.read_npz(tmp_path / "run" / "results.npz")["accuracy_test"][-1, 1]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "store", ["disk", *(pytest.param(s, marks=pytest.mark.long) for s in ("device", "host"))]
)
def test_a_result_outlives_further_rounds_of_its_run(store, clients, x):
    run = pfl.Run(pfl.Ditto(), clients, MODEL, execution=pfl.Execution(client_store=store))
    first = run.train(2)
    expected = np.array(first.predict(x), copy=True)
    later = run.train(2).predict(x)
    np.testing.assert_array_equal(first.predict(x), expected)
    assert np.abs(later - expected).max() > 1e-4
    assert int(first.state.round) == 2


@pytest.mark.long
def test_a_state_that_does_not_fit_twice_is_one_line(clients, monkeypatch, x):
    run = pfl.Run(pfl.Ditto(), clients, MODEL)
    first = run.train(2)
    check = memory.check_host

    def full(need):
        with monkeypatch.context() as within:
            within.setattr(memory, "host_free", lambda: 0)
            check(need)

    monkeypatch.setattr(memory, "check_host", full)
    assert run.train(2).accuracy > 0
    with pytest.raises(
        pfl.RunError, match=r"^the run was trained further, .* out of memory: clients' rows need"
    ):
        first.predict(x, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "model"),
    [(pfl.Ditto(), toys.Normalized), pytest.param(pfl.FedAvg(), MODEL, marks=pytest.mark.long)],
)
def test_an_exported_model_gives_the_logits_of_its_client(method, model, clients, x, tmp_path):
    """Saved, read by plain Orbax and applied by plain Flax."""
    result = trained(method, clients, model)
    module, variables = result.export(client=3)
    result.save_model(tmp_path / "model", client=3)
    restored = ocp.StandardCheckpointer().restore(tmp_path / "model")
    assert set(restored) == ({"params"} if model is MODEL else {"params", "batch_stats"})
    for tree in (variables, restored):
        found = jax.nn.softmax(module.apply(tree, x))
        np.testing.assert_allclose(found, result.predict(x, client=3), atol=1e-6)
    other = jax.nn.softmax(module.apply(variables, x)) - result.predict(x, client=0)
    assert (np.abs(other).max() > 1e-5) == (method == pfl.Ditto())
    with pytest.raises(
        pfl.ArgumentError,
        match=r"^path=.*: exists; accepted: a new file NAME.safetensors or a new folder",
    ):
        result.save_model(tmp_path / "model", client=3)


@pytest.mark.long
def test_an_exported_nnx_module_has_the_client_s_parameters(clients, x, tmp_path):
    result = trained(pfl.Ditto(), clients, OfNNX)
    module, state = result.export(client=1)
    np.testing.assert_allclose(jax.nn.softmax(module(x)), result.predict(x, client=1), atol=1e-6)
    result.save_model(tmp_path / "model", client=1)
    other = result.export(client=0)[0]
    restored = nnx.restore_int_paths(ocp.StandardCheckpointer().restore(tmp_path / "model"))
    nnx.update(other, restored)
    np.testing.assert_allclose(jax.nn.softmax(other(x)), result.predict(x, client=1), atol=1e-6)
    assert not [path for path, _ in nnx.to_flat_state(state) if "rngs" in path]


@pytest.mark.long
def test_a_client_that_needs_more_than_models_is_not_exported(clients):
    result = trained(pfl.methods.KNNPer(), clients)
    with pytest.raises(
        pfl.ArgumentError, match=r"^client=1: predicts with more than .*; use result.predict$"
    ):
        result.export(client=1)
    with pytest.raises(pfl.ArgumentError, match=r"^client=4: accepted: 0 to 3"):
        result.export(client=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "model"),
    [
        (pfl.methods.FedEM(components=2), MODEL),
        (pfl.FedeRiCoFriends(neighbors=2), MODEL),  # weights differ by class
        pytest.param(pfl.FedeRiCo(neighbors=2), toys.Normalized, marks=pytest.mark.long),
    ],
)
def test_a_mixture_is_exported_as_an_ensemble(method, model, clients, x, tmp_path):
    """Saved, read by plain Orbax and applied by plain Flax."""
    if isinstance(method, pfl.methods.FedFomo):  # weighs models by validation examples
        clients = pfl.data.digits(num_clients=4, train_examples=12, validation_fraction=0.25)
    result = trained(method, clients, model)
    module, variables = result.export(client=3)
    weights = variables["ensemble"]["weights"]
    np.testing.assert_allclose(weights.sum(axis=0), 1, atol=1e-6)
    leaves = jax.tree.leaves(variables["params"])
    assert len(weights) > 1 and {len(leaf) for leaf in leaves} == {len(weights)}
    result.save_model(tmp_path / "model", client=3)
    restored = ocp.StandardCheckpointer().restore(tmp_path / "model")
    for tree in (variables, restored):
        found = jax.nn.softmax(module.apply(tree, x))
        np.testing.assert_allclose(found, result.predict(x, client=3), atol=1e-6)


@pytest.mark.long
def test_an_ensemble_of_nnx_modules_predicts_as_its_client(clients, x):
    result = trained(pfl.methods.FedEM(components=2), clients, OfNNX)
    module, state = result.export(client=1)
    np.testing.assert_allclose(jax.nn.softmax(module(x)), result.predict(x, client=1), atol=1e-6)
    assert module.weights.get_value().shape == (2,)
    assert not [path for path, _ in nnx.to_flat_state(state) if "rngs" in path]
