"""The summary of a run: scores per client, newcomers, the privacy ledger."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pfljax import data
from pfljax.contract.types import Algorithm, First, Key, PyTree, State
from pfljax.data import Federation
from pfljax.evaluation import metrics as evaluation
from pfljax.evaluation import recovery, rounding
from pfljax.exchange import lifting
from pfljax.exchange.pools import place
from pfljax.exchange.rounds import participations
from pfljax.folder.history import History
from pfljax.local import privacy
from pfljax.run import memory
from pfljax.run.compiled import Compiled, Jitted
from pfljax.run.experiment import Experiment
from pfljax.stores import serving, stacks

# The first that is known; otherwise, the training loss.
SELECTED_BY = ("validation_accuracy", "validation_loss")


def per_client(
    federation: Federation,
    metrics: dict[str, dict[str, np.ndarray]],
    scored: np.ndarray | None = None,
    networks: Sequence[str] | None = None,
) -> list[dict]:
    """Returns one row per scored client (all if `scored` is None) with its scores on its test examples.

    `networks` has the name of each client's network, if they differ.
    """
    test = metrics["test"]
    if scored is None:
        scored = np.arange(federation.num_clients)
    classes = counts_by_class(federation, scored)
    rows = []
    for number, client in enumerate(scored.tolist()):
        row: dict[str, Any] = {"client": client}
        if federation.client_names is not None:
            row["name"] = federation.client_names[client].item()
        if networks is not None:
            row["network"] = networks[client]
        row["n_train"] = int(federation.train.size[client])
        row["n_test"] = int(federation.test.size[client])
        if classes is not None:
            row["classes"] = classes[number]
        if federation.group is not None:
            row["group"] = int(federation.group[client])
        if federation.target is not None:
            row["target"] = int(federation.target[client])
        row["accuracy"] = None
        row |= {name: float(values[number]) for name, values in test.items()}
        rows.append(row)
    return rows


def score_unseen(experiment: Experiment, compiled: Compiled, key: Key, state: State) -> dict | None:
    """Adapts the trained state to the held-out clients and scores them; None if there are none."""
    unseen = experiment.unseen
    if unseen is None:
        return None
    plan = compiled.plan
    problem = experiment.problem
    algorithm = experiment.algorithm(plan)  # for the run's current number of rounds

    def placed(data: PyTree) -> PyTree:
        return place(plan, data, unseen.num_clients)

    # What the newcomers get: all models, where clients are each other's peers.
    needed = First()
    if algorithm.topology.between_clients:
        stacks.verify(state.clients, np.arange(experiment.federation.num_clients))
        needed = First(model=stacks.in_memory(state.clients.model))
    state = state._replace(clients=needed)

    # Their scores.
    use = serving.scores(problem._replace(plan=plan), algorithm, outputs=bool(experiment.metrics))
    serve = functools.partial(lifting.serve_newcomers, algorithm, plan, use)
    splits = {"train": placed(unseen.train), "test": placed(unseen.test)}
    run = Jitted(problem.model.network, plan, serve, out_shardings=plan.everywhere)
    scores = jax.device_get(run(key, state, placed(unseen.client_data), splits))
    scores = serving.measured(experiment.metrics, scores, problem.model.task)

    networks = None
    if problem.groups:
        networks = problem.groups.clients_groups(unseen.num_clients, unseen=True)
    lower_is_better = experiment.lower_is_better
    summary = evaluation.summarize(scores["test"], unseen.test.size, lower_is_better)
    train = evaluation.summarize(scores["train"], unseen.train.size, lower_is_better)
    summary |= {f"train_{name}": value for name, value in train.items()}
    return summary | {"per_client": per_client(unseen, scores, networks=networks)}


def spent(experiment: Experiment, algorithm: Algorithm, key: Key, rounds: int) -> dict | None:
    """Returns the privacy ledger after `rounds` rounds, or None without privacy. `key` is the key of the rounds.

    Entries at the top are those of clients' examples; "of_clients" are those of whole clients.
    """
    ledger = ledger_of_examples(experiment, algorithm, key, rounds)
    client_privacy = experiment.client_privacy
    if client_privacy.active:
        omitted = (privacy.BY_SCALING,) if experiment.federation.scaling else ()
        ledger["of_clients"] = client_privacy.ledger(experiment.problem, key, rounds, omitted)
    return ledger or None


def ledger_of_examples(
    experiment: Experiment, algorithm: Algorithm, key: Key, rounds: int
) -> dict[str, Any]:
    """Returns the ledger of clients' examples; {} if local training is not private.

    If the method or clients' chances determine the cohorts, every client is counted in every cohort, an upper bound.
    """
    problem = experiment.problem
    train = experiment.federation.train
    solver = problem.solver
    if not solver.privacy.active:
        return {}
    ledger = algorithm.ledger
    if experiment.federation.scaling:
        ledger = ledger.with_unaccounted(privacy.BY_SCALING)
    if solver.privacy.noise_seed is not None:
        ledger = ledger.with_unaccounted(privacy.BY_SEED)

    # In how many rounds a client took part, and the mini-batches that it used there.
    n_max = train.y.shape[1]
    if algorithm.sample is None and algorithm.engine.takes_part is None:
        taken = participations(key, problem.num_clients, problem.cohort_size, rounds)
    else:
        taken = np.full(problem.num_clients, rounds)
    steps = np.asarray(taken * solver.num_steps(train.size, n_max))
    num_batches = np.ceil(steps * ledger.passes).astype(int)
    epsilon = privacy.epsilons(
        solver.privacy, train.size, solver.batch(n_max), num_batches, ledger.gradients
    )
    return {
        "noise_multiplier": privacy.finite(solver.privacy.noise_multiplier),
        "clip_norm": privacy.finite(solver.privacy.clip_norm),
        "delta": privacy.finite(solver.privacy.delta),
        "epsilon": privacy.finite(epsilon.max()),
        "unaccounted": ledger.unaccounted or None,
        "epsilon_per_client": [privacy.finite(value) for value in epsilon],
    }


def best_row(rows: Sequence[dict], score: str = "", higher_is_better: bool = True) -> dict:
    """Returns the row of the round that is best by validation score, or by training loss without validation.

    The initial models take no part if there are others. A score that some rows lack, such as a metric of a run that
    went on with it, or that is undefined in every round, does not tell which round is best.

    Args:
        rows: The rows of the history.
        score: The name of the score; "": accuracy, or loss if the rows have no accuracy.
        higher_is_better: Whether high values of the named score are good.
    """
    names = [f"validation_{score}"] if score else SELECTED_BY

    def is_score(name: str) -> bool:
        """Whether all rows have the score, and it is defined in some round."""
        values = [row.get(name) for row in rows]
        return all(name in row for row in rows) and any(
            value is not None and np.isfinite(value) for value in values
        )

    known_scores = [name for name in names if is_score(name)]
    name = known_scores[0] if known_scores else "train_loss"
    if score and known_scores:
        sign = 1 if higher_is_better else -1
    else:
        sign = evaluation.sign_of(name.rpartition("_")[2])

    def is_known(row: dict) -> bool:
        return row["round"] and row[name] is not None and np.isfinite(row[name])

    known = [row for row in rows if is_known(row)]
    if not known:
        return rows[-1] | {"selected_by": name}
    is_best = rounding.is_best([sign * row[name] for row in known])
    best = known[int(np.argmax(is_best))]  # the first of equal ones
    return best | {"selected_by": name}


def entries_of_score(experiment: Experiment, rows: Sequence[dict]) -> dict[str, Any]:
    """Returns the entries of summary.json that depend on the score of the run.

    If the clients' data change, the best round is one on the newest data.
    """
    score = experiment.score_name
    higher_is_better = evaluation.sign_of(score, experiment.lower_is_better) > 0
    return {
        "score": score,
        "higher_is_better": higher_is_better,
        "best": best_row(rows_of_phase(experiment, rows), score, higher_is_better),
    }


def rows_of_phase(experiment: Experiment, rows: Sequence[dict]) -> Sequence[dict]:
    """Returns the rows of the history on the same clients' data as the last one."""
    if experiment.phases is None:
        return rows
    start = experiment.phases.last_start(rows[-1]["round"])
    return [row for row in rows if row["round"] > start or not start]


def recoveries(experiment: Experiment, results: Mapping[str, Any]) -> dict[str, list[dict]]:
    """Returns the entry of summary.json on changes of the clients' data; {} if there are none.

    Scores are means over the clients that change, "changed", and over the "others".

    Args:
        experiment: The run.
        results: The content of results.npz.
    """
    phases = experiment.phases
    if phases is None:
        return {}
    name = experiment.score_name
    sign = evaluation.sign_of(name, experiment.lower_is_better)
    rounds = results["rounds"]
    scores = results[f"{name}_test"]
    scored = experiment.scored
    ids = np.arange(experiment.federation.num_clients) if scored is None else scored
    entries: list[dict] = []
    for drift, clients in zip(phases.drifts, phases.changed, strict=True):
        ends = [start for start in phases.starts if start > drift.round]
        end = min(ends, default=np.inf)
        is_changed = np.isin(ids, clients)
        entry: dict[str, Any] = {
            "round": drift.round,
            "change": drift.change,
            "clients": clients.tolist(),
        }
        for group, members in (("changed", is_changed), ("others", ~is_changed)):
            entry[group] = recovery.mean_recovery(
                rounds, scores[:, members], drift.round, end, sign
            )
        entries.append(entry)
    return {"drift": entries}


def counts_by_class(federation: Federation, clients: np.ndarray) -> list[dict[str, int]] | None:
    """Returns the number of test examples of each class, by its name, for some clients; None without classes."""
    counts = federation.class_counts("test")
    if counts is None:
        return None
    names = federation.class_names or tuple(map(str, range(federation.num_classes)))
    return [
        {names[label]: int(row[label]) for label in np.flatnonzero(row)} for row in counts[clients]
    ]


def summarize(
    experiment: Experiment, compiled: Compiled, history: History, lines: list, key: Key
) -> dict:
    """Returns the content of summary.json. `key` is the key of the rounds."""
    rows = history.rows
    federation = experiment.federation
    algorithm = experiment.algorithm(compiled.plan)
    suffix = "_test"
    last_scores = {
        name.removesuffix(suffix): values[-1]
        for name, values in history.results.items()
        if name.endswith(suffix)
    }
    last_test = {"test": last_scores}
    rounds = rows[-1]["round"]
    networks = None
    if experiment.problem.groups:
        networks = experiment.problem.groups.clients_groups(federation.num_clients)
    return {
        "method": experiment.name,
        "dataset": federation.name,
        "task": federation.task,
        **entries_of_score(experiment, rows),
        "num_clients": federation.num_clients,
        "parameters": max(model.num_parameters for model in experiment.problem.models),
        "rounds": experiment.problem.rounds,
        "seed": experiment.seed,
        "metrics": experiment.measures,
        "lower_is_better": experiment.lower_is_better,
        "scored": algorithm.report.scored,
        "scored_clients": None if experiment.scored is None else len(experiment.scored),
        "last": rows[-1],
        "per_client": per_client(federation, last_test, experiment.scored, networks),
        "earth_movers_distance": data.heterogeneity(federation),
        "privacy": spent(experiment, algorithm, key, rounds),
        "knows": experiment.knows,
        "gradients_per_round": experiment.gradients(algorithm),
        "seconds_per_round": rows[-1]["seconds"] / max(rounds, 1),
        "compile_seconds": compiled.compile_seconds,
        "peak_memory_bytes": memory.peak_bytes(),
        "plan": lines,
        **dict(algorithm.report.facts),
        **recoveries(experiment, history.results_arrays()),
        "unseen": None,
    }
