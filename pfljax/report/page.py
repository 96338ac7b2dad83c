"""The page of a run: one HTML file that opens without a network, from the files that the run has left."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pfljax.engine import processes
from pfljax.report.canvas import byte_unit, save
from pfljax.report.captions import draw
from pfljax.report.plots import Plots
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


def write(directory: Path) -> Path:
    """Draws a run's figures into figures/*.png and writes report.html, from what the run has left in `directory`.

    Of several processes, the first does so.

    Returns:
        The page.
    """
    directory = Path(directory)
    page = directory / "report.html"
    if not processes.is_first():
        return page
    curve = files.read_npz(directory / "curve.npz") if (directory / "curve.npz").exists() else {}
    plots = Plots.read(directory)
    summary = plots.summary
    title = f"{summary['algorithm']} on {summary['dataset']}"
    sections = {
        "Result": _result(summary),
        "Figures": "\n".join(
            _picture(directory / "figures" / f"{name}.png", figure, caption)
            for name, (figure, caption) in draw(plots, curve).items()
        ),
        "Clients that were not there in training": _unseen(summary.get("unseen") or {}),
        "Traffic": _traffic(plots.rows),
        "Privacy": _privacy(summary.get("privacy")),
        "Memory and execution": _plan(summary),
        "Clients": _clients(summary.get("per_client") or []),
        "Configuration": _config(files.read_json(directory / "config.json")),
    }
    facts = {"clients": "num_clients", "rounds": "rounds", "seed": "seed"}
    lead = ", ".join(f"{name} {summary[key]}" for name, key in facts.items() if key in summary)
    body = "\n".join(f"<h2>{_text(name)}</h2>\n{content}" for name, content in sections.items() if content)
    files.write_text(
        page,
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_text(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{_text(title)}</h1>\n"
        f'<p class="lead">{_text(lead)}</p>\n{body}\n</body>\n</html>\n',
    )
    return page


def _picture(path: Path, figure: Figure, caption: str) -> str:
    """Saves the figure and returns it with its caption, the image in the page itself."""
    save(figure, path)
    data = base64.b64encode(path.read_bytes()).decode()
    width = round(figure.get_figwidth() * 96)
    return (
        f'<figure><img src="data:image/png;base64,{data}" width="{width}" alt="{_text(path.stem.replace("_", " "))}">'
        f"<figcaption>{_text(caption)}</figcaption></figure>"
    )


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
    scale, unit = byte_unit(value)
    return f"{value / scale:.0f} B" if unit == "B" else f"{value / scale:.1f} {unit}"


def _table(heads: Sequence[str], body: Iterable[Sequence[Any]], kind: str = "") -> str:
    line = lambda tag, cells: "<tr>" + "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in cells) + "</tr>"
    head = line("th", heads) if heads else ""
    return f'<div class="wide"><table class="{kind}">{head}{"".join(line("td", cells) for cells in body)}</table></div>'


def _paragraph(text: str) -> str:
    return f"<p>{_text(text)}</p>" if text else ""


def _result(summary: Mapping[str, Any]) -> str:
    last, best = summary["last"], summary.get("best")
    names = [name for name in SCORES if name in last]
    line = lambda label, row: [label, row.get("round"), *(_score(name, row.get(name)) for name in names)]
    body = [line("last", last)]
    if best:
        body.append(line(f"best by {str(best.get('selected_by', 'train_loss')).replace('_', ' ')}", best))
    said = f"Scored: {summary['scored']}. " if "scored" in summary else ""
    if summary.get("scored_clients"):
        said += (
            f"A uniform sample of {summary['scored_clients']:,} of the {summary['num_clients']:,} clients was scored. "
        )
    if "accuracy" in last:
        said += "Accuracy and loss are on the clients' test examples, means weighted by their number."
    else:
        said += "The loss is the mean squared error on the clients' test examples, a mean weighted by their number."
    return _table(["", "round", *(SCORES[name] for name in names)], body) + _paragraph(said)


def _unseen(unseen: dict) -> str:
    scores = [name for name in unseen if name.removeprefix("train_") in SCORES]
    body = [("train " if n.startswith("train_") else "test ") + SCORES[n.removeprefix("train_")] for n in scores]
    table = _table(
        [], [(name, _score(key.removeprefix("train_"), unseen[key])) for name, key in zip(body, scores, strict=True)]
    )
    return (table if scores else "") + _clients(unseen.get("per_client") or [])


def _clients(rows: Sequence[Mapping[str, Any]]) -> str:
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
        f"The {half} worst and the {half} best of {len(rows):,} clients that were scored; all are in results.npz."
        if cut
        else "Worst first."
    )
    shown = [*rows[:half], {name: "…" for name in heads}, *rows[-half:]] if cut else rows
    cell = lambda name, value: _score(name, value) if name in ("accuracy", "loss") else value
    return _paragraph(said) + _table(list(heads.values()), ([cell(n, row.get(n)) for n in heads] for row in shown))


def _badness(row: Mapping[str, Any]) -> tuple[float, float]:
    accuracy, loss = row.get("accuracy"), row.get("loss")
    return (np.inf if accuracy is None else accuracy, np.inf if loss is None else -loss)


def _traffic(rows: Sequence[Mapping[str, Any]]) -> str:
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
        "The bound covers the gradients of local training and counts mini-batches as Poisson samples. "
        + (f"Not counted: {omitted}." if omitted else "")
    )


def _plan(summary: Mapping[str, Any]) -> str:
    lines = [(name, _bytes(v) if isinstance(v, int) else v) for name, v in summary.get("plan") or []]
    if summary.get("peak_memory_bytes") is not None:
        lines.append(("peak memory, measured", _bytes(summary["peak_memory_bytes"])))
    for name, key in (("compiling", "compile_seconds"), ("a round", "seconds_per_round")):
        if summary.get(key) is not None:
            lines.append((name, f"{summary[key]:.3g} s"))
    return _table([], lines) if lines else ""


def _config(config: Mapping[str, Any]) -> str:
    command = config.get("command")
    out = f"<p>To run it again:</p><pre>{_text(command)}</pre>" if command else ""
    rest = {name: value for name, value in config.items() if name not in ("flags", "command") and value}
    if rest:
        out += _table([], rest.items(), "text")
    if config.get("flags"):
        out += "<h3>Flags</h3>" + _table(["flag", "value"], sorted(config["flags"].items()), "text")
    return out
