"""Shows that a method gives the same numbers in pfljax and in another library's, or its authors', own code.

    python -m experiments.parity --peer=pfllib --peer_folder=PFLlib

The folder is a checkout of the peer; its code is imported from there. Both sides have the same clients, the same
initial parameters, and mini-batches in the same order. They play rounds in turn. OUT/parity.json and parity.md have,
after some rounds, the largest difference of parameters, how far parameters have moved, both accuracies, and the median
time of a round. They are written after every method; the same command continues where it stopped. `python -m
experiments.ledger parity NAME OUT` takes a table's figures from there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import pkgutil
from pathlib import Path
from typing import Any

from experiments.parity.shared import Apart, Book, Cell, measure, row
from pfljax.training import describe

AUTHORS = "experiments.parity.authors"
# the function of a checkout that gives the comparisons, the repository, a file that only it has
PEERS = {
    "pfllib": (
        "experiments.parity.pfllib:cells",
        "TsingZ0/PFLlib",
        "system/flcore/servers/serveravg.py",
    ),
    "fedjax": (
        "experiments.parity.fedjax_peer:cells",
        "google/fedjax",
        "fedjax/algorithms/hyp_cluster.py",
    ),
    "fedem": ("experiments.parity.fedem:cells", "omarfoq/FedEM", "learners/learners_ensemble.py"),
    "fedntd": (f"{AUTHORS}:fedntd", "Lee-Gihun/FedNTD", "algorithms/fedntd/Server.py"),
    "fedala": (f"{AUTHORS}:fedala", "TsingZ0/FedALA", "system/utils/ALA.py"),
    "feddbe": (f"{AUTHORS}:feddbe", "TsingZ0/DBE", "system/flcore/servers/serverDBE.py"),
    "gpfl": (f"{AUTHORS}:gpfl", "TsingZ0/GPFL", "system/flcore/servers/servergp.py"),
    "fedrep": (f"{AUTHORS}:fedrep", "lgcollins/FedRep", "main_l2gd.py"),
    "fedbabu": (f"{AUTHORS}:fedbabu", "jhoon-oh/FedBABU", "main_single.py"),
    "fedpac": (f"{AUTHORS}:fedpac", "JianXu95/FedPAC", "methods/fedpac.py"),
    "fedproto": (f"{AUTHORS}:fedproto", "yuetan031/fedproto", "exps/federated_main.py"),
    "pfedme": (f"{AUTHORS}:pfedme", "CharlieDinh/pFedMe", "FLAlgorithms/servers/serverpFedMe.py"),
    "pfedgraph": (
        f"{AUTHORS}:pfedgraph",
        "MediaBrain-SJTU/pFedGraph",
        "pytorch/pfedgraph_cosine.py",
    ),
}


def cells_of(peer: str, folder: Path) -> dict[str, Cell | Apart]:
    """A peer's comparisons by name; imports its adapter, and what that needs."""
    return pkgutil.resolve_name(PEERS[peer][0])(folder)


def about(peer: str, rounds: list[int]) -> dict[str, Any]:
    """Returns what all results of a folder have in common."""
    environment = describe.environment()
    versions = environment["versions"]
    # FedJAX does not need PyTorch.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["torch"] = importlib.metadata.version("torch").partition("+")[0]
    commit = environment["git_commit"]
    return {"peer": peer, "rounds": rounds, "commit": commit, "versions": versions}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--peer_folder", type=Path, required=True, help="a checkout of the peer")
    parser.add_argument(
        "--methods", default="", help="methods to compare, separated by semicolons; none given: all"
    )
    parser.add_argument(
        "--rounds", default="1,5,50", help="numbers of rounds after which to compare"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/parity"))
    args = parser.parse_args()
    if not args.peer_folder.is_dir():
        parser.error(f"--peer_folder={args.peer_folder}: no such folder")
    _, repository, sign = PEERS[args.peer]
    if not (args.peer_folder / sign).is_file():
        parser.error(
            f"--peer_folder={args.peer_folder}: accepted: a checkout of {repository}, which has {sign}"
        )
    if not all(number.isdecimal() and int(number) for number in args.rounds.split(",")):
        parser.error(f"--rounds={args.rounds}: accepted: positive integers, separated by commas")
    rounds = sorted({int(number) for number in args.rounds.split(",")})
    cells = cells_of(args.peer, args.peer_folder)
    names = args.methods.split(";") if args.methods else list(cells)
    if not set(names) <= set(cells):
        parser.error(f"--methods={args.methods}: accepted: {'; '.join(cells)}")
    book = Book(args.out, about(args.peer, rounds))
    if not book.agrees:
        parser.error(
            f"--out={args.out}: has results of another peer, commit or version, or for other rounds; "
            "choose a new folder"
        )
    for name in names:
        if name not in book.content["cells"]:
            cell = cells[name]
            found = {} if isinstance(cell, Apart) else measure(cell, rounds) | {"note": cell.note}
            book.keep(name, {"note": ""} | found | {"differs": cell.differs})
        print(" | ".join(row(name, book.content["cells"][name])), flush=True)
    print(f"table: {book.path.with_suffix('.md')}, .json")


if __name__ == "__main__":
    main()
