"""PFLlib (Zhang et al.), github.com/TsingZ0/PFLlib: its servers and clients, driven by its own `train`.

From outside we replace what reads files (`read_data`), the shuffling loaders, by the same mini-batches in order, and
`select_clients`, which begins a round, to call back. Everything else is PFLlib's.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from torch import nn

import pfljax as pfl
from experiments.parity.in_torch import TwoLayers, at_home, converted, load, stacked
from experiments.parity.shared import (
    BATCH,
    CLASSES,
    EPOCHS,
    EQUAL,
    HIDDEN,
    RATE,
    Apart,
    Cell,
    OnRound,
    Snapshot,
    Task,
)
from pfljax.contract import tree
from pfljax.contract.types import Params, State

# Arguments of PFLlib's command line, at its defaults where they matter to no comparison.
USUAL: dict[str, Any] = {
    "device": "cpu",
    "dataset": "digits",
    "num_classes": CLASSES,
    "global_rounds": 10**6,  # `on_round` ends the run
    "local_epochs": EPOCHS,
    "plocal_epochs": EPOCHS,
    "batch_size": BATCH,
    "local_learning_rate": RATE,
    "learning_rate_decay": False,
    "learning_rate_decay_gamma": 0.99,
    "join_ratio": 1.0,
    "random_join_ratio": False,
    "few_shot": 0,
    "algorithm": "",
    "time_select": False,
    "goal": "parity",
    "time_threthold": 1e9,
    "save_folder_name": "",
    "top_cnt": 100,
    "auto_break": False,
    "eval_gap": 10**9,
    "client_drop_rate": 0.0,
    "train_slow_rate": 0.0,
    "send_slow_rate": 0.0,
    "dlg_eval": False,
    "dlg_gap": 100,
    "batch_num_per_client": 2,
    "num_new_clients": 0,
    "fine_tuning_epoch_new": 1,
}


def split_mlp(models: Any, task: Task) -> nn.Module:
    """The MLP, in PFLlib's two parts. (Its own DNN has a log-softmax, which would count as a part of the base.)"""
    return TwoLayers(task.start)


def own_dnn(models: Any, task: Task) -> nn.Module:
    """PFLlib's own network."""
    network = models.DNN(len(task.start["Dense_0"]["kernel"]), HIDDEN, CLASSES)
    load(network, task.start)
    return network


def accuracy(metrics: Sequence[Any]) -> float:
    """What a server's `test_metrics` says: ids, numbers of examples, numbers of correct ones."""
    return float(sum(metrics[2]) / sum(metrics[1]))


def of_received(server: Any) -> float:
    """Accuracy of what clients predict with after they received the server's models."""
    server.send_models()
    return accuracy(server.test_metrics())


class Player:
    """Plays a method of PFLlib.

    Args:
        folder: The checkout.
        server: Module and class of the server.
        models: Server -> what is compared.
        score: Server -> accuracy.
        arguments: Arguments of PFLlib's command line.
        network: (PFLlib's models, task) -> the network.
        prepare: (server, task), called before it trains, for what no argument sets.
    """

    def __init__(
        self,
        folder: Path,
        server: str,
        models: Callable[[Any], dict],
        score: Callable[[Any], float] = of_received,
        *,
        network: Callable[[Any, Task], nn.Module] = split_mlp,
        prepare: Callable[[Any, Task], None] = lambda server, task: None,
        **arguments: Any,
    ):
        self.folder = folder / "system"
        self.server = server
        self.models = models
        self.score = score
        self.network = network
        self.prepare = prepare
        self.arguments = arguments

    def __call__(self, task: Task, on_round: OnRound) -> None:
        """As `Cell.play`."""
        data = [task.arrays(client) for client in range(task.clients.num_clients)]

        def read(dataset, client, is_train=True):
            x, y = data[client]["train" if is_train else "test"]
            return {"x": x, "y": y}

        with at_home(self.folder):
            network = self.network(importlib.import_module("flcore.trainmodel.models"), task)
            given = USUAL | {"model": network, "num_clients": len(data)} | self.arguments
            module, name = self.server.split(".")
            with mock.patch.object(importlib.import_module("utils.data_utils"), "read_data", read):
                server = getattr(importlib.import_module(f"flcore.servers.{module}"), name)(
                    types.SimpleNamespace(**given), 0
                )
                select = server.select_clients

                def begin_round():
                    on_round(lambda: Snapshot(self.models(server), self.score(server)))
                    return select()

                server.select_clients = begin_round
                self.prepare(server, task)
                server.train()


def global_model(server: Any) -> Params:
    """The server's model, or its base where only this is shared."""
    return converted(getattr(server.global_model, "base", server.global_model).parameters())


def whole(server: Any) -> dict:
    """The server's model is all that there is."""
    return {"global": converted(server.global_model.parameters())}


def with_personal(server: Any, name: str = "model") -> dict:
    """The server's model, and the clients' own."""
    return whole(server) | {"personal": stacked(getattr(client, name) for client in server.clients)}


def with_heads(server: Any) -> dict:
    """The server's base, and the clients' heads."""
    heads = stacked((client.model.head for client in server.clients), first=1)
    return {"global": global_model(server), "heads": heads}


def with_bases(server: Any) -> dict:
    """The server's head, and the clients' bases."""
    bases = stacked(client.model.base for client in server.clients)
    return {"global": converted(server.global_model.parameters(), first=1), "bases": bases}


def only_personal(server: Any) -> dict:
    """The clients' models."""
    return {"personal": stacked(client.model for client in server.clients)}


def with_control(server: Any) -> dict:
    """The server's model and its control variate."""
    return whole(server) | {"control": converted(server.global_c)}


def with_prototypes(server: Any) -> dict:
    """The clients' models, and the prototypes once there are any."""
    protos = server.global_protos
    known = (
        {}
        if protos[0] is None
        else {"prototypes": np.stack([protos[c].numpy() for c in range(CLASSES)])[None]}
    )
    return {"personal": stacked(client.model for client in server.clients)} | known


def tuned(server: Any) -> float:
    """Accuracy after PFLlib's fine-tuning of new clients, which are here the old ones."""
    server.new_clients = server.clients
    server.fine_tuning_new_clients()
    return accuracy(server.test_metrics_new_clients())


def prototypes_after_training(server: Any, task: Task) -> None:
    """Makes the clients collect prototypes after training, by their own function."""
    for client in server.clients:

        def train(train=client.train, collect=client.collect_protos):
            train()
            collect()

        client.train = train


def passes_of_weights(server: Any, task: Task) -> None:
    """Makes the first learning of weights take 10 passes, instead of a number that the losses decide."""
    for client in server.clients:
        client.ALA.threshold = np.inf
        client.ALA.num_pre_loss = 9


def without_decay(server: Any, task: Task) -> None:
    """Sets the weight decay of pFedMe's optimizer to 0; no argument does."""
    for client in server.clients:
        client.optimizer.param_groups[0]["mu"] = 0.0


def ours(state: State) -> dict:
    """Our server's model."""
    return {"global": tree.first(state.models)}


def with_one_model(play: Callable[..., Player]) -> dict[str, Cell | Apart]:
    """Methods that train a global model."""
    average = functools.partial(play, "serveravg.FedAvg", whole)
    return {
        "FedAvg": Cell(pfl.FedAvg(), ours, average()),
        "FedAvg, their DNN": Cell(pfl.FedAvg(), ours, average(network=own_dnn)),
        "FedAvg+": Cell(
            pfl.methods.FedAvgPlus(tune_epochs=1),
            ours,
            average(tuned),
            note="their tuning of new clients, for all clients",
        ),
        "FedProx": Cell(pfl.FedProx(mu=0.1), ours, play("serverprox.FedProx", whole, mu=0.1)),
        "SCAFFOLD": Cell(
            pfl.Scaffold(mean="uniform"),
            lambda state: ours(state) | {"control": state.server.state.control_variate},
            play("serverscaffold.SCAFFOLD", with_control, server_learning_rate=1.0),
            note="mean=uniform",
        ),
        "MOON": Cell(
            pfl.MOON(mu=1.0, temperature=0.5), ours, play("servermoon.MOON", whole, mu=1.0, tau=0.5)
        ),
        "FedNTD": Cell(
            pfl.methods.FedNTD(distillation=1.0, temperature=1.0),
            ours,
            play("serverntd.FedNTD", whole, beta=1.0, tau=1.0),
            sizes=EQUAL,
            note="clients of one size, which theirs weights equally",
        ),
        "FedDyn": Apart(
            "their penalty is the distance to the global model; the paper's and ours is its square"
        ),
    }


def with_parts(play: Callable[..., Player]) -> dict[str, Cell | Apart]:
    """Methods that keep a part of the model at home."""

    def heads(state):
        return ours(state) | {"heads": state.rows}

    return {
        "FedPer": Cell(pfl.FedPer(), heads, play("serverper.FedPer", with_heads)),
        "FedRep": Cell(
            pfl.FedRep(head_epochs=3),
            heads,
            play("serverrep.FedRep", with_heads, plocal_epochs=3),
            note="head_epochs=3",
        ),
        "FedBABU": Cell(
            pfl.FedBABU(tune_epochs=0),
            ours,
            play(
                "serverbabu.FedBABU",
                lambda server: {"global": global_model(server)},
                fine_tuning_epochs=0,
            ),
            note="scored without tuning",
        ),
        "LG-FedAvg": Cell(
            pfl.methods.LGFedAvg(shared_layers=1),
            lambda state: ours(state) | {"bases": state.rows},
            play("serverlg.LG_FedAvg", with_bases),
        ),
    }


def with_own_models(play: Callable[..., Player]) -> dict[str, Cell | Apart]:
    """Methods whose clients have models of their own."""

    def own(state):
        return ours(state) | {"personal": state.rows.params}

    def of_clients(server):
        return accuracy(server.test_metrics())

    def of_personal(server):
        return accuracy(server.test_metrics_personalized())

    rate = 0.1
    strength = 15.0
    return {
        "Ditto": Cell(
            pfl.Ditto(mu=0.1),
            own,
            play("serverditto.Ditto", lambda s: with_personal(s, "model_per"), of_personal, mu=0.1),
        ),
        "FedALA": Cell(
            pfl.FedALA(share=1.0),
            lambda state: ours(state) | {"personal": state.rows.model},
            play(
                "serverala.FedALA",
                with_personal,
                of_clients,
                prepare=passes_of_weights,
                rand_percent=100,
                layer_idx=2,
                eta=1.0,
            ),
            note="share=1; their weights' first learning fixed to 10 passes; scored after local training",
        ),
        "FedProto": Cell(
            pfl.methods.FedProto(alignment=1.0, mean="uniform"),
            lambda state: {"personal": state.rows.params, "prototypes": state.models.mean},
            play(
                "serverproto.FedProto",
                with_prototypes,
                of_clients,
                prepare=prototypes_after_training,
                lamda=1.0,
            ),
            note="mean=uniform; their prototypes collected after training",
        ),
        "pFedMe": Cell(
            pfl.PFedMe(mu=strength, personal_steps=1, personal_learning_rate=rate),
            ours,
            play(
                "serverpFedMe.pFedMe",
                whole,
                of_personal,
                prepare=without_decay,
                lamda=strength,
                K=1,
                p_learning_rate=rate / (1 + rate * strength),
                beta=1.0,
                batch_size=EQUAL[0],
                local_epochs=1,
                local_learning_rate=0.05,
            ),
            sizes=EQUAL,
            local={"batch_size": 0, "epochs": 1, "learning_rate": 0.05},
            note="one full batch and steps=1 per round, their rate divided by 1 + rate lambda, their weight decay 0",
            differs="they score the clients' w, we score theta",
        ),
        "APFL": Cell(
            pfl.APFL(alpha=0.5),
            ours,
            play("serverapfl.APFL", whole, of_clients, alpha=0.5),
            differs="the personal models: they train v alone, not in the mixture, move alpha at every step, and "
            "replace v by the mixture after each round",
        ),
        "FedAMP": Cell(
            pfl.Local(),
            lambda state: {"personal": state.models},
            play("serveramp.FedAMP", only_personal, of_clients, alphaK=1.0, sigma=1.0, lamda=1.0),
            note="beside our Local",
            differs="their penalty has no gradient, so that their FedAMP is Local",
        ),
    }


def cells(folder: Path) -> dict[str, Cell | Apart]:
    """The comparisons by name."""
    play = functools.partial(Player, folder)
    return with_one_model(play) | with_parts(play) | with_own_models(play)
