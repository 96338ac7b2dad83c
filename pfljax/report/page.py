"""The page of a run: one HTML file that opens without a network, from the files that the run has left."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pfljax.engine import processes
from pfljax.report import figures
from pfljax.training import files

SHOWN = 100  # clients in a table; of more, the worst half and the best half of these

STYLE = """
body { font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; color: #26323a; background: #fff;
       max-width: 58rem; margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin-bottom: .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; padding-bottom: .2rem; border-bottom: 1px solid #d5dbde; }
.lead { color: #5b6a72; margin-top: 0; }
figure { margin: 1.4rem 0 2.2rem; }
figure img { max-width: 100%; height: auto; display: block; margin: 0 auto; }
figcaption { font-size: .92rem; color: #44535b; margin-top: .5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .8rem .22rem 0; text-align: right; vertical-align: top; border-bottom: 1px solid #eceff1; }
th { font-weight: 600; border-bottom: 1px solid #b9c3c8; }
th:first-child, td:first-child, .text td { text-align: left; overflow-wrap: anywhere; }
pre { background: #f4f6f7; padding: .7rem .9rem; overflow-x: auto; font-size: .86rem; }
"""

# What a table of scores shows, in this order, where the run has it.
SCORES = {
    "accuracy": "accuracy",
    "accuracy_mean": "plain mean",
    "accuracy_std": "std",
    "accuracy_bottom_decile": "bottom decile",
    "accuracy_min": "minimum",
    "loss": "loss",
    "train_loss": "train loss",
}


# What every method's rows of metrics.jsonl have; the rest are its own measures.
COMMON = {"round", "seconds", "train_loss", "loss", "bytes_down", "bytes_up"} | {
    f"accuracy{kind}" for kind in ("", "_mean", "_std", "_bottom_decile", "_min")
}


def write(directory: Path) -> Path:
    """Draws a run's figures into figures/*.png and writes report.html, from what the run has left in `directory`.

    Of several processes the first does so.

    Returns:
        The page.
    """
    directory = Path(directory)
    if not processes.is_first():
        return directory / "report.html"
    optional = lambda name: files.read_npz(directory / name) if (directory / name).exists() else {}
    config, summary = (files.read_json(directory / f"{name}.json") for name in ("config", "summary"))
    results, collaboration, curve = (optional(f"{name}.npz") for name in ("results", "collaboration", "curve"))
    rows = files.read_jsonl(directory / "metrics.jsonl")
    pictures = []
    for name, (figure, caption) in draw(summary, rows, results, collaboration, curve).items():
        path = directory / "figures" / f"{name}.png"
        figures.save(figure, path)
        data = base64.b64encode(path.read_bytes()).decode()
        width = round(figure.get_figwidth() * 96)
        pictures.append(
            f'<figure><img src="data:image/png;base64,{data}" width="{width}" alt="{_text(name.replace("_", " "))}">'
            f"<figcaption>{_text(caption)}</figcaption></figure>"
        )
    title = f"{summary['algorithm']} on {summary['dataset']}"
    sections = {
        "Result": _result(summary),
        "Figures": "\n".join(pictures),
        "Clients that were not there in training": _unseen(summary.get("unseen") or {}),
        "Traffic": _traffic(rows),
        "Privacy": _privacy(summary.get("privacy")),
        "Memory and execution": _plan(summary),
        "Clients": _clients(summary.get("per_client") or []),
        "Configuration": _config(config),
    }
    facts = {"clients": "num_clients", "rounds": "rounds", "seed": "seed"}
    lead = ", ".join(f"{name} {summary[key]}" for name, key in facts.items() if key in summary)
    body = "\n".join(f"<h2>{_text(name)}</h2>\n{content}" for name, content in sections.items() if content)
    page = directory / "report.html"
    files.write_text(
        page,
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_text(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{_text(title)}</h1>\n"
        f'<p class="lead">{_text(lead)}</p>\n{body}\n</body>\n</html>\n',
    )
    return page


def draw(
    summary: dict,
    rows: list[dict],
    results: dict[str, np.ndarray],
    collaboration: dict[str, np.ndarray],
    curve: dict[str, np.ndarray],
) -> dict[str, tuple[Figure, str]]:
    """The figures of a run by file name, each with a caption that says what to look for."""
    task = summary.get("task", "classification")
    score = "accuracy" if task == "classification" else "loss"
    word = "accuracy" if task == "classification" else "mean squared error"
    test, rounds = results[f"{score}_test"], results["rounds"]
    per_client = summary.get("per_client") or []
    sizes = np.array([row["n_test"] for row in per_client]) if per_client else None
    if "distribution" in collaboration:
        distribution = collaboration["distribution"]
    else:
        distribution = np.array([row["distribution"] for row in per_client] or [0] * test.shape[1])
    out = {}
    if curve:
        arrays = {**curve, "reference_name": str(curve.get("reference_name", ""))}
        out["curve"] = (
            figures.curve(**arrays),
            "Noisy training points and each client's personal model on its own interval: look whether the lines follow "
            "the curve where one model for all cannot.",
        )
    out[f"{score}_over_rounds"] = (
        figures.accuracy_over_rounds(rounds, test, sizes=sizes, train=results.get(f"{score}_train"), task=task),
        f"Test {word} over rounds: look whether the worst tenth of the clients gains along with the mean, and whether "
        "it was still improving at the end.",
    )
    out[f"per_client_{score}"] = (
        figures.per_client(test[-1], distribution, task=task),
        f"Each client's {word} in the last round: look whether the bad ones share a distribution.",
    )
    if "weights" in collaboration and _collaborates(collaboration):
        index, weights, topology = (collaboration[name] for name in ("index", "weights", "topology"))
        topology = str(topology)
        out["collaboration_matrix"] = (
            figures.collaboration_matrix(index[-1], weights[-1], distribution, topology=topology),
            "Which of the models each client predicts with in the last round: look whether clients of one distribution "
            "choose the same ones."
            if topology == "shared"
            else "Whose models each client has used in the last round, clients in the order of their true "
            "distributions: look for weight outside the blocks on the diagonal, where strangers collaborate. "
            + _shares(index[-1], weights[-1], distribution, collaboration.get("target", distribution)),
        )
        out["weights_over_rounds"] = (
            figures.weights_over_rounds(
                collaboration["round"],
                index,
                weights,
                distribution,
                topology=topology,
                target=collaboration.get("target"),
            ),
            f"Weights over rounds of {min(test.shape[1], figures.MAX_PANELS)} of {test.shape[1]} clients; the bar "
            "above a panel has the color of the distribution of the client's test data: look when a client settles, "
            "and whether its lines have the color of its bar."
            if topology != "shared"
            else f"Weights over rounds of {min(test.shape[1], figures.MAX_PANELS)} of {test.shape[1]} clients, a line "
            "per shared model or branch: look when a client settles, and whether one of them is never used.",
        )
    if "affinity" in collaboration:
        target = collaboration.get("target", distribution)
        share = top_affinities(collaboration["affinity"][-1], distribution, target)
        out["affinity_over_rounds"] = (
            figures.affinity_over_rounds(collaboration["round"], collaboration["affinity"], distribution),
            "How much each client has gained from others' models so far, its own left out, clients in the order of "
            "their distributions: look whether the blocks on the diagonal"
            + (
                " (or, where a client wants another distribution, that one's block)"
                if "target" in collaboration
                else ""
            )
            + " turn blue."
            + (
                ""
                if math.isnan(share)
                else f" The two highest affinities lie in the wanted distribution for {share:.0%} of the clients that "
                "have two others there."
            ),
        )
    own = [name for name in (rows[-1] if rows else {}) if name not in COMMON and not name.startswith("validation_")]
    if own and len(rows) == len(test):
        out["measures"] = (
            figures.measures(rounds, {name: [row[name] for row in rows] for name in own}),
            "What the method measures of itself, in the last round before each evaluation: look whether what it "
            "minimizes still falls.",
        )
    traffic = np.array([row.get("bytes_down", 0) + row.get("bytes_up", 0) for row in rows], float)
    if len(traffic) == len(test) and traffic.any():
        out[f"traffic_against_{score}"] = (
            figures.traffic_against_accuracy(traffic, test, sizes=sizes, task=task),
            f"Test {word} against what a client has sent and received: look where more traffic stops paying.",
        )
    return out


def _collaborates(collaboration: dict[str, np.ndarray]) -> bool:
    """Whether there is a choice to show: own models only, or one model for all, would make empty pictures."""
    return str(collaboration["topology"]) != "own" and int(collaboration["index"].max()) > 0


def _shares(index: np.ndarray, weights: np.ndarray, distribution: np.ndarray, target: np.ndarray) -> str:
    """Where the clients' weight lies, in a sentence; none where nobody gives any."""
    total = weights.sum()
    if not total:
        return ""
    own = index == np.arange(len(index))[:, None]
    alike = (distribution[index] == target[:, None]) & ~own
    own, alike = (float((weights * mask).sum() / total) for mask in (own, alike))
    wanted = "the same distribution" if target is distribution else "the distribution of the client's test data"
    return (
        f"Of all weight, {own:.0%} lies on clients' own models, {alike:.0%} on others of {wanted}, and "
        f"{max(1 - own - alike, 0):.0%} on other distributions."
    )


def top_affinities(affinity: np.ndarray, distribution: np.ndarray, target: np.ndarray) -> float:
    """The share of clients whose two highest affinities (K, K), their own left out, are to clients of their target.

    Only clients count to which there are two others of it; NaN if there are none.
    """
    others = np.where(np.eye(len(affinity), dtype=bool), -np.inf, affinity)
    wanted = (distribution[None, :] == target[:, None]) & ~np.eye(len(affinity), dtype=bool)
    top = np.argsort(-others, axis=1, kind="stable")[:, :2]
    able = wanted.sum(axis=1) >= 2
    found = np.take_along_axis(wanted, top, axis=1).all(axis=1)
    return float(found[able].mean()) if able.any() else float("nan")


def _text(value: Any) -> str:
    """Any value as escaped text."""
    if value is None or (isinstance(value, float) and not np.isfinite(value)):
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{_text(name)} {_text(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return html.escape(str(value))


def _score(name: str, value: Any) -> str:
    """Accuracies in percent, losses with four digits."""
    if not isinstance(value, int | float):
        return _text(value)
    return f"{100 * value:.1f} %" if name.startswith("accuracy") else f"{value:.4f}"


def _bytes(value: float) -> str:
    scale, unit = figures.byte_unit(value)
    return f"{value / scale:.0f} B" if unit == "B" else f"{value / scale:.1f} {unit}"


def _table(heads: Sequence[str], body: Iterable[Sequence[Any]], kind: str = "") -> str:
    line = lambda tag, cells: "<tr>" + "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in cells) + "</tr>"
    head = line("th", heads) if heads else ""
    return f'<div class="wide"><table class="{kind}">{head}{"".join(line("td", cells) for cells in body)}</table></div>'


def _paragraph(text: str) -> str:
    return f"<p>{_text(text)}</p>" if text else ""


def _result(summary: dict) -> str:
    last, best = summary["last"], summary.get("best")
    names = [name for name in SCORES if name in last]
    line = lambda label, row: [label, row.get("round"), *(_score(name, row.get(name)) for name in names)]
    body = [line("last", last)]
    if best:
        body.append(line(f"best by {str(best.get('selected_by', 'train_loss')).replace('_', ' ')}", best))
    said = f"Scored: {summary['scored']}. " if "scored" in summary else ""
    if "accuracy" in last:
        said += "On the clients' test examples; accuracy and loss are means weighted by a client's test examples."
    else:
        said += "The loss is the mean squared error, weighted by a client's test examples."
    return _table(["", "round", *(SCORES[name] for name in names)], body) + _paragraph(said)


def _unseen(unseen: dict) -> str:
    scores = [name for name in unseen if name.removeprefix("train_") in SCORES]
    body = [("train " if n.startswith("train_") else "test ") + SCORES[n.removeprefix("train_")] for n in scores]
    table = _table(
        [], [(name, _score(key.removeprefix("train_"), unseen[key])) for name, key in zip(body, scores, strict=True)]
    )
    return (table if scores else "") + _clients(unseen.get("per_client") or [])


def _clients(rows: list[dict]) -> str:
    """The clients' table, worst first."""
    if not rows:
        return ""
    heads = {"client": "client", "distribution": "distribution", "n_train": "train examples"}
    heads |= {"target": "target", "n_test": "test examples", "accuracy": "accuracy", "loss": "loss"}
    heads = {name: head for name, head in heads.items() if any(row.get(name) is not None for row in rows)}
    rows = sorted(rows, key=_badness)
    half = SHOWN // 2
    cut = len(rows) > SHOWN
    said = (
        f"The {half} worst and the {half} best of {len(rows)} clients; all are in results.npz."
        if cut
        else "Worst first."
    )
    shown = [*rows[:half], {name: "…" for name in heads}, *rows[-half:]] if cut else rows
    cell = lambda name, value: _score(name, value) if name in ("accuracy", "loss") else value
    return _paragraph(said) + _table(list(heads.values()), ([cell(n, row.get(n)) for n in heads] for row in shown))


def _badness(row: dict) -> tuple[float, float]:
    accuracy, loss = row.get("accuracy"), row.get("loss")
    return (np.inf if accuracy is None else accuracy, np.inf if loss is None else -loss)


def _traffic(rows: list[dict]) -> str:
    if not rows or "bytes_down" not in rows[-1]:
        return ""
    down, up, rounds = rows[-1]["bytes_down"], rows[-1]["bytes_up"], max(rows[-1]["round"], 1)
    if not down + up:
        return _paragraph("No model has left its client.")
    lines = [(name, _bytes(n), _bytes(n / rounds)) for name, n in (("down", down), ("up", up), ("both", down + up))]
    return _table(["per client", "in all", "per round"], lines)


def _privacy(privacy: dict | None) -> str:
    """What the ledger says."""
    if not privacy:
        return ""
    own = [math.inf if value is None else value for value in privacy["epsilon_per_client"]]
    bound = lambda value: "no bound" if math.isinf(value) else f"{value:.4g}"
    lines = [
        ("noise multiplier", f"{privacy['noise_multiplier']:g}"),
        ("clipping norm", f"{privacy['clip_norm']:g}"),
        ("delta", f"{privacy['delta']:g}"),
        ("epsilon, largest of the clients", bound(max(own))),
        ("epsilon, median", bound(float(np.median(own)))),
    ]
    omitted = privacy.get("unaccounted")
    return _table([], lines) + _paragraph(
        "Of the gradients of local training, mini-batches counted as Poisson samples. "
        + (f"Not counted: {omitted}." if omitted else "")
    )


def _plan(summary: dict) -> str:
    lines = [(name, _bytes(v) if isinstance(v, int) else v) for name, v in summary.get("plan") or []]
    if summary.get("peak_memory_bytes") is not None:
        lines.append(("peak memory, measured", _bytes(summary["peak_memory_bytes"])))
    for name, key in (("compiling", "compile_seconds"), ("a round", "seconds_per_round")):
        if summary.get(key) is not None:
            lines.append((name, f"{summary[key]:.3g} s"))
    return _table([], lines) if lines else ""


def _config(config: dict) -> str:
    command = config.get("command")
    out = f"<p>To run it again:</p><pre>{_text(command)}</pre>" if command else ""
    rest = {name: value for name, value in config.items() if name not in ("flags", "command") and value}
    if rest:
        out += _table([], rest.items(), "text")
    if config.get("flags"):
        out += "<h3>Flags</h3>" + _table(["flag", "value"], sorted(config["flags"].items()), "text")
    return out
