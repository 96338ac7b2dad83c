"""The code that authors of methods published with their papers, one function a repository.

Each function takes a checkout and gives its comparisons. Where a repository has a server or a function for a round, we
call it; where it has only a script, we run the script. From outside we replace what reads files and options, shuffling,
and the network, by the same MLP; everything else is the authors'.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
import torch
from torch import nn

import pfljax as pfl
from experiments.parity import pfllib
from experiments.parity.in_torch import (
    TwoLayers,
    accuracy,
    at_home,
    bodies,
    converted,
    examples,
    heads,
    loaders,
    stacked,
    stand_in,
    united,
)
from experiments.parity.shared import (
    BATCH,
    CLASSES,
    EPOCHS,
    EQUAL,
    RATE,
    UNEQUAL,
    Apart,
    Cell,
    OnRound,
    Snapshot,
    Task,
)
from pfljax.contract import tree
from pfljax.contract.types import Params, State

Cells = dict[str, Cell | Apart]
ALL_ROUNDS = 10**6  # `on_round` ends the run
SGD = torch.optim.SGD
NO_MOMENTUM = "their momentum 0, since it starts anew in every round, where that of our clients' own models goes on"
EQUAL_SIZES = "clients of one size, which theirs weights equally"


def playing(
    folder: Path,
    run: Callable[..., None],
    *given: Any,
    absent: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """`Cell.play` by run(task, on_round, *given, **options), in a checkout; see `at_home`."""

    def play(task: Task, on_round: OnRound) -> None:
        with at_home(folder, absent):
            run(task, on_round, *given, **options)

    return play


def heavy(
    momentum: float, decay: float = 0.0, mask: Any = None
) -> Callable[[Any], optax.GradientTransformation]:
    """SGD as the authors' code fixes it: momentum, and weight decay of the parameters in a mask."""
    return lambda rate: optax.chain(
        optax.add_decayed_weights(decay, mask), optax.sgd(rate, momentum or None)
    )


def without_momentum(
    parameters: Any, lr: float, momentum: float = 0.0, **options: Any
) -> torch.optim.Optimizer:
    """Takes the place of `torch.optim.SGD` where clients keep their models.

    There, our optimizer goes on from round to round, and theirs starts anew.
    """
    return SGD(parameters, lr, **options)


def only_kernels(params: Params) -> Params:
    """A mask of the parameters that are not biases."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key == "kernel", params)


def ours(state: State) -> dict:
    """Our server's model."""
    return {"global": tree.first(state.models)}


def ours_with_heads(state: State) -> dict:
    """Our server's body, and the clients' heads."""
    return ours(state) | {"heads": state.rows}


def ours_with_bodies(state: State) -> dict:
    """Our server's head, and the clients' bodies."""
    return ours(state) | {"bodies": state.rows}


# FedNTD: Lee-Gihun/FedNTD, whose servers run all rounds.


def run_fedntd(
    task: Task, on_round: OnRound, name: str, models: Callable[[Any], dict], **hyperparameters: Any
) -> None:
    """Plays a method of FedNTD's authors."""

    def outputs(z, logits, get_features=False):
        return (logits, z) if get_features else logits

    network = TwoLayers(task.start, outputs=outputs)
    train = loaders(task, "train")
    local = {
        number: {"datasize": len(each.dataset), "train": each} for number, each in enumerate(train)
    }
    data = {"local": local, "num_classes": CLASSES, "data_map": np.ones((len(train), CLASSES))}
    data["global"] = {"test": torch.utils.data.DataLoader(united(task, "test")[0], 100)}
    server = importlib.import_module(f"algorithms.{name}.Server").Server(
        algo_params=types.SimpleNamespace(**hyperparameters),
        model=network,
        data_distributed=data,
        optimizer=torch.optim.SGD(network.parameters(), lr=RATE),
        scheduler=None,
        n_rounds=ALL_ROUNDS,
        sample_ratio=1.0,
        local_epochs=EPOCHS,
        device="cpu",
    )
    sample = server._client_sampling

    def begin_round(number):
        on_round(lambda: Snapshot(models(server), accuracy(task, [server.model] * len(train))))
        return sample(number)

    server._client_sampling = begin_round
    server.run()


def their_model(server: Any) -> dict:
    """The model of a server of FedNTD's authors."""
    return {"global": converted(server.model.parameters())}


def their_control(server: Any) -> dict:
    """The server's model and its control variate."""
    control = copy.deepcopy(server.model)
    nn.utils.vector_to_parameters(server.c, control.parameters())
    return their_model(server) | {"control": converted(control.parameters())}


def fedntd(folder: Path) -> Cells:
    """Lee-Gihun/FedNTD."""

    def play(name, models=their_model, **hyperparameters):
        return playing(folder, run_fedntd, name, models, absent=("wandb",), **hyperparameters)

    return {
        "FedNTD": Cell(
            pfl.methods.FedNTD(distillation=1.0, temperature=3.0),
            ours,
            play("fedntd", beta=1.0, tau=3.0),
        ),
        "FedAvg": Cell(pfl.FedAvg(), ours, play("fedavg")),
        "FedAvgM": Cell(
            pfl.methods.FedAvgM(server_momentum=0.7), ours, play("fedavgm", avgm_beta=0.7)
        ),
        "FedProx": Cell(pfl.FedProx(mu=0.1), ours, play("fedprox", mu=0.1)),
        "FedNova": Cell(pfl.methods.FedNova(), ours, play("fednova", nova_ccvr=False)),
        "MOON": Cell(pfl.MOON(mu=1.0, temperature=0.5), ours, play("moon", mu=1.0, tau=0.5)),
        "SCAFFOLD": Cell(
            pfl.Scaffold(mean="uniform"),
            lambda state: ours(state) | {"control": state.server.state.control_variate},
            play("scaffold", their_control, adaptive_divison=False),
            sizes=EQUAL,
            note="mean=uniform; clients of one size, since theirs weights models by size and control variates equally",
        ),
        "FedDyn": Cell(
            pfl.methods.FedDyn(alpha=0.1),
            ours,
            play("feddyn", dyn_alpha=0.1),
            sizes=EQUAL,
            note="clients of one size, since theirs weights models by size and h equally",
        ),
    }


# TsingZ0's repositories, which are built like PFLlib.


def of_clients(server):
    return pfllib.accuracy(server.test_metrics())


def fedala(folder: Path) -> Cells:
    """TsingZ0/FedALA."""
    play = pfllib.Player(
        folder,
        "serverALA.FedALA",
        pfllib.with_personal,
        of_clients,
        prepare=pfllib.passes_of_weights,
        local_steps=EPOCHS,
        rand_percent=100,
        layer_idx=2,
        eta=1.0,
    )
    note = "share=1; their weights' first learning fixed to 10 passes; scored after local training"

    def models(state):
        return ours(state) | {"personal": state.rows.model}

    return {"FedALA": Cell(pfl.FedALA(share=1.0), models, play, note=note)}


def mean_features_after_first_round(server: Any, task: Task) -> None:
    """Makes the first round one without mean features, which are then those of the models that it trained."""
    begin_round = server.select_clients
    numbers = itertools.count()

    def mean_features():
        sizes = [client.train_samples for client in server.clients]
        inputs = [torch.from_numpy(task.arrays(number)["train"][0]) for number in range(len(sizes))]
        with torch.no_grad():
            means = [
                client.model.base(x).mean(dim=0)
                for client, x in zip(server.clients, inputs, strict=True)
            ]
        return sum(size * mean for size, mean in zip(sizes, means, strict=True)) / sum(sizes)

    def select():
        number = next(numbers)
        if number < 2:
            common = mean_features() if number else None
            for client in server.clients:
                client.global_mean = common
        return begin_round()

    server.select_clients = select


def feddbe(folder: Path) -> Cells:
    """TsingZ0/DBE."""

    def models(server):
        own = np.stack([client.client_mean.detach().numpy().copy() for client in server.clients])
        return pfllib.whole(server) | {"own": own}

    play = pfllib.Player(
        folder,
        "serverDBE.FedDBE",
        models,
        prepare=mean_features_after_first_round,
        privacy=False,
        dp_sigma=0.0,
        fine_tuning_epoch=0,
        momentum=0.5,
        kl_weight=10.0,
    )
    note = "c from the features after the first round, in which they train once more, without c"

    def mine(state):
        return ours(state) | {"own": state.rows.params}

    return {"FedDBE": Cell(pfl.methods.FedDBE(alignment=10.0, beta=0.5), mine, play, note=note)}


def valve_of(client: Any) -> dict:
    """The embeddings and the conditional valve of a client of GPFL, as ours."""

    def numbers(tensor):
        return tensor.detach().numpy().copy()

    def layer(part):
        affine, _, scale = part
        found = {
            "weight": affine.weight.T,
            "bias": affine.bias,
            "gain": scale.weight,
            "offset": scale.bias,
        }
        return {name: numbers(tensor) for name, tensor in found.items()}

    found = {
        "gamma": layer(client.CoV.Conditional_gamma),
        "beta": layer(client.CoV.Conditional_beta),
    }
    return found | {"embeddings": numbers(client.GCE.embedding.weight)}


def received_embeddings(server: Any, task: Task) -> None:
    """Starts with our embeddings and valve, and takes the means of embeddings from those received."""
    start = tree.first(task.models["conditional"])
    for client in server.clients:
        with torch.no_grad():
            client.GCE.embedding.weight.copy_(torch.from_numpy(start["embeddings"]))
            for name in ("gamma", "beta"):
                affine, _, _ = getattr(client.CoV, f"Conditional_{name}")
                affine.weight.copy_(torch.from_numpy(start[name]["weight"].T.copy()))
                affine.bias.copy_(torch.from_numpy(start[name]["bias"]))

        def twice(embeddings, take=client.set_GCE):
            take(embeddings)
            take(embeddings)

        client.set_GCE = twice
        client.set_GCE(client.GCE)


def gpfl(folder: Path) -> Cells:
    """TsingZ0/GPFL."""

    def models(server):
        body = converted(list(server.global_model.parameters())[:2])
        own = heads_of(client.model for client in server.clients)
        return {"global": body, "heads": own, "added": valve_of(server.clients[0])}

    def heads_of(networks):
        return stacked((network.head for network in networks), first=1)

    def mine(state):
        shared = dict(tree.first(state.models))
        return {"added": shared.pop("conditional"), "global": shared, "heads": state.rows.params}

    def network(models, task):
        return models.LocalModel(*TwoLayers(task.start).parts)

    play = pfllib.Player(
        folder,
        "servergp.GPFL",
        models,
        of_clients,
        network=network,
        prepare=received_embeddings,
        local_steps=1,
        batch_size=1,
        local_learning_rate=0.01,
        lamda=0.01,
        mu=0.1,
    )
    note = "mini-batches of one example, for which the two norms are the same; their means of embeddings taken from "
    note += "those received"
    local = {"batch_size": 1, "epochs": 1, "learning_rate": 0.01}
    return {
        "GPFL": Cell(
            pfl.methods.GPFL(alignment=0.01, weight_decay=0.1), mine, play, local=local, note=note
        )
    }


# Scripts, which draw each round's clients by `np.random.choice`.


def run_script(
    task: Task,
    on_round: OnRound,
    file: Path,
    models: Callable[[dict], dict],
    networks: Callable[[dict], list],
    network: Callable[[Params], nn.Module],
    **arguments: Any,
) -> None:
    """Runs a script whose options, data and network come from the modules `utils.options` and `utils.train_utils`.

    Args:
        task: The task.
        on_round: Called where a round begins.
        file: The script.
        models: The script's variables -> what is compared.
        networks: The script's variables -> the clients' networks.
        network: Start -> the network.
        arguments: The script's options.
    """
    given = types.SimpleNamespace(
        num_users=task.clients.num_clients, epochs=ALL_ROUNDS, **arguments
    )
    (train, of_train), (test, of_test) = (united(task, split) for split in ("train", "test"))

    def data(args):
        return (train, test, of_train, of_test)

    def choice(numbers, size, replace):
        script = sys._getframe(1).f_globals
        on_round(lambda: Snapshot(models(script), accuracy(task, networks(script))))
        return np.array(numbers)

    stand_in("utils.options", args_parser=lambda: given)
    stand_in(
        "utils.train_utils",
        get_data=data,
        get_model=lambda args: network(task.start),
        read_data=None,
    )
    with mock.patch.object(np.random, "choice", choice), mock.patch.object(np.random, "shuffle"):
        runpy.run_path(str(file), run_name="__main__")


def fedrep(folder: Path) -> Cells:
    """lgcollins/FedRep."""
    # four layers, as theirs
    keys = [["base.0.weight", "base.0.bias"], [], [], ["head.weight", "head.bias"]]

    def networks(script):
        found = []
        for own in script["w_locals"].values():
            network = copy.deepcopy(script["net_glob"])
            if script["w_glob_keys"]:
                kept = {name: own[name] for name in own if name not in script["w_glob_keys"]}
                network.load_state_dict(network.state_dict() | kept)
            found.append(network)
        return found

    def shared(script, part):
        return {"global": converted(script["net_glob"].parts[part].parameters(), first=part)}

    def with_heads(script):
        return shared(script, 0) | {"heads": heads(networks(script))}

    def with_bodies(script):
        return shared(script, 1) | {"bodies": bodies(networks(script))}

    def whole(script):
        return {"global": converted(script["net_glob"].parameters())}

    def play(algorithm, models, epochs=EPOCHS):
        own = {
            "dataset": "mnist",
            "gpu": -1,
            "frac": 1.0,
            "load_fed": "n",
            "m_tr": 10**6,
            "m_ft": 10**6,
        }
        rare = {"test_freq": ALL_ROUNDS, "save_every": ALL_ROUNDS, "local_updates": 10**9}
        training = {"lr": RATE, "local_bs": BATCH, "local_ep": epochs, "local_rep_ep": EPOCHS}
        return playing(
            folder,
            run_script,
            folder.resolve() / "main_fedrep.py",
            models,
            networks,
            lambda start: TwoLayers(start, weight_keys=keys),
            absent=("models.test", "FedProx"),
            alg=algorithm,
            **own,
            **rare,
            **training,
        )

    usual: dict[str, Any] = {"sizes": EQUAL, "local": {"optimizer": heavy(0.5, 1e-4, only_kernels)}}
    usual["note"] = (
        "momentum 0.5 and weight decay 1e-4 of kernels in our local training, too; " + EQUAL_SIZES
    )
    return {
        "FedRep": Cell(
            pfl.FedRep(head_epochs=3),
            ours_with_heads,
            play("fedrep", with_heads, 3 + EPOCHS),
            **usual,
        ),
        "FedPer": Cell(pfl.FedPer(), ours_with_heads, play("fedper", with_heads), **usual),
        "FedAvg": Cell(pfl.FedAvg(), ours, play("fedavg", whole), **usual),
        "LG-FedAvg": Cell(
            pfl.methods.LGFedAvg(shared_layers=1),
            ours_with_bodies,
            play("lg", with_bodies),
            **usual,
        ),
    }


def fedbabu(folder: Path) -> Cells:
    """jhoon-oh/FedBABU."""

    def networks(script):
        return script["net_local_list"]

    def whole(script):
        return {"global": converted(networks(script)[0].parameters())}

    def body(script):
        return {"global": converted(networks(script)[0].parts[0].parameters())}

    def play(part, models):
        of_name = (
            "dataset",
            "model",
            "iid",
            "shard_per_user",
            "num_batch_users",
            "moved_data_size",
            "results_save",
        )
        training = {
            "lr": RATE,
            "local_bs": BATCH,
            "local_ep": EPOCHS,
            "momentum": 0.9,
            "wd": 1e-3,
            "frac": 1.0,
        }
        return playing(
            folder,
            run_script,
            folder.resolve() / "main_fed.py",
            models,
            networks,
            lambda start: TwoLayers(start, head="linear"),
            local_upt_part=part,
            aggr_part=part,
            gpu=-1,
            seed=1,
            unbalanced=False,
            server_data_ratio=0.0,
            test_freq=ALL_ROUNDS,
            **dict.fromkeys(of_name, ""),
            **training,
        )

    usual: dict[str, Any] = {"sizes": EQUAL, "local": {"optimizer": heavy(0.9, 1e-3)}}
    usual["note"] = "momentum 0.9 and weight decay 1e-3; " + EQUAL_SIZES
    forgets = Apart(
        "its `main_fed.py` drops what it does not average, so that clients train it anew in every round"
    )
    return {
        "FedBABU": Cell(
            pfl.FedBABU(tune_epochs=0),
            ours,
            play("body", body),
            **usual | {"note": f"scored without tuning; {usual['note']}"},
        ),
        "FedAvg": Cell(pfl.FedAvg(), ours, play("full", whole), **usual),
        "FedPer": forgets,
        "LG-FedAvg": forgets,
        "Ditto": Apart(
            "its `main_ditto.py` also replaces the personal models by the global one after each round"
        ),
    }


# JianXu95/FedPAC, with a function for a round.


def run_fedpac(task: Task, on_round: OnRound, name: str, kind: str, combined: int) -> None:
    """Plays a method of FedPAC's authors."""
    running = importlib.import_module("running")
    methods = importlib.import_module("methods")
    number = task.clients.num_clients
    hyperparameters: dict[str, Any] = {
        "lr": RATE,
        "local_epoch": EPOCHS,
        "epochs": ALL_ROUNDS,
        "lam": 1.0,
        "agg_g": combined,
    }
    args = types.SimpleNamespace(
        num_users=number, num_classes=CLASSES, frac=1.0, device="cpu", **hyperparameters
    )

    def outputs(z, logits):
        return (z, logits)

    keys = ["head.weight", "head.bias"]
    network = TwoLayers(task.start, outputs=outputs, classifier_weight_keys=keys)
    train = loaders(task, "train")
    test = loaders(task, "test")
    make = getattr(methods, f"LocalUpdate_{kind}")
    clients = [make(k, args, train[k], test[k], copy.deepcopy(network)) for k in range(number)]
    for client in clients:  # which divides the variance, and nothing else; FedPer has none
        client.datasize = torch.tensor(len(client.train_data.dataset) - 1)

    def snapshot():
        networks = [copy.deepcopy(client.local_model) for client in clients]
        if name == "FedPer":  # clients receive the body as a round begins
            for each in networks:
                each.parts[0].load_state_dict(network.parts[0].state_dict())
        body = converted(networks[0].parts[0].parameters())
        return Snapshot({"global": body, "heads": heads(networks)}, accuracy(task, networks))

    def eig(matrix, eigenvectors):
        """PyTorch has it no more; what it returns matters only for matrices with negative eigenvalues."""
        return torch.zeros(len(matrix), 2), matrix

    with mock.patch.object(torch, "eig", eig, create=True):
        for round_number in itertools.count():
            on_round(snapshot)
            running.one_round_training(name)(args, network, clients, round_number)


def fedpac(folder: Path) -> Cells:
    """JianXu95/FedPAC."""

    def play(name, combined=0):
        return playing(folder, run_fedpac, name, name, combined)

    def mine(state):
        return {"global": tree.first(state.models), "heads": state.rows}

    usual: dict[str, Any] = {"local": {"optimizer": heavy(0.5, 5e-4)}}
    usual["note"] = "momentum 0.5 and weight decay 5e-4 in our local training, too"
    own: dict[str, Any] = usual | {"note": f"heads=own; {usual['note']}"}
    dropped = "weights of heads below 0.001, which theirs drops; the first came in the third round"
    both: dict[str, Any] = usual | {
        "note": f"their variance divided by n - 1, as in ours, instead of n; {usual['note']}"
    }
    return {
        "FedPAC": Cell(pfl.methods.FedPAC(), mine, play("FedPAC", 1), differs=dropped, **both),
        "FedPAC, own heads": Cell(pfl.methods.FedPAC(heads="own"), mine, play("FedPAC"), **own),
        "FedPer": Cell(pfl.FedPer(), ours_with_heads, play("FedPer"), **usual),
    }


# yuetan031/fedproto, with a function for all rounds.


def run_fedproto(task: Task, on_round: OnRound) -> None:
    """Plays FedProto by its authors."""
    script = importlib.import_module("federated_main")
    number = task.clients.num_clients
    (train, of_train), (test, of_test) = (united(task, split) for split in ("train", "test"))

    def outputs(z, logits):
        return (torch.log_softmax(logits, dim=1), z)

    networks = [TwoLayers(task.start, outputs=outputs) for _ in range(number)]
    hyperparameters: dict[str, Any] = {
        "lr": RATE,
        "local_bs": BATCH,
        "train_ep": EPOCHS,
        "optimizer": "sgd",
        "ld": 1.0,
    }
    hyperparameters |= dict.fromkeys(("dataset", "ways", "shots", "stdev"), "")
    args = types.SimpleNamespace(
        num_users=number,
        num_classes=CLASSES,
        rounds=ALL_ROUNDS,
        device="cpu",
        verbose=False,
        **hyperparameters,
    )
    prototypes: dict[str, np.ndarray] = {}
    update = script.LocalUpdate.update_weights_het
    aggregate = script.proto_aggregation

    def snapshot():
        return Snapshot({"personal": stacked(networks)} | prototypes, accuracy(task, networks))

    def rounds(numbers):
        for each in numbers:
            on_round(snapshot)
            yield each

    def with_later_features(self, args, idx, received, model, global_round):
        *found, _ = update(self, args, idx, received, model, global_round)
        with torch.no_grad():
            features = [(model(x)[1], y) for x, y in self.trainloader]
        z, y = (torch.cat(parts) for parts in zip(*features, strict=True))
        return *found, {int(label): list(z[y == label]) for label in y.unique()}

    def kept(local):
        found = aggregate(local)
        prototypes["prototypes"] = np.stack([found[label][0].numpy() for label in range(CLASSES)])[
            None
        ]
        return found

    with (
        mock.patch.object(script, "tqdm", rounds),
        mock.patch.object(script.LocalUpdate, "update_weights_het", with_later_features),
        mock.patch.object(script, "proto_aggregation", kept),
        mock.patch.object(torch.optim, "SGD", without_momentum),
    ):
        script.FedProto_taskheter(args, train, test, of_train, of_test, networks, None)


def fedproto(folder: Path) -> Cells:
    """yuetan031/fedproto."""
    absent = ("torchvision", "torchvision.models", "tensorboardX")
    return {
        "FedProto": Cell(
            pfl.methods.FedProto(alignment=1.0, predict="head"),
            lambda state: {"personal": state.rows.params, "prototypes": state.models.mean},
            playing(folder / "exps", run_fedproto, absent=absent),
            sizes=EQUAL,
            note=f"{NO_MOMENTUM}; their prototypes collected after training; clients of one size, whose prototypes "
            "theirs weights equally; scored by the networks' own heads",
        )
    }


# CharlieDinh/pFedMe, whose servers run all rounds.


def run_pfedme(
    task: Task, on_round: OnRound, kind: str, hyperparameters: dict, *further: Any
) -> None:
    """Plays a method of pFedMe's authors.

    Args:
        task: The task.
        on_round: Called where a round begins.
        kind: Module and class of the server.
        hyperparameters: Batch size, learning rate, beta, lambda and local steps.
        further: Arguments that only this server has.
    """
    number = task.clients.num_clients
    name, kind = kind.split(".")
    module = importlib.import_module(f"FLAlgorithms.servers.{name}")

    def pairs(part):
        return [part[number] for number in range(len(part))]

    def user(k, data, dataset):
        return (str(k), *(pairs(examples(task, split, k)) for split in ("train", "test")))

    network = TwoLayers(task.start)
    given = ["cpu", "", "", (network, "Mclr_CrossEntropy"), *hyperparameters.values()]
    given = [*given[:-1], ALL_ROUNDS, given[-1], "SGD", number, *further, 0]
    with (
        mock.patch.object(module, "read_data", lambda dataset: [range(number)]),
        mock.patch.object(module, "read_user_data", user),
    ):
        server = getattr(module, kind)(*given)
    for each in server.users:
        each.optimizer.param_groups[0].update(mu=0.0)
    send = server.send_parameters

    def begin_round():
        here = {"global": converted(server.model.parameters())}
        on_round(lambda: Snapshot(here, accuracy(task, [server.model] * number)))
        send()

    server.send_parameters = begin_round
    server.train()


def pfedme(folder: Path) -> Cells:
    """CharlieDinh/pFedMe."""
    absent = ("torchvision", "torchvision.transforms")

    def play(kind, *further, **hyperparameters):
        return playing(folder, run_pfedme, kind, hyperparameters, *further, absent=absent)

    steps = EPOCHS * EQUAL[0] // BATCH
    strength = 15.0
    rate = 0.1
    all_examples = max(UNEQUAL)
    whole = {"batch_size": 0, "epochs": EPOCHS}
    return {
        "FedAvg": Cell(
            pfl.FedAvg(),
            ours,
            play("serveravg.FedAvg", batch=BATCH, rate=RATE, beta=1.0, strength=0.0, steps=steps),
            sizes=EQUAL,
            note="clients of one size, since they count mini-batches",
        ),
        "Per-FedAvg": Cell(
            pfl.PerFedAvg(personal_learning_rate=0.05, adapt_steps=0),
            ours,
            play(
                "serverperavg.PerAvg",
                batch=all_examples,
                rate=0.05,
                beta=RATE,
                strength=0.0,
                steps=EPOCHS,
            ),
            local=whole,
            note="full batches, since they take the two mini-batches of a step in another order; scored before the "
            "personal step, which theirs takes on test examples",
        ),
        "pFedMe": Cell(
            pfl.PFedMe(mu=strength, personal_steps=1, personal_learning_rate=rate),
            ours,
            play(
                "serverpFedMe.pFedMe",
                1,
                rate / (1 + rate * strength),
                batch=all_examples,
                rate=0.05,
                beta=1.0,
                strength=strength,
                steps=1,
            ),
            local={"batch_size": 0, "epochs": 1, "learning_rate": 0.05},
            note="one full batch and steps=1 per round, their rate divided by 1 + rate lambda, their weight decay 0",
            differs="theta, which theirs continues from one mini-batch to the next and overwrites by w before it is "
            "scored",
        ),
    }


# MediaBrain-SJTU/pFedGraph, a script.


BELOW = 0.85  # brings their cosines below 0.9, from where on they count as 1


def run_pfedgraph(task: Task, on_round: OnRound, file: Path, alpha: float) -> None:
    """Plays pFedGraph by its authors."""
    number = task.clients.num_clients
    parts = importlib.import_module("pfedgraph_cosine.utils")
    networks: list[TwoLayers] = []
    graph = {"graph": np.eye(number, dtype=np.float32)}
    scores = {"accuracy": 0.0}

    def snapshot():
        return Snapshot({"models": stacked(networks[1:])} | graph, scores["accuracy"])

    def network(classes):
        networks.append(TwoLayers(task.start))
        if len(networks) == 1 + number:  # after the global one
            scores["accuracy"] = accuracy(task, networks[1:])
            on_round(snapshot)
        return networks[-1]

    def average(cfg, weights, *given, average=parts.aggregation_by_graph):
        graph["graph"] = weights.numpy().copy()
        scores["accuracy"] = accuracy(task, networks[1:])
        found = average(cfg, weights, *given)
        on_round(snapshot)
        return found

    train = loaders(task, "train")
    test = loaders(task, "test")
    of_client = united(task, "train")[1]
    everything = torch.utils.data.DataLoader(united(task, "test")[0], 100)
    data = (train, test, everything, of_client, None, np.full((number, CLASSES), 1 / CLASSES))
    hyperparameters: dict[str, Any] = {
        "alpha": BELOW * alpha,
        "lam": 0.0,
        "lr": RATE,
        "reg": 0.0,
        "optimizer": "sgd",
    }
    hyperparameters["dataset"] = "cifar10"  # selects the network
    hyperparameters |= {
        "num_local_iterations": EPOCHS * EQUAL[0] // BATCH,
        "difference_measure": "all",
        "attack_ratio": 0.0,
    }
    args = types.SimpleNamespace(
        n_parties=number, comm_round=1000, sample_fraction=1.0, init_seed=0, **hyperparameters
    )

    def options():
        return (
            args,
            {"classes_size": CLASSES, "client_num": number, "comm_round": args.comm_round},
        )

    stand_in("pfedgraph_cosine.config", get_args=options)
    stand_in("model", simplecnn=network, textcnn=None)
    stand_in("prepare_data", get_dataloader=lambda args: data)

    def stay(here, *device):
        return here

    cosine = torch.nn.functional.cosine_similarity
    with (
        mock.patch.object(
            torch.nn.functional, "cosine_similarity", lambda *pair: BELOW * cosine(*pair)
        ),
        mock.patch.object(parts, "aggregation_by_graph", average),
        mock.patch.object(torch.Tensor, "cuda", stay),
        mock.patch.object(nn.Module, "cuda", stay),
        mock.patch.object(torch.optim, "SGD", without_momentum),
    ):
        runpy.run_path(str(file), run_name="__main__")


def pfedgraph(folder: Path) -> Cells:
    """MediaBrain-SJTU/pFedGraph."""
    return {
        "pFedGraph": Cell(
            pfl.methods.PFedGraph(alpha=0.8, mu=0.0),
            lambda state: {"models": state.models, "graph": state.server.state.graph},
            playing(
                folder / "pytorch",
                run_pfedgraph,
                folder.resolve() / "pytorch/pfedgraph_cosine.py",
                0.8,
            ),
            sizes=EQUAL,
            note=f"mu=0; {NO_MOMENTUM}; their cosines and alpha times 0.85, since theirs counts cosines above "
            "0.9 as 1; clients of one size, since they count mini-batches",
            differs="with mu above 0, their cosine is with another vector and has the opposite sign",
        )
    }
