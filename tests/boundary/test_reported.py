"""What users of this and other libraries have reported, each case in its own words."""

import copy
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import threading

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from commands import call
from sklearn.metrics import roc_auc_score

import pfljax as pfl
from pfljax.cli import train
from pfljax.contract.cores import check_settings
from pfljax.data import sources
from pfljax.settings.method import METHODS

ROOT = pathlib.Path(__file__).parents[2]
FEW = ("--method=fedavg", "--rounds=1", "--hidden=4")
TRAIN = ("-m", "pfljax.cli", "train", *FEW)
TABLE = "a,label,who\n" + "".join(
    f"{k % 7},{k % 2},{['Zoë', 'Łukasz', '北'][k % 3]}\n" for k in range(60)
)


def play(*words, cwd=None, before=(), **environment):
    """Runs Python with these words and variables of the environment."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [*before, sys.executable, *map(str, words)]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, errors="replace"
    )


def test_images_in_train_and_test_where_test_lacks_a_class_have_one_numbering(tmp_path):
    image = pytest.importorskip("PIL.Image")
    shades = {"0": 10, "2": 60, "10": 120, "11": 200}
    for part, kinds in {"train": [*shades], "test": ["0", "2", "11"]}.items():
        for kind in kinds:
            (tmp_path / part / kind).mkdir(parents=True)
            image.fromarray(np.full((4, 4), shades[kind], np.uint8)).save(
                tmp_path / part / kind / "0.png"
            )
    source = sources.read(tmp_path, standardize=False)
    found = [shades[source.class_names[number]] for number in source.y]
    assert found == np.rint(source.x[:, 0, 0, 0] * 255).tolist() and source.is_test.sum() == 3


@pytest.mark.parametrize(
    ("n", "classes", "num", "alpha"), [(4000, 62, 128, 1e-4), (400, 10, 150, 0.05)]
)
def test_extreme_dirichlet_partitions_deal_every_example_once_and_two_to_each_client(
    n, classes, num, alpha
):
    y = np.random.default_rng(0).integers(0, classes, n)
    source = sources.make_source({"x": np.zeros((n, 1)), "y": y}, name="t", standardize=False)

    def deal():
        return pfl.data.partitions.assign(
            source, pfl.partitions.Dirichlet(alpha=alpha), num_clients=num, seed=1
        )

    first = deal()
    again = deal()
    np.testing.assert_array_equal(np.sort(np.concatenate(first.indices)), np.arange(n))
    assert min(map(len, first.indices)) >= 2
    assert all(np.array_equal(*both) for both in zip(first.indices, again.indices, strict=True))


@pytest.mark.parametrize(
    "setting", ["jax_numpy_dtype_promotion", "jax_disable_jit", "jax_transfer_guard"]
)
def test_a_setting_of_jax_that_nothing_trains_with_is_named(setting):
    values = {
        "jax_numpy_dtype_promotion": "strict",
        "jax_disable_jit": True,
        "jax_transfer_guard": "disallow",
    }
    before = getattr(jax.config, setting)
    guards = [
        f"jax_transfer_guard_{way}"
        for way in ("host_to_device", "device_to_device", "device_to_host")
    ]
    kept = {guard: getattr(jax.config, guard) for guard in guards}
    jax.config.update(setting, values[setting])
    try:
        with pytest.raises(pfl.ArgumentError, match=f"^{setting.upper()}"):
            check_settings()
    finally:
        for name, value in {setting: before, **kept}.items():
            jax.config.update(name, value)
    check_settings()


@pytest.mark.slow
@pytest.mark.parametrize("value", ["cuda", "nonsense"])
def test_a_platform_that_is_not_there_is_named(value, tmp_path):
    done = play(*TRAIN, f"--out={tmp_path}/run", JAX_PLATFORMS=value)
    assert (
        done.returncode == 2
        and f"JAX_PLATFORMS={value}" in done.stderr
        and "Traceback" not in done.stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", pytest.param("cp1252", marks=pytest.mark.long)])
def test_a_terminal_that_cannot_show_a_name_shows_a_replacement(encoding, tmp_path):
    (tmp_path / "d.csv").write_text(TABLE, encoding="utf-8")
    words = ["compare", "--methods=local", "--seeds=0", "--rounds=1", "--hidden=4", "--dataset=csv"]
    words += [f"--data_file={tmp_path}/d.csv", "--data_client=who", f"--out={tmp_path}/out"]
    done = play("-m", "pfljax.cli", *words, PYTHONIOENCODING=encoding)
    assert done.returncode == 0 and "Unicode" not in done.stderr


@pytest.mark.slow
def test_a_tilde_is_the_home_folder_in_flags_and_in_python(tmp_path, monkeypatch):
    home = tmp_path / "home"
    here = tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    (home / "d.csv").write_text(TABLE, encoding="utf-8")
    words = ["--dataset=csv", "--data_file=~/d.csv", "--data_client=who", "--out=~/runs/x"]
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    call(train.COMMAND, *FEW, *words)
    clients = pfl.data.digits(num_clients=4, train_examples=5)
    result = pfl.Run(pfl.FedAvg(), clients, pfl.models.MLP((4,))).train(
        rounds=1, out="~/mine", progress=False
    )
    result.save_model("~/model.safetensors", 0)
    assert (
        (home / "runs/x").is_dir()
        and (home / "mine").is_dir()
        and (home / "model.safetensors").is_file()
    )
    assert not [*here.iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [True, False])
def test_data_on_a_share_that_cannot_be_written(elsewhere, tmp_path):
    user = ("unshare", "-U", "--map-user=4711", "--map-group=4711")
    if (
        not shutil.which("unshare")
        or subprocess.run([*user, "true"], capture_output=True).returncode
    ):
        pytest.skip("needs unshare")
    share = tmp_path / "share"
    out = tmp_path / "out"
    share.mkdir()
    out.mkdir()
    (share / "d.csv").write_text(TABLE, encoding="utf-8")
    share.chmod(0o555)
    words = [
        *TRAIN,
        "--dataset=csv",
        "--data_file=d.csv",
        "--data_client=who",
        *[f"--out={out}/run"] * elsewhere,
    ]
    done = play(*words, before=user, cwd=share, HOME=str(out))
    share.chmod(0o755)
    assert done.returncode == (0 if elsewhere else 2) and "Traceback" not in done.stderr


@pytest.mark.slow
def test_training_in_a_thread_and_with_copied_data_gives_the_same_figures(tmp_path):
    clients = pfl.data.digits(num_clients=4, train_examples=10)
    found = {}

    def train(name, data, **options):
        run = pfl.Run(pfl.FedAvg(), data, pfl.models.MLP((8,)), pfl.LocalTraining(optax.sgd(0.1)))
        found[name] = run.train(rounds=3, **options).accuracy

    train("here", clients)
    thread = threading.Thread(
        target=train, args=("thread", clients), kwargs={"out": tmp_path / "run"}
    )
    thread.start()
    thread.join()
    train("pickle", pickle.loads(pickle.dumps(clients)))
    train("copy", copy.deepcopy(clients))
    assert len(found) == 4 and len({*found.values()}) == 1


@pytest.mark.slow
def test_a_metric_that_fails_for_clients_of_one_class_is_nan_or_told():
    rng = np.random.default_rng(0)
    y = np.arange(200) % 2
    client = np.arange(200) // 50
    y[client == 3] = 0
    x = (rng.normal(size=(200, 3)) + y[:, None]).astype(np.float32)
    clients = pfl.Federation.from_arrays(x, y, client=client)

    def run(metrics):
        return pfl.Run(pfl.FedAvg(), clients, pfl.models.MLP((8,)), metrics=metrics).train(rounds=2)

    result = run(["auroc"])
    found = np.asarray(result.results["auroc_test"])[-1]
    assert np.isnan(found[3]) and np.isfinite(found[:3]).all()
    assert result.history[-1]["auroc"] == pytest.approx(np.nanmean(found))

    def own(outputs, targets):
        if len(np.unique(targets)) < 2:
            raise ValueError("Only one class present in y_true")
        return roc_auc_score(targets, outputs[:, 1])

    with pytest.raises(
        pfl.ArgumentError, match=r"^metrics=own: .*Only one class present in y_true"
    ):
        run({"own": own})


@pytest.mark.slow
@pytest.mark.parametrize("columns", [(), (1,)])
def test_a_loss_of_ones_own_for_numbers_does_not_broadcast(columns):
    class Line(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1, use_bias=False)(x)

    x = np.random.default_rng(0).normal(size=(120, 1)).astype(np.float32)
    y = (2 * x[:, 0]).reshape(-1, *columns)
    clients = pfl.Federation.from_arrays(x, y, client=np.arange(120) % 3, standardize=False)

    def loss(outputs, targets):
        return ((outputs - targets) ** 2).reshape(outputs.shape[0], -1).mean(-1)

    run = pfl.Run(pfl.FedAvg(), clients, Line(), pfl.LocalTraining(optax.sgd(0.2), loss=loss))
    slope = run.train(rounds=40).predict(np.ones((1, 1), np.float32), client=0)
    assert float(np.ravel(slope)[0]) == pytest.approx(2.0, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fedas", "fedpac", "fedproto", "gpfl", "pfedfda", "ccvr", "fedgh", "knn_per"]
)
def test_methods_of_class_statistics_stay_finite_for_clients_of_one_class(name):
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(5), [2, 3, 12, 40, 40])
    y = np.where(client < 3, client % 3, rng.integers(0, 3, len(client)))
    x = (rng.normal(size=(len(client), 4)) + 2 * np.eye(4)[y]).astype(np.float32)
    clients = pfl.Federation.from_arrays(x, y, client=client, num_classes=4)  # class 3 never occurs
    local = pfl.LocalTraining(optax.sgd(0.1), batch_size=8)
    result = pfl.Run(METHODS[name](), clients, pfl.models.MLP((8,)), local).train(6, eval_every=6)
    assert np.isfinite(result.loss) and np.isfinite(result.per_client_accuracy).all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_an_official_test_part_of_the_size_of_cifar_10_is_dealt(seed):
    y = np.random.default_rng(0).integers(0, 10, 60_000)
    is_test = np.arange(60_000) % 6 == 0
    partition = pfl.partitions.Dirichlet(alpha=0.1)
    clients = pfl.Federation.from_arrays(
        np.zeros((60_000, 1)),
        y,
        is_test=is_test,
        num_clients=100,
        partition=partition,
        seed=seed,
        standardize=False,
    )
    assert clients.train.size.min() >= 1 and clients.test.size.min() >= 1
    assert clients.train.size.sum() == 50_000 and clients.test.size.sum() == 10_000
