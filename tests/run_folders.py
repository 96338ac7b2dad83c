"""Folders as runs leave them, made up."""

import json

import numpy as np

K = 6
T = 3


def make_run(
    directory,
    *,
    task="classification",
    topology="peers",
    num_models=K,
    optional=True,
    affinity=None,
    privacy=None,
    method="federico",
    level=0.88,
):
    """A run's files, with scores that are easy to recognize; their folder."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    score = "accuracy" if task == "classification" else "loss"
    results = {
        "rounds": np.array([10, 20, 30]),
        "scored": "own models",
        "loss_test": rng.random((T, K)),
    }
    results |= {f"{score}_{split}": rng.random((T, K)) for split in ("train", "test")}
    np.savez(directory / "results.npz", **results)
    row = {
        "round": 30,
        "seconds": 1.0,
        "train_loss": 0.25,
        "loss": 0.4321,
        "bytes_down": 2e6,
        "bytes_up": 1e6,
    }
    if task == "classification":
        names = (
            "accuracy",
            "accuracy_mean",
            "accuracy_std",
            "accuracy_bottom_decile",
            "accuracy_min",
        )
        row |= dict.fromkeys(names, level)
    rows = [row | {"round": r} for r in (10, 20, 30)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    group = [1, 0, 1, 0, 1, 0]
    clients = [
        {"client": k, "n_train": 9, "n_test": 3, "group": group[k], "accuracy": 0.5, "loss": 0.1}
        for k in range(K)
    ]
    summary = {
        "method": method,
        "dataset": "x<&>y",
        "task": task,
        "num_clients": K,
        "rounds": 30,
        "seed": 0,
        "scored": "own models",
        "last": row,
        "best": row | {"selected_by": "train_loss"},
        "per_client": clients,
        "seconds_per_round": 0.01,
        "gradients_per_round": 12.5,
        "knows": "a lot",
        "compile_seconds": 1.0,
        "peak_memory_bytes": None,
        "plan": [["models", 123456], ["plan", "map"]],
        "unseen": None,
        "privacy": privacy,
    }
    (directory / "summary.json").write_text(json.dumps(summary))
    config = {
        "flags": {"rounds": 30},
        "versions": {"jax": "0"},
        "device": "cpu",
        "git_commit": None,
        "command": "c",
    }
    (directory / "config.json").write_text(json.dumps(config))
    if optional:
        index = rng.integers(num_models, size=(T, K, 2))
        weights = np.full((T, K, 2), 0.5)
        np.savez(
            directory / "collaboration.npz",
            round=results["rounds"],
            index=index,
            weights=weights,
            topology=topology,
            group=np.array(group),
            **(
                {}
                if affinity is None
                else {"affinity": np.stack([affinity] * T), "target": np.array(group)[::-1]}
            ),
        )
    if task == "regression":
        grid = np.linspace(0, 1, 5)
        arrays = {
            "x": grid,
            "y": grid,
            "client": np.array([0, 1, 2, 3, 4]),
            "grid": grid,
            "truth": grid,
        }
        prediction = np.where(np.eye(K, 5) > 0, 1.0, np.nan)
        np.savez(
            directory / "curve.npz",
            prediction=prediction,
            reference=grid,
            reference_name="FedAvg",
            **arrays,
        )
    return directory
