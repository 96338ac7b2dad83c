"""Folders that earlier versions wrote, with "algorithm" for a method and "distribution" for a client's group."""

import hashlib
import json
import shutil

import numpy as np
import optax
import pytest
from shared_runs import EVAL_EVERY, MODEL, ONE_DEVICE, ROUNDS, compare_local_and_fedavg

import pfljax as pfl
from pfljax import report
from pfljax.contract.errors import ArgumentError
from pfljax.folder import files, former, manifest
from pfljax.report import watching
from pfljax.report.run_data import RunData

pytestmark = pytest.mark.xdist_group("runs")

BEFORE = {"method": "algorithm", "group": "distribution"}


def with_former_names(entries):
    """The entries as an earlier version named them; the score's direction was not among them."""
    return {
        BEFORE.get(name, name): value
        for name, value in entries.items()
        if name != "higher_is_better"
    }


def make_former(out):
    """Changes the files of a run to those of an earlier version, whose manifest has their checksums."""
    summary = with_former_names(files.read_json(out / "summary.json"))
    del summary["score"]
    summary["per_client"] = list(map(with_former_names, summary["per_client"]))
    files.write_json(out / "summary.json", summary)
    config = files.read_json(out / "config.json")
    config["settings"] = with_former_names(config["settings"])
    files.write_json(out / "config.json", config)
    files.write_npz(
        out / "collaboration.npz", with_former_names(files.read_npz(out / "collaboration.npz"))
    )

    body = files.read_json(out / "manifest.json")["manifest"]
    body["settings"] = config["settings"]
    for name in body["files"]:
        content = (out / name).read_bytes()
        body["files"][name] = [len(content), hashlib.sha256(content).hexdigest()]
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    files.write_json(out / "manifest.json", {"manifest": body, "sha256": digest})


@pytest.fixture
def former_run(finished_run, tmp_path):
    """The folder of FedEM's run as an earlier version wrote it."""
    out = tmp_path / "fedem" / "seed-0"
    shutil.copytree(finished_run.out, out)
    make_former(out)
    return out


def contents(folder):
    """The bytes of a folder's files, by path."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fedem_run(method, clients):
    """A run with the settings of `finished_run`."""
    return pfl.Run(method, clients, MODEL, pfl.LocalTraining(optax.sgd, 0.1), execution=ONE_DEVICE)


def test_a_run_is_loaded_by_its_present_names(former_run, finished_run, digits_clients):
    before = contents(former_run)
    assert b'"algorithm"' in before[former_run / "summary.json"]
    loaded = pfl.load(former_run)
    assert loaded.summary["method"] == "fedem" and "algorithm" not in loaded.summary
    assert [row["group"] for row in loaded.summary["per_client"]] == digits_clients.group.tolist()
    np.testing.assert_array_equal(loaded.collaboration.group, digits_clients.group)
    x = digits_clients.test.x[0, :3]
    np.testing.assert_allclose(loaded.predict(x), finished_run.predict(x), atol=1e-6)
    assert contents(former_run) == before


def test_pages_show_a_run_as_they_did(former_run, finished_run):
    now = RunData.read(finished_run.out)
    then = RunData.read(former_run)
    np.testing.assert_array_equal(then.group, now.group)
    assert then.has_groups and then.knows_groups and then.client_rows == now.client_rows
    assert "fedem on" in report.write(former_run).read_text()
    root = former_run.parents[1]
    assert "fedem" in report.write_comparison(root / "report.html", [root]).read_text()
    assert "1 finished" in watching.page([root], refresh=5)


def test_a_run_goes_on_with_the_same_method_alone(former_run, digits_clients):
    with pytest.raises(
        ArgumentError, match="with other settings: method was 'fedem' and is 'fedavg'"
    ):
        fedem_run(pfl.FedAvg(), digits_clients).train(
            ROUNDS, eval_every=EVAL_EVERY, out=former_run, resume=True
        )
    result = fedem_run(pfl.methods.FedEM(components=2), digits_clients).train(
        ROUNDS + 1, eval_every=EVAL_EVERY, out=former_run, resume=True, progress=False
    )
    assert [row["round"] for row in result.history] == [0, 2, 4, 5]
    written = files.read_json(former_run / "summary.json")
    assert written["method"] == "fedem" and "algorithm" not in written


def test_checksums_are_those_of_the_files_bytes(former_run):
    assert manifest.read(former_run).damaged(former_run) is None
    text = (former_run / "summary.json").read_text()
    (former_run / "summary.json").write_text(text.replace('"algorithm"', '"method"'))
    assert manifest.read(former_run).damaged(former_run) == "summary.json is not what the run wrote"


@pytest.mark.slow
def test_finished_cells_of_a_comparison_are_read(finished_comparison, tmp_path):
    out = tmp_path / "runs"
    shutil.copytree(finished_comparison.out, out)
    runs = [path.parent for path in out.glob("*/*/summary.json")]
    assert len(runs) == 4
    for run in runs:
        make_former(run)
    files.write_json(
        out / "table.json", [with_former_names(row) for row in files.read_json(out / "table.json")]
    )
    before = {run: (run / "summary.json").read_bytes() for run in runs}
    pages = report.write_comparison(out / "report.html", [out])
    assert "fedavg" in pages.read_text()

    table = compare_local_and_fedavg(out)
    assert [row["method"] for row in table.rows] == ["local", "fedavg"]
    assert files.plain(table.rows) == files.plain(finished_comparison.table.rows)
    assert {run: (run / "summary.json").read_bytes() for run in runs} == before


def test_settings_have_the_present_names_of_hyperparameters():
    before = {
        "--fedprox.mu": 0.1,
        "--ditto.strength": 0.5,
        "--feddbe.mu": 0.9,
        "algorithm": "ditto",
    }
    assert former.renamed_settings(before) == {
        "--fedprox.mu": 0.1,
        "--ditto.mu": 0.5,
        "--feddbe.beta": 0.9,
        "method": "ditto",
    }


def test_scores_of_a_search_have_the_present_names(tmp_path):
    point = {"learning_rate": 0.1, "knobs": {"rate": 0.3, "tau": 0.1}}  # former name
    content = {
        "settings": {"--fedadam.rate": 0.01},
        "programs": [{"method": "FedAdam"}],
        "points": [point],
        "grid": [point],
        "at_edge": ["rate", "learning_rate"],
    }
    files.write_json(tmp_path / "tuning.json", content)
    values = {"server_learning_rate": 0.3, "tau": 0.1}
    expected = {"learning_rate": 0.1, "hyperparameters": values}
    scores = former.read_scores(tmp_path / "tuning.json")
    assert scores["points"] == scores["grid"] == [expected]
    assert scores["at_edge"] == ["server_learning_rate", "learning_rate"]
    assert scores["settings"] == {"--fedadam.server_learning_rate": 0.01}
