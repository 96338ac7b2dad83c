"""The figure of attacks, small."""

import json

import commands
import numpy as np
import pytest

from experiments import robustness
from pfljax.data.federation import draw_attackers
from pfljax.folder import files

SMALL = [
    "--rounds=3",
    "--num_clients=10",
    "--train_examples=10",
    "--hidden=4",
    "--devices=1",
    "--eval_every=3",
]


@pytest.mark.slow
def test_honest_clients_are_scored_by_attack_and_share(tmp_path):
    flags = [
        *SMALL,
        "--methods=fedavg,federico_friends",
        "--aggregators=mean,median",
        "--attacks=sign_flip",
    ]
    printed = commands.call(robustness.COMMAND, *flags, "--shares=0,0.2", f"--out={tmp_path}")
    rows = json.loads((tmp_path / "table.json").read_text())
    titles = ["fedavg", "fedavg, median", "federico_friends"]
    assert [(row["method"], row["value"]) for row in rows] == [
        (t, share) for t in titles for share in (0, 0.2)
    ]
    attacked = tmp_path / "fedavg-median" / "sign_flip-0.2" / "seed-0"
    summary = files.read_json(attacked / "summary.json")
    accuracy = files.read_npz(attacked / "results.npz")
    attacker = draw_attackers(10, 0.2, seed=0)
    np.testing.assert_array_equal(np.isnan(accuracy["accuracy_test"][-1]), attacker)
    assert summary["scored"] == "the global model, of honest clients"
    plan = dict(summary["plan"])
    assert plan["aggregator"] == "median" and plan["attackers"] == "2 of 10 clients, sign_flip"
    assert [row["accuracy"] for row in rows if row["value"] == 0.2][1] == summary["last"][
        "accuracy"
    ]
    assert rows[-1]["weight_of_attackers"] is not None and rows[-2]["weight_of_attackers"] is None
    assert "federico_friends" in printed and (tmp_path / "robustness.png").stat().st_size > 5000


def test_the_weight_of_attackers_is_that_of_honest_clients(tmp_path):
    attacker = draw_attackers(4, 0.25, seed=1)
    index = np.tile(np.arange(4), (1, 4, 1))
    weights = np.full((1, 4, 4), 0.25)
    # the attacker's own row does not count
    weights[0, np.flatnonzero(attacker)] = np.where(attacker, 1.0, 0.0)
    np.savez(tmp_path / "collaboration.npz", topology="peers", index=index, weights=weights)
    assert robustness.weight_of_attackers(tmp_path, 4, 0.25, seed=1) == pytest.approx(0.25)
    assert robustness.weight_of_attackers(tmp_path, 4, 0.0, seed=1) is None


def test_bad_flags_are_refused_in_a_line(tmp_path):
    for flag, text in {
        "--attacks=none": "accepted: label_flip, sign_flip, noise, scale",
        "--attack_kind=noise": "does not apply here: --attacks sets its values",
        "--shares=1": "below 1",
        "--aggregators=mode": "accepted: mean, median",
    }.items():
        printed = commands.call(
            robustness.COMMAND, *SMALL, flag, f"--out={tmp_path / 'out'}", code=2
        )
        assert text in printed and not (tmp_path / "out").exists()
