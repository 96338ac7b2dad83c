"""The summary of a run: scores per client, newcomers, the privacy ledger."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np

from pfljax import data
from pfljax.contract.types import Algorithm, First, Key, State
from pfljax.data import Federation
from pfljax.evaluation import metrics as evaluation
from pfljax.exchange import lifting
from pfljax.exchange.pools import place
from pfljax.exchange.rounds import participations
from pfljax.folder.history import History
from pfljax.local import privacy
from pfljax.run import memory
from pfljax.run.compiled import Compiled, Jitted
from pfljax.run.experiment import Experiment
from pfljax.stores import serving, stacks

# the first that is known; otherwise, the training loss
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
    names = federation.client_names
    groups = {"group": federation.group, "target": federation.target}
    return [
        {
            "client": k,
            **({} if names is None else {"name": names[k].item()}),
            **({} if networks is None else {"network": networks[k]}),
            "n_train": int(federation.train.size[k]),
            "n_test": int(federation.test.size[k]),
            **{name: int(group[k]) for name, group in groups.items() if group is not None},
            "accuracy": float(test["accuracy"][number]) if "accuracy" in test else None,
            **{name: float(values[number]) for name, values in test.items() if name != "accuracy"},
        }
        for number, k in enumerate(
            (np.arange(federation.num_clients) if scored is None else scored).tolist()
        )
    ]


def score_unseen(experiment: Experiment, compiled: Compiled, key: Key, state: State) -> dict | None:
    """Adapts the trained state to the held-out clients and scores them; None if there are none."""
    unseen = experiment.unseen
    plan = compiled.plan
    if unseen is None:
        return None
    algorithm = experiment.algorithm(plan)  # for the run's current number of rounds

    def there(part):
        return place(plan, part, unseen.num_clients)

    use = serving.scores(
        experiment.problem._replace(plan=plan), algorithm, outputs=bool(experiment.metrics)
    )
    serve = functools.partial(lifting.serve_newcomers, algorithm, plan, use)
    needed = First()
    if algorithm.topology.between_clients:
        stacks.verify(state.clients, np.arange(experiment.federation.num_clients))
        needed = First(model=stacks.in_memory(state.clients.model))
    splits = {"train": there(unseen.train), "test": there(unseen.test)}
    run = Jitted(experiment.problem.model.network, plan, serve, out_shardings=plan.everywhere)
    found = run(key, state._replace(clients=needed), there(unseen.client_data), splits)
    task = experiment.problem.model.task
    groups = experiment.problem.groups
    scores = serving.measured(experiment.metrics, jax.device_get(found), task)
    networks = groups and groups.of_clients(unseen.num_clients, unseen=True)
    out = evaluation.summarize(scores["test"], unseen.test.size, experiment.lower_is_better)
    train = evaluation.summarize(scores["train"], unseen.train.size, experiment.lower_is_better)
    out |= {f"train_{name}": value for name, value in train.items()}
    return out | {"per_client": per_client(unseen, scores, networks=networks)}


def spent(experiment: Experiment, algorithm: Algorithm, key: Key, rounds: int) -> dict | None:
    """Returns the privacy ledger after `rounds` rounds, or None without privacy. `key` is the key of the rounds.

    Entries at the top are those of clients' examples; "of_clients" are those of whole clients.
    """
    found = of_examples(experiment, algorithm, key, rounds)
    client_privacy = experiment.client_privacy
    if client_privacy.active:
        omitted = (privacy.BY_SCALING,) if experiment.federation.scaling else ()
        found["of_clients"] = client_privacy.ledger(experiment.problem, key, rounds, omitted)
    return found or None


def of_examples(experiment: Experiment, algorithm: Algorithm, key: Key, rounds: int) -> dict:
    """Returns the ledger of clients' examples; {} if local training is not private.

    If the method or clients' chances determine the cohorts, every client is counted in every cohort, an upper bound.
    """
    problem = experiment.problem
    train = experiment.federation.train
    solver = problem.solver
    ledger = algorithm.ledger
    finite = privacy.finite
    if experiment.federation.scaling:
        ledger = ledger.beside(privacy.BY_SCALING)
    if not solver.privacy.active:
        return {}
    n_max = train.y.shape[1]
    if algorithm.sample is None and algorithm.engine.takes_part is None:
        taken = participations(key, problem.num_clients, problem.cohort_size, rounds)
    else:
        taken = np.full(problem.num_clients, rounds)
    steps = np.ceil(np.asarray(taken * solver.num_steps(train.size, n_max)) * ledger.passes).astype(
        int
    )
    epsilon = privacy.epsilons(
        solver.privacy, train.size, solver.batch(n_max), steps, ledger.gradients
    )
    if solver.privacy.noise_seed is not None:
        ledger = ledger.beside(privacy.BY_SEED)
    return {
        **{
            name: finite(getattr(solver.privacy, name))
            for name in ("noise_multiplier", "clip_norm", "delta")
        },
        "epsilon": finite(epsilon.max()),
        "unaccounted": ledger.unaccounted or None,
        "epsilon_per_client": [finite(value) for value in epsilon],
    }


def best_row(rows: list[dict]) -> dict:
    """Returns the row of the round that is best by validation score, or by training loss without validation.

    The initial models take no part if there are others.
    """
    name = next((name for name in SELECTED_BY if name in rows[-1]), "train_loss")
    known = [
        row for row in rows if row["round"] and row[name] is not None and np.isfinite(row[name])
    ]
    sign = evaluation.sign_of(name.rpartition("_")[2])
    return max(known or rows[-1:], key=lambda row: sign * row[name]) | {"selected_by": name}


def summarize(
    experiment: Experiment, compiled: Compiled, history: History, lines: list, key: Key
) -> dict:
    """Returns the content of summary.json. `key` is the key of the rounds."""
    rows = history.rows
    federation = experiment.federation
    algorithm = experiment.algorithm(compiled.plan)
    last_test = {
        "test": {
            k[: -len("_test")]: v[-1] for k, v in history.results.items() if k.endswith("_test")
        }
    }
    rounds = rows[-1]["round"]
    groups = experiment.problem.groups
    networks = groups and groups.of_clients(federation.num_clients)
    score = evaluation.score_of_task(federation.task)
    return {
        "method": experiment.name,
        "dataset": federation.name,
        "task": federation.task,
        "score": score,
        "higher_is_better": evaluation.sign_of(score) > 0,
        "num_clients": federation.num_clients,
        "parameters": max(model.num_parameters for model in experiment.problem.models),
        "rounds": experiment.problem.rounds,
        "seed": experiment.seed,
        "metrics": experiment.measures,
        "lower_is_better": experiment.lower_is_better,
        "scored": algorithm.report.scored,
        "scored_clients": None if experiment.scored is None else len(experiment.scored),
        "last": rows[-1],
        "best": best_row(rows),
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
        "unseen": None,
    }
