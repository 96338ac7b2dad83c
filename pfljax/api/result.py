"""The result of training: scores, history, predictions and figures."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import jax
import numpy as np

from pfljax import report
from pfljax.api.predicting import Predictor
from pfljax.contract import optional
from pfljax.contract.errors import ArgumentError, warn
from pfljax.contract.types import State, Topology
from pfljax.data import Federation
from pfljax.data.drift import Phases
from pfljax.evaluation import collaboration, recovery
from pfljax.evaluation.metrics import is_percent
from pfljax.evaluation.recovery import Recovery
from pfljax.folder import files, former, history
from pfljax.models import weights
from pfljax.report.run_data import score_of, score_sign
from pfljax.run.experiment import Experiment
from pfljax.settings.fields import checked, hyperparameter
from pfljax.training.outcome import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPLITS = ("train", "validation", "test")
HAND_OVER = "pfljax.load(path, clients=...)"


@dataclasses.dataclass(frozen=True)
class Collaboration:
    """Which models each client used, at every evaluated round.

    Attributes:
        rounds: Evaluated rounds. Shape (T,).
        index: Indices of the J models that each client used. Shape (T, K, J).
        weights: Weights of these models; they sum to 1 over J. Shape (T, K, J).
        group: Each client's true group. Shape (K,). None: unknown.
        topology: Unless "shared", the models are the clients' own.
        arrays: All arrays of collaboration.npz, such as "affinity" (T, K, K). With `eval_clients`, they cover only
            the n clients listed in "clients", and n replaces K in all shapes.

    Examples:
        >>> import pfljax as pfl
        >>> clients = pfl.data.digits(num_clients=4, train_examples=8)
        >>> result = pfl.Run(pfl.Local(), clients, pfl.models.MLP(hidden=(4,))).train(rounds=2)
        >>> result.collaboration.matrix().shape
        (4, 4)
    """

    rounds: np.ndarray
    index: np.ndarray
    weights: np.ndarray
    group: np.ndarray | None
    topology: Topology
    arrays: dict[str, np.ndarray] = dataclasses.field(repr=False)

    def matrix(self, evaluation: int = -1) -> np.ndarray:
        """Returns the weight (K, N) that each client gave to each model at one evaluation.

        Args:
            evaluation: Number of the evaluation, as in `rounds`; negative: from the end. Default: the last.

        Raises:
            ArgumentError: if there is no such evaluation, or if only a sample of the clients is scored.
        """
        if "clients" in self.arrays:
            text = "a matrix needs all clients; use index and weights instead"
            raise ArgumentError("eval_clients", text)
        num = len(self.rounds)
        is_whole = isinstance(evaluation, int | np.integer) and not isinstance(evaluation, bool)
        if not is_whole or not -num <= evaluation < num:
            text = f"accepted: whole numbers, {-num} to {num - 1}"
            raise ArgumentError("evaluation", text, evaluation)
        index = self.index[evaluation]
        weights = self.weights[evaluation]
        has_client_models = Topology(self.topology).first_is_own
        num_models = len(index) if has_client_models else int(self.index.max()) + 1
        return collaboration.dense(index, weights, num_models)


class Scores(NamedTuple):
    """The scores of a run, with its history.

    Attributes:
        summary: The content of summary.json.
        rows: The rows of metrics.jsonl, an entry per evaluated round.
        results: The content of results.npz.
        collaboration: The content of collaboration.npz.
    """

    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    results: dict[str, Any]
    collaboration: dict[str, Any]

    @classmethod
    def from_outcome(cls, outcome: Outcome) -> Scores:
        """The scores of a run that was trained in this process."""
        return cls(
            summary=outcome.summary,
            rows=[dict(row) for row in outcome.history.rows],
            results=outcome.history.results_arrays(),
            collaboration=outcome.history.collaboration_arrays(),
        )

    @classmethod
    def read(cls, out: Path, summary: dict[str, Any]) -> Scores:
        """The scores of a finished run in a folder."""
        last = summary["last"]["round"]
        results: dict[str, Any] = dict(files.read_npz(out / "results.npz"))
        results["scored"] = str(results["scored"])
        return cls(
            summary=summary,
            rows=history.saved_rows(out / "checkpoints", last),
            results=results,
            collaboration=dict(former.read_collaboration(out / "collaboration.npz")),
        )


class Result:
    """The result of training.

    A result always has scores, history and figures. If it was loaded from a folder, it may lack the run's model or its
    clients' examples; whatever needs them raises an `ArgumentError` that says what to pass to `pfljax.load`.

    Attributes:
        out: The run's folder, or None.

    Examples:
        >>> import pfljax as pfl
        >>> clients = pfl.data.digits(num_clients=4, train_examples=8)
        >>> run = pfl.Run(pfl.Local(), clients, pfl.models.MLP(hidden=(4,)))
        >>> result = run.train(rounds=2, progress=False)
        >>> x, y = result.clients.examples(1)
        >>> result.predict(x, client=1).shape == (len(y), 10)
        True
        >>> result.per_client_accuracy.shape
        (4,)
    """

    def __init__(
        self,
        scores: Scores,
        predictor: Predictor | ArgumentError,
        out: Path | None = None,
        recorded: Federation | None = None,
    ):
        """Collects a run's scores and models.

        Args:
            scores: Scores and history.
            predictor: The trained models; or the error that says why they are missing.
            out: The run's folder; None: no folder.
            recorded: The clients as the folder records them; None: it does not.
        """
        self.out = out
        self._scores = scores
        self._predictor = predictor
        self._recorded = recorded

    def __repr__(self) -> str:
        last = self.history[-1]
        digits = 3 if is_percent(self.score) else 4
        value = last.get(self.score, float("nan"))
        score = f"{self.score} {value:.{digits}f}"
        method = self.summary["method"]
        return f"Result({method}, round {last['round']}: {score} of {self.summary['scored']})"

    def _trained(self) -> Predictor:
        """The trained models. Raises `ArgumentError` if they were not loaded."""
        error = self._predictor
        if isinstance(error, Predictor):
            return error
        raise ArgumentError(error.argument, error.text, error.value, owner=error.owner) from error

    @property
    def experiment(self) -> Experiment:
        """The method and the clients that it was trained on.

        Raises:
            ArgumentError: if the run was loaded and a part of it is missing; the message names the part to pass.
        """
        return self._trained().experiment

    @property
    def clients(self) -> Federation:
        """The training clients, with their examples as they were passed to `Run`.

        Raises:
            ArgumentError: if the run was loaded without their examples.
        """
        predictor = self._trained()
        clients = predictor.experiment.clients
        if predictor.missing is not None or clients is None:
            text = "their examples were not loaded"
            if predictor.missing is not None:
                text = predictor.missing.text
            raise ArgumentError("clients", text) from predictor.missing
        return clients

    @property
    def client_names(self) -> np.ndarray | None:
        """Names of the training clients (K,), also of a run that was loaded without their examples.

        None: they have no names. See also `clients`.

        Raises:
            ArgumentError: if an earlier version wrote the run's folder, and the clients cannot be made again.
        """
        federation = self._recorded
        if federation is None:
            federation = self._trained().experiment.federation
        return federation.client_names

    @property
    def summary(self) -> dict:
        """The content of summary.json."""
        return self._scores.summary

    @property
    def history(self) -> list[dict]:
        """One entry per evaluated round: round, seconds, losses, accuracies, traffic, and the method's own metrics.

        The first entry describes the initial models, round 0. Its "train_loss" is the initial models' loss on the
        training examples, and it has no method-specific metrics.
        """
        return self._scores.rows

    @property
    def results(self) -> dict[str, Any]:
        """The content of results.npz: per-client accuracy and loss of each split, such as "accuracy_test" (T, K).

        It also has the evaluated "rounds" (T,), and "scored", the name of the model that was scored.
        With `eval_clients`, the shape is (T, n), for the clients listed in "clients" (n,).
        """
        return self._scores.results

    def to_pandas(self) -> Any:
        """Returns the scores as a pandas DataFrame with one row per evaluated round, client and split.

        The columns are "round", "client", "split" ("train", "validation" or "test"), "group" (the client's true
        group, if it is known), "size" (its number of examples in the split), "name" (its id in
        the data, if that is not its number), "loss" and, for classification, "accuracy".
        Scores are NaN for a client without examples in the split. For example,
        `frame[frame.split == "test"].groupby(["round", "group"]).accuracy.mean()` returns the mean accuracy of each
        group over rounds.

        Raises:
            ArgumentError: if pandas is not installed; or if the run was loaded from a folder of an earlier version,
                which does not record the clients' sizes, without its clients.
        """
        optional.load("pandas", "to_pandas")
        if isinstance(self._predictor, Predictor):
            experiment = self._predictor.experiment
            return frame_of(self.results, experiment.federation, experiment.phases)
        if self._recorded is not None:
            return frame_of(self.results, self._recorded)
        text = "an earlier version wrote this folder, which does not record their sizes"
        raise ArgumentError("clients", f"{text}; hand them over: {HAND_OVER}")

    @property
    def score(self) -> str:
        """The name of the score by which clients, rounds and methods are ordered; see `Run`."""
        return score_of(self.summary)

    @property
    def per_client_score(self) -> np.ndarray:
        """Each client's score on its test examples after the last round; NaN where it is undefined.

        Shape (K,), or (n,) with `eval_clients`.
        """
        return self.results[f"{self.score}_test"][-1]

    @checked()
    def recovery(
        self, tolerance: Annotated[float, hyperparameter(at_least=0)] = recovery.TOLERANCE
    ) -> list[Recovery]:
        """Returns how clients' scores recover after each change of their data; see `pfljax.data.Drift`.

        Means over the clients that change, and over the others, are in `summary["drift"]`.

        Args:
            tolerance: A score is back if it is worse than before by at most so much.

        Raises:
            ArgumentError: if the clients' data do not change.

        Examples:
            >>> import pfljax as pfl
            >>> clients = pfl.data.digits(num_clients=4, train_examples=8)
            >>> drift = pfl.data.Drift(round=2, clients=[3])
            >>> run = pfl.Run(pfl.Local(), clients, pfl.models.MLP(hidden=(4,)), drift=drift)
            >>> recovery = run.train(rounds=4, progress=False).recovery()[0]
            >>> recovery.round, recovery.clients.tolist(), recovery.before.shape
            (2, [3], (4,))
        """
        entries = self.summary.get("drift")
        if not entries:
            raise ArgumentError("drift", "the clients' data do not change; see pfljax.data.Drift")
        rounds = self.results["rounds"]
        scores = self.results[f"{self.score}_test"]
        sign = score_sign(self.summary)
        starts = [entry["round"] for entry in entries]
        recoveries = []
        for entry in entries:
            start = entry["round"]
            end = min((other for other in starts if other > start), default=np.inf)
            values = recovery.recovery(rounds, scores, start, end, sign, tolerance)
            clients = np.array(entry["clients"])
            recoveries.append(Recovery(start, entry["change"], clients, *values))
        return recoveries

    @property
    def accuracy(self) -> float:
        """Test accuracy after the last round, averaged with weights proportional to clients' test examples."""
        return self.history[-1].get("accuracy", float("nan"))

    @property
    def loss(self) -> float:
        """Test loss after the last round, averaged in the same way."""
        return self.history[-1]["loss"]

    @property
    def per_client_accuracy(self) -> np.ndarray:
        """Each client's test accuracy after the last round. Shape (K,), or (n,) with `eval_clients`.

        Raises:
            ArgumentError: for regression.
        """
        if "accuracy_test" not in self.results:
            text = "regression has no accuracy; use results['loss_test']"
            raise ArgumentError("per_client_accuracy", text)
        return self.results["accuracy_test"][-1]

    @property
    def collaboration(self) -> Collaboration:
        """Which models each client used, at every evaluated round."""
        arrays = self._scores.collaboration
        return Collaboration(
            rounds=arrays["round"],
            index=arrays["index"],
            weights=arrays["weights"],
            group=arrays.get("group"),
            topology=Topology(str(arrays["topology"])),
            arrays=arrays,
        )

    @property
    def state(self) -> State:
        """The final state: server, models, optimizer, clients.

        Raises:
            ArgumentError: if the run was loaded and a part of it is missing.
            OutOfMemory: if the clients' rows are on disk and do not fit in host memory.
        """
        return self._trained().outcome.whole_state()

    def predict(self, x: Any, client: int | str | None = None) -> np.ndarray:
        """Returns one client's predictions, or those of all clients for the same x.

        Args:
            x: Examples as they were passed for training, such as those of `Federation.examples`: the model scales them.
                Shape (B, *features), or a tree of such arrays; B may be 0.
            client: The client's number, 0 to K - 1, or its name; None: all clients.

        Returns:
            Class probabilities (B, C), or predicted values (B,) for regression; of all clients (K, B, C) or (K, B).

        Raises:
            ArgumentError: if there is no such client, x does not fit the model, or the run was loaded without a part
                that the predictions need.

        Examples:
            >>> import numpy as np
            >>> import pfljax as pfl
            >>> x, y = np.arange(40.0).reshape(20, 2), np.arange(20) % 2
            >>> clients = pfl.Federation.from_arrays(x, y, client=np.arange(20) % 4)
            >>> result = pfl.Run(pfl.Local(), clients, pfl.models.MLP(hidden=(4,))).train(2, progress=False)
            >>> result.predict(x[:3], client=1).shape
            (3, 2)
            >>> result.predict(x[:3]).shape
            (4, 3, 2)
        """
        predictor = self._trained()
        federation = predictor.experiment.federation
        if client is None:
            return predictor.predict(x, range(federation.num_clients))
        number = federation.client_number(client)
        return predictor.predict(x, [number])[0]

    def predictions(self, x: Any) -> np.ndarray:
        """Former name of `predict(x)`: all clients' predictions."""
        warn("predictions", "is now predict(x); the former name ends with the next release")
        return self.predict(x)

    def export(self, client: int | str) -> tuple[Any, Any]:
        """Returns what one client predicts with, as a Flax or PyTorch module and its variables.

        For a Linen module, `module.apply(variables, x)` gives the logits whose softmax is `predict(x, client)`, or the
        values for regression; the variables are its collections, batch statistics among them. An NNX module has the
        client's parameters, in inference mode, and its variables are its `nnx.State` without random streams. A PyTorch
        module is a copy with the client's parameters, in evaluation mode, and its variables are its `state_dict`.

        If the client predicts with a mixture of several models, as in FedEM and FedeRiCo, the module is an ensemble:
        its variables are those of the members, stacked along a leading axis, and their weights in the collection
        "ensemble" (for NNX and PyTorch, `module.members` and `module.weights`). Its outputs are those of the mixture.

        The module takes x as `predict` does. If training standardized x, the module does so first, with the statistics
        in its variables' collection "scaling" (for PyTorch, in buffers "scaling/mean/x" and "scaling/std/x", which
        `load_state_dict` of your own module does not accept: it would not standardize). A `Model` made of them is
        trained further with the same statistics.

        Args:
            client: The client's number, 0 to K - 1, or its name.

        Raises:
            ArgumentError: if the client predicts with more than the outputs of its models, such as with neighbors; or
                if the run was loaded without a part that this needs.

        Examples:
            >>> import jax
            >>> import numpy as np
            >>> import pfljax as pfl
            >>> clients = pfl.data.digits(num_clients=4, train_examples=8)
            >>> run = pfl.Run(pfl.methods.FedEM(components=2), clients, pfl.models.MLP(hidden=(4,)))
            >>> result = run.train(rounds=2, progress=False)
            >>> module, variables = result.export(client=1)
            >>> variables["params"]["Dense_0"]["kernel"].shape
            (2, 64, 4)
            >>> x, _ = clients.examples(1)
            >>> probabilities = jax.nn.softmax(module.apply(variables, x))
            >>> bool(np.allclose(probabilities, result.predict(x, client=1), atol=1e-6))
            True
        """
        predictor = self._trained()
        number = predictor.experiment.federation.client_number(client)
        return predictor.export(number, client)

    @checked()
    def save_model(self, path: str | Path, client: int | str) -> None:
        """Saves the variables of `export`.

        Args:
            path: A new file NAME.safetensors, which `pfl.models.weights.Saved` reads; or a new folder, which Orbax's
                `StandardCheckpointer().restore(path)` reads.
            client: The client's number, 0 to K - 1, or its name.

        Raises:
            ArgumentError: see `export`; also if the file or folder exists.
        """
        _, variables = self.export(client)
        files.check_new(Path(path), "path", "a new file NAME.safetensors or a new folder")
        if Path(path).suffix == ".safetensors":
            files.write_atomically(Path(path), lambda file: file.write(weights.as_bytes(variables)))
            return
        import orbax.checkpoint as ocp  # slow to import

        if not isinstance(variables, dict):
            from flax import nnx  # slow to import

            variables = nnx.to_pure_dict(variables)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(Path(path).absolute(), jax.tree.map(np.asarray, variables))

    @checked()
    def export_device(
        self,
        path: str | Path,
        client: int | str,
        *,
        rows: Annotated[int | None, hyperparameter(at_least=1)] = None,
        batch: Annotated[int, hyperparameter(at_least=1)] = 1,
    ) -> Path:
        """Writes one client's update and prediction as one program with its weights, in one file.

        A device needs JAX and flatbuffers to run it (`pip install jax flatbuffers`):

            program = jax.export.deserialize(bytearray(file.read_bytes()))
            held, upload, predictions = program.call(held, started, round, x, y, size, inputs)

        - held: what the client holds, a dict of arrays; at first zeros in the shapes of `program.in_avals`.
        - started: False takes the weights in the file in place of `held`; True takes `held`, as the last call
          returned it, with new models of the server's in it if there are any.
        - round: number of the round, int32, from which mini-batches are drawn; `result.state.round` is the next.
        - x (rows, *features), y (rows, ...), size: training examples as they were given to the run, with zeros beyond
          `size`. With size 0 the client does not train.
        - inputs (batch, *features): examples to predict.
        - upload: what the client would send, a dict of arrays as the server adds them up: updates are multiplied by
          their weight. Empty if it sends nothing.
        - predictions: those of `predict`, after the update: class probabilities (batch, C), or values (batch,).

        The program is for the kind of device that it was written on.

        Args:
            path: A new file, such as client.stablehlo.
            client: The client's number, 0 to K - 1, or its name.
            rows: Number of rows for training examples. Default: as many as the run's largest client has.
            batch: Number of examples to predict at a time.

        Raises:
            ArgumentError: if the file exists; if the client predicts with other clients' models, sends several messages
                a round, or reads validation examples; or if it trains with private noise, whose secret no file has.

        Examples:
            >>> import pathlib, tempfile
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import numpy as np
            >>> import pfljax as pfl
            >>> clients = pfl.data.digits(num_clients=4, train_examples=8)
            >>> run = pfl.Run(pfl.Ditto(), clients, pfl.models.MLP(hidden=(4,)))
            >>> result = run.train(rounds=2, progress=False)
            >>> path = pathlib.Path(tempfile.mkdtemp()) / "client.stablehlo"
            >>> file = result.export_device(path, client=1)  # doctest: +SKIP

            On the device, without an update:

            >>> program = jax.export.deserialize(bytearray(file.read_bytes()))  # doctest: +SKIP
            >>> (held, *arrays), _ = jax.tree.unflatten(program.in_tree, program.in_avals)  # doctest: +SKIP
            >>> held = jax.tree.map(lambda aval: jnp.zeros(aval.shape, aval.dtype), held)  # doctest: +SKIP
            >>> x, y = (np.zeros(aval.shape, aval.dtype) for aval in arrays[2:4])  # doctest: +SKIP
            >>> inputs, _ = clients.examples(1)
            >>> arguments = (held, False, np.int32(2), x, y, np.int32(0), inputs[:1])  # doctest: +SKIP
            >>> held, upload, predictions = program.call(*arguments)  # doctest: +SKIP
            >>> bool(np.allclose(predictions, result.predict(inputs[:1], client=1), atol=1e-6))  # doctest: +SKIP
            True
        """
        from pfljax.flower import device  # imported lazily, since few need it

        predictor = self._trained()
        experiment = predictor.experiment
        number = experiment.federation.client_number(client)
        path = Path(path)
        files.check_new(path, "path", "a new file, such as client.stablehlo")
        num_rows = experiment.federation.train.y.shape[1] if rows is None else rows
        program = device.serialized(experiment, self.state, number, num_rows, batch)
        files.write_atomically(path, lambda file: file.write(program))
        return path

    @property
    def plot(self) -> report.Plots:
        """Former name of the figures: `result.plot.accuracy()` is now `result.plot_scores()`."""
        now = "result.plot.accuracy() is now result.plot_scores(), and plot.NAME is plot_NAME"
        warn("plot", f"{now}; the former names end with the next release")
        return self._plots

    @property
    def _plots(self) -> report.Plots:
        """The figures."""
        scores = self._scores
        return report.Plots(scores.summary, scores.rows, scores.results, scores.collaboration)

    def plot_scores(self, metric: str = "") -> Figure:
        """Plots a score over rounds: the mean over clients, the worst tenth, and the range.

        Like all figures, notebooks show it inline.

        Args:
            metric: Name of the score. Default: accuracy, or the loss for regression.

        Raises:
            ArgumentError: if the run has no such score.
        """
        return self._plots.accuracy(metric)

    def plot_per_client(self) -> Figure:
        """Plots each client's score in the last round."""
        return self._plots.per_client()

    def plot_collaboration(self, evaluation: int = -1) -> Figure:
        """Plots which models each client used at one evaluated round.

        Args:
            evaluation: Number of the evaluation; negative: from the end. Default: the last.

        Raises:
            ArgumentError: if only a sample of the clients is scored.
        """
        return self._plots.collaboration(evaluation)

    def plot_sharing(self, evaluation: int = -1) -> Figure:
        """Plots which clients share models at one evaluated round; see `plot_collaboration`."""
        return self._plots.sharing(evaluation)

    def plot_weights(self) -> Figure:
        """Plots each client's weights of the models over rounds.

        Raises:
            ArgumentError: if only a sample of the clients is scored.
        """
        return self._plots.weights()

    def plot_affinity(self) -> Figure:
        """Plots how much each client has gained from others' models, at up to four rounds.

        Raises:
            ArgumentError: if the method records no affinity, or only a sample of the clients is scored.
        """
        return self._plots.affinity()

    def plot_traffic(self) -> Figure:
        """Plots the score against the megabytes received and sent per client.

        Raises:
            ArgumentError: if no model was sent.
        """
        return self._plots.traffic()

    def plot_duration(self) -> Figure:
        """Plots the score against simulated seconds.

        Raises:
            ArgumentError: if the run has no clock.
        """
        return self._plots.duration()

    def plot_measures(self) -> Figure:
        """Plots the method's own metrics over rounds, one panel per metric.

        Raises:
            ArgumentError: if the method has none.
        """
        return self._plots.measures()

    def write_report(self) -> Path:
        """Draws the figures and writes report.html to the run's folder. Returns the page's path.

        Raises:
            ArgumentError: if the run was trained without a folder.
        """
        if self.out is None:
            text = "the run was trained without a folder; pass `out` to `train`"
            raise ArgumentError("out", text)
        begin = time.perf_counter()
        page = report.write(self.out)
        # A run of an earlier version has no seconds by part.
        seconds = self.summary.setdefault("seconds", {})
        seconds["page"] = time.perf_counter() - begin
        return page


def frame_of(
    results: Mapping[str, np.ndarray], federation: Federation, phases: Phases | None = None
) -> Any:
    """Converts the content of results.npz to a DataFrame with one row per evaluated round, client and split."""
    pd = optional.load("pandas", "to_pandas")
    rounds = results["rounds"]
    splits = [split for split in SPLITS if f"loss_{split}" in results]
    clients = results.get("clients", np.arange(federation.num_clients))
    names = ["round", "client", "split"]
    index = pd.MultiIndex.from_product([rounds, clients, splits], names=names)

    # The scores that each split has: the loss, the accuracy, then others.
    suffix = f"_{splits[0]}"
    metrics = [name.removesuffix(suffix) for name in results if name.endswith(suffix)]
    first_metrics = ("loss", "accuracy")
    metrics.sort(key=lambda name: (*first_metrics, name).index(name))

    def repeated(values: np.ndarray) -> np.ndarray:
        """Each client's value, for each row of the frame."""
        return np.tile(np.repeat(values[clients], len(splits)), len(rounds))

    # The clients' groups and numbers of examples, which may change.
    by_round = [federation] * len(rounds)
    if phases is not None:
        by_round = [phases.clients[phases.number(number)] for number in rounds]
    columns: dict[str, np.ndarray] = {}
    if federation.group is not None:
        groups = [np.asarray(current.group) for current in by_round]
        groups = [np.repeat(group[clients], len(splits)) for group in groups]
        columns["group"] = np.concatenate(groups)
    sizes = [
        np.stack([getattr(current, split).size[clients] for split in splits], axis=-1).ravel()
        for current in by_round
    ]
    columns["size"] = np.concatenate(sizes)
    if federation.client_names is not None:
        columns["name"] = repeated(federation.client_names)
    for metric in metrics:
        values_by_split = [results[f"{metric}_{split}"] for split in splits]
        columns[metric] = np.stack(values_by_split, axis=-1).ravel()
    return pd.DataFrame(columns, index=index).reset_index()
