"""A client's program runs where there is only JAX, and gives what the library gives."""

import subprocess
import sys

import numpy as np
import optax
import pytest

import pfljax as pfl

pytest.importorskip("flatbuffers")

# What a device runs: it must not need pfljax.
DEVICE = """
import sys
import jax
import jax.export
import numpy as np

file, examples, out = sys.argv[1:]
program = jax.export.deserialize(bytearray(open(file, "rb").read()))
(held, started, *_), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
held = {name: np.zeros(aval.shape, aval.dtype) for name, aval in held.items()}
data = np.load(examples)
x, y, size, inputs = (data[name] for name in ("x", "y", "size", "inputs"))
nothing = np.int32(0)
held, upload, before = program.call(held, False, np.int32(2), x, y, nothing, inputs)
held, upload, after = program.call(held, True, np.int32(2), x, y, size, inputs)
assert not [name for name in sys.modules if name.startswith(("pfljax", "flax", "optax"))]
uploaded = {f"upload.{name}": np.asarray(value) for name, value in upload.items()}
np.savez(out, before=np.asarray(before), after=np.asarray(after), **uploaded)
"""


def make_run(method, **options):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(30, 3)) * [1, 10, 0.1] + [5, 0, 0]
    y = (x[:, 1] > 0).astype(int)
    client = np.repeat([0, 1, 2], [7, 12, 11])
    clients = pfl.Federation.from_arrays(x, y, client=client, **options)
    local = pfl.LocalTraining(optimizer=optax.sgd, learning_rate=0.3, batch_size=4)
    run = pfl.Run(method, clients, pfl.models.MLP(hidden=(5,)), local)
    return run, clients


def on_device(tmp_path, file, clients, client):
    """What a process without pfljax gets from a program, for a client's training and test examples."""
    rows = clients.train.y.shape[1]
    x, y = clients.examples(client, "train")
    inputs, _ = clients.examples(client)
    padded_x = np.zeros((rows, *x.shape[1:]), np.float32)
    padded_x[: len(x)] = x
    padded_y = np.zeros((rows,), np.int32)
    padded_y[: len(y)] = y
    size = np.int32(len(y))
    inputs = inputs[:1].astype(np.float32)
    np.savez(tmp_path / "examples.npz", x=padded_x, y=padded_y, size=size, inputs=inputs)
    script = tmp_path / "device.py"
    script.write_text(DEVICE)
    words = [sys.executable, script, file, tmp_path / "examples.npz", tmp_path / "out.npz"]
    ended = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return inputs, dict(np.load(tmp_path / "out.npz"))


@pytest.mark.slow
@pytest.mark.parametrize("client", [0, 2])
def test_a_client_that_keeps_its_model_trains_on_a_device_as_here(tmp_path, client):
    run, clients = make_run(pfl.Local())
    result = run.train(2, progress=False)
    file = result.export_device(tmp_path / "client.stablehlo", client, batch=1)
    before = result.predict(clients.examples(client)[0][:1], client)
    inputs, out = on_device(tmp_path, file, clients, client)
    np.testing.assert_allclose(out["before"], before, atol=1e-6)
    after = run.train(1, progress=False).predict(inputs, client)
    np.testing.assert_allclose(out["after"], after, atol=1e-6)
    assert np.abs(after - before).max() > 1e-4


@pytest.mark.slow
def test_a_device_sends_what_the_server_averages(tmp_path):
    run, clients = make_run(pfl.FedAvg())
    result = run.train(2, progress=False)
    models = result.state.models["Dense_0"]["kernel"][0]
    sums = 0.0
    total = 0
    for client in range(3):
        folder = tmp_path / str(client)
        folder.mkdir()
        file = result.export_device(folder / "client.stablehlo", client, batch=1)
        _, out = on_device(folder, file, clients, client)
        weight = out["upload.weight"]
        assert weight == clients.train.size[client]
        sums = sums + out["upload.update.Dense_0.kernel"][0]  # already weighted
        total = total + weight
    after = run.train(1, progress=False).state.models["Dense_0"]["kernel"][0]
    np.testing.assert_allclose(models + sums / total, after, atol=1e-6)


def test_what_has_no_program_of_its_own_is_refused(tmp_path):
    run, _ = make_run(pfl.methods.DFedEM())
    result = run.train(1, progress=False)
    with pytest.raises(pfl.ArgumentError, match="other clients' models"):
        result.export_device(tmp_path / "client.stablehlo", 0)
    run, _ = make_run(pfl.methods.IFCA(clusters=2, averaging="gradients"))
    result_of_gradients = run.train(1, progress=False)
    with pytest.raises(pfl.ArgumentError, match="several times in a round"):
        result_of_gradients.export_device(tmp_path / "client.stablehlo", 0)
    # kNN-Per weighs its neighbors by validation examples, if there are any.
    run, _ = make_run(pfl.methods.KNNPer(), validation_fraction=0.3)
    result_with_validation = run.train(1, progress=False)
    with pytest.raises(pfl.ArgumentError, match="knn_per reads validation examples"):
        result_with_validation.export_device(tmp_path / "client.stablehlo", 0)
    (tmp_path / "here").write_text("")
    with pytest.raises(pfl.ArgumentError, match="exists"):
        result.export_device(tmp_path / "here", 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]
