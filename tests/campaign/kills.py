"""Kills runs at random instants, resumes them, and compares what they leave behind with an uninterrupted run.

    python tests/campaign/kills.py MODE KILLS SEED FOLDER

Each run is in a process of its own, or in two, forked from one that has imported all modules. The last line that is
printed is a JSON object with the counts and what went wrong.
"""

import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import optax
import runs
import toys

from pfljax.contract import processes, speech
from pfljax.exchange.plan import make_plan
from pfljax.folder import files, manifest
from pfljax.training.loop import Schedule, Trainer

ROUNDS = 8
EVERY = Schedule(eval_every=1, checkpoint_every=2)
# A mode -> the method, where the clients live, seeds, and the number of processes.
MODES = {
    "device": ("federico", "device", [1], 1),
    "host": ("ditto", "host", [1], 1),
    "disk": ("scaffold", "disk", [1], 1),
    "replicates": ("fedem", "device", [1, 2, 3], 1),
    "processes": ("fedfomo", "device", [1], 2),
}
PATIENCE = 180  # seconds after which a run counts as hanging
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["pfljax.api", "orbax.checkpoint", "runs"])  # which start no devices


def experiments(mode):
    name, store, seeds, _ = MODES[mode]
    hyperparameters = {"neighbors": 2} if name in ("federico", "fedfomo") else {}
    found = []
    for seed in seeds:
        federation = toys.make_federation((4, 3, 5, 2, 4, 3, 2, 6), validation_size=2)
        problem = toys.make_problem(federation, optax.adam(0.05), batch_size=2, cohort=4)
        plan = make_plan("map", devices=2)  # of each process
        settings = {"config": {"settings": {"method": name}}, "seed": seed, "client_store": store}
        found.append(
            toys.make_experiment(
                name, problem, federation, hyperparameters=hyperparameters, plan=plan, **settings
            )
        )
    return found


def train(mode, out, number, address, started, log):
    """What a process of a run does: trains, and the first one sends a byte before the first round and after each."""
    _, _, seeds, num_processes = MODES[mode]
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_compilation_cache_dir", str(out.parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if num_processes > 1:
        processes.start(address, num_processes, number)

    def tell(evaluation):
        """Sends a byte after each evaluation, which is that of a round."""
        if number == 0:
            started.send_bytes(b"1")

    outs = [out / f"seed-{seed}" for seed in seeds]

    def say(line):
        return print(line, flush=True)

    trackers = [tell, *(None for _ in seeds[1:])]
    trainer = Trainer(experiments(mode), outs=outs, resume=out.exists(), trackers=trackers)
    with speech.lines_to(say):
        trainer.train(ROUNDS, EVERY)
    if num_processes > 1:
        jax.distributed.shutdown()  # which JAX does at a Python's exit, and not at that of a fork


def start(mode, out):
    """Starts a run's processes: these, the pipe that tells of their rounds, and the file that has what they say."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    told, started = SERVER.Pipe(duplex=False)
    said = out.parent / f"{out.name}.log"
    found = []
    for number in range(MODES[mode][3]):
        words = (mode, out, number, address, started, os.devnull if number else said)
        found.append(SERVER.Process(target=train, args=words))
        found[-1].start()
    started.close()
    return found, told, said


def begun(told):
    """Whether a run tells of another round before its end."""
    try:
        return told.poll(PATIENCE) and told.recv_bytes()
    except EOFError:
        return b""


def wait(found, told, kill=None):
    """Waits until some rounds are done, and kills all processes after a delay.

    Args:
        found: The processes.
        told: The pipe that tells of their rounds.
        kill: Number of rounds and seconds; None: wait for the processes' end.

    Returns:
        The exit codes, or "hangs", and the seconds from the first round on.
    """
    rounds, delay = kill or (0, 0)
    ready = [begun(told)]
    played = time.perf_counter()
    while ready[-1] and len(ready) <= rounds:
        ready.append(begun(told))
    if kill and ready[-1]:
        time.sleep(delay)
        for process in found:
            process.kill()
    codes = []
    for process in found:
        process.join(PATIENCE)
        codes.append("hangs" if process.exitcode is None else process.exitcode)
        process.kill()
    told.close()
    return codes, time.perf_counter() - played


def rounds_of(out):
    """The rounds that each folder of a run says it has saved, and the last that it has evaluated."""
    kept = [manifest.read(folder) for folder in sorted(out.iterdir())] if out.exists() else []
    rows = (
        [files.read_jsonl(folder / "metrics.jsonl") for folder in sorted(out.iterdir())]
        if out.exists()
        else []
    )
    saved = min([each.rounds if each else 0 for each in kept], default=0)
    return saved, max([row[-1]["round"] if row else 0 for row in rows], default=0)


def play(mode, kills, seed, folder):
    """The campaign of one mode; its counts."""
    draw = random.Random(f"{mode} {seed}")
    wrong = []
    whole = folder / "whole"
    for _ in range(2):  # the second one reads what the first has compiled
        if whole.exists():
            whole.rename(folder / "first")
        found, told, said = start(mode, whole)
        codes, seconds = wait(found, told)
        assert codes == [0] * len(found), (codes, said.read_text())
    done = 0
    number = 0
    at = []
    while done < kills:
        number += 1
        out = folder / f"run-{number}"
        before = (0, 0)

        def at_round():
            return (draw.randint(0, ROUNDS // 2), draw.uniform(0, 2 * seconds / ROUNDS))

        for kill in [at_round() for _ in range(draw.randint(1, 4))] + [None]:
            found, told, said = start(mode, out)
            codes, _ = wait(found, told, kill if done < kills else None)
            text = said.read_text()
            resumed = [
                int(line.split()[-1]) for line in text.splitlines() if "resumed after round" in line
            ]
            # a kill may come between the last checkpoint and its manifest
            if before[0] and resumed[:1] < [before[0]]:
                wrong.append(
                    f"{out.name}: {before[0]} rounds were saved, resumed after {resumed}: {text[-500:]}"
                )
            before = rounds_of(out)
            # Rows in memory are saved while rounds go on, up to the next checkpoint.
            most_behind = EVERY.checkpoint_every * (2 if mode == "host" else 1)
            if before[0] < before[1] - most_behind:
                wrong.append(f"{out.name}: {before[1]} rounds were evaluated, {before[0]} saved")
            killed = -signal.SIGKILL in codes
            done += killed
            at += [round(before[1])] if killed else []
            if not killed:
                if codes != [0] * len(found):
                    wrong.append(f"{out.name}: ended with {codes}: {text[-1000:]}")
                break
        for one in sorted(whole.iterdir()):
            try:
                runs.assert_same_runs(one, out / one.name)
            except Exception as error:
                wrong.append(f"{out.name}: {type(error).__name__} {str(error)[:300]}")
    return {
        "mode": mode,
        "kills": done,
        "runs": number,
        "rounds evaluated when killed": sorted(at),
        "wrong": wrong,
    }


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    print(json.dumps(play(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))))
