"""The page of a comparison. It shows several runs and links to each run's own page."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from pfljax.contract import processes
from pfljax.evaluation import collaboration, gains, statistics
from pfljax.evaluation.metrics import few_examples, rests_on_few
from pfljax.folder import files
from pfljax.report import terms
from pfljax.report.comparison_runs import (
    FolderRun,
    Method,
    client_rows,
    failures,
    group_runs,
    pairs_of,
    read_runs,
    standings_of,
)
from pfljax.report.comparisons import (
    client_gains,
    client_pairs,
    difference_points,
    method_curves,
    method_points,
    spent_axis,
    with_drifts,
)
from pfljax.report.content import table_cells
from pfljax.report.elements import (
    Choice,
    Controls,
    Element,
    Link,
    Links,
    Marked,
    Paragraph,
    Plot,
    Table,
    Wrapped,
    downloads,
)
from pfljax.report.page import NAME, write_page
from pfljax.report.picture import Axis, plain
from pfljax.report.pictures import axis_of
from pfljax.report.rendering import document
from pfljax.report.run_data import RunData, Score, evenly, number_of
from pfljax.report.sections import classes_text

ROW = 3.4  # rem; height of a method in the plot of runs, so that stacked points do not touch
MAX_POINTS = 1000  # clients of a panel
MAX_CLIENTS = 200  # rows of the table of clients; of more, some are shown
WORST_CLIENTS = 50  # how many of them

COSTS = {"megabytes": terms.MEGABYTES, "seconds": "seconds per round", "gradients": terms.GRADIENTS}
AGAINST = {
    "rounds": "rounds",
    "megabytes": "MB received and sent per client",
    "seconds": "seconds of training",
    "simulated": "simulated seconds",
}
POINTS = (
    "One point per run; runs with nearly the same value are stacked. The line across a row is the mean over its runs, "
    "not an interval. Click a point for its page."
)
BAND = (
    "Mean over runs; the band is one sample deviation over runs if there are several. Click a method in the legend to "
    "hide it."
)
PAIRED = (
    "Squares are means of the paired differences, lines with caps their 95 % intervals. Positive: the score is higher "
    "than the other's."
)
TESTED = "Mean difference and 95 % interval, p of a sign-flip test, and in how many units the method is better."
UNWEIGHTED = (
    "Mean gains differ from the differences above, which weight clients by their numbers of examples: here, every "
    "client counts the same."
)
HELPED = (
    "Each client of each run counts once. Helped and hurt: shares of those whose score is better or worse than with "
    "{reference}. Mean gain: every client counts the same, whatever its number of examples; with the 95 % t interval "
    "over clients, whose gains are first averaged over the runs on the same data. Cosines are of clients' weights, "
    "within and across true groups, means over runs."
)
GAINS = "What single clients gain over {reference}, from the largest gain to the smallest."
PAIRS = "Each point is a client of a run: its scores with {reference} and with the method, equal on the dashed line."
LATE = (
    "The trend is that of the last quarter of the rounds. A line is fitted to each run's scores; there is a trend if "
    "the 95 % interval of the mean change excludes 0. It needs three evaluations and two runs."
)
DOWNLOADS = {"runs": "Runs (CSV)", "curves": "Curves (CSV)"}


def write_comparison(
    page: Path, folders: Sequence[Path], title: str = "", reference: str | None = None
) -> Path | None:
    """Writes the page of a comparison, and the pages of its runs if they are missing or older than the runs.

    Args:
        page: The file to write.
        folders: Folders of runs, or folders that contain runs.
        title: The page's heading; by default, it names the data set.
        reference: The method that the others are compared with; by default one whose clients send nothing, or the best.

    Returns:
        Path of the page; None if there are no runs.

    Raises:
        RunError: if a run's files are damaged; the message names the run.
        ArgumentError: if no method has the name of the reference.
    """
    runs = read_runs(folders)
    if not runs:
        return None
    if not processes.is_first():
        return page

    # Check the reference. A method that failed has no runs to compare with.
    failed = {}
    for folder in folders:
        failed |= failures(Path(folder))
    if reference in failed:
        reference = None
    names = {run.title.rpartition("/")[2]: run.run.summary["method"] for run in runs}
    reference = statistics.find_reference(reference, names)

    write_missing_pages(runs)
    methods = group_runs(runs, page.parent.resolve())
    reference = reference or default_reference(methods)
    rows = []
    for folder in folders:
        rows += client_rows(Path(folder))
    score = runs[0].run.score
    heads = measure_heads(methods, score)
    standings = standings_of(methods, score, reference)
    panels = comparison_panels(methods, heads, score, reference)

    data = {
        "panels": panels,
        "texts": pointer_texts(methods),
        "csv": csv_tables(methods, heads, score),
    }
    sections = {
        "Methods": [
            *methods_table(methods, heads, score, standings),
            *warnings_of([run.run for run in runs]),
            *failure_notes(failed),
        ],
        "Differences": differences_section(panels["differences"], standings, score),
        "Clients": effects_section(methods, panels, score, reference),
        "By client": by_client_section(
            rows, score, reference, links_to_clients(folders, page.parent.resolve())
        ),
        "Runs": runs_section(heads, len(methods)),
        "Curves": curves_section(methods),
        "Download": [downloads(DOWNLOADS)],
    }
    dataset = runs[0].run.summary["dataset"]
    lead = f"{len(methods)} methods, {len(runs)} runs"
    files.write_text(page, document(title or f"Comparison on {dataset}", lead, sections, data))
    return page


def write_missing_pages(runs: Sequence[FolderRun]) -> None:
    """Writes the pages of runs that have none, or one that is older than the run."""
    for run in runs:
        page = run.folder / NAME
        summary = run.folder / "summary.json"
        if not page.exists() or page.stat().st_mtime < summary.stat().st_mtime:
            write_page(run.folder)


def default_reference(methods: Sequence[Method]) -> str:
    """Returns a method whose clients send nothing, or the best one."""
    for method in methods:
        if not method.measures["megabytes"].any():
            return method.name
    return methods[0].name


def measure_heads(methods: Sequence[Method], score: Score) -> dict[str, str]:
    """Returns the headings of the measures that the page shows, by name."""
    heads = {"score": f"{score.label}, %" if score.percent else score.label}
    decile = [method.measures["decile"] for method in methods]
    if np.isfinite(np.concatenate(decile)).any():
        heads["decile"] = "bottom decile, %" if score.percent else "bottom decile"
    for method in methods:
        for run in method.runs:
            for name in run.summary.get("metrics", ()):
                if name != score.name:
                    heads[name] = name.replace("_", " ")
    return heads | COSTS


def is_in_percent(name: str, score: Score) -> bool:
    """Whether a measure of a comparison is shown in percent."""
    return score.percent and name in ("score", "decile")


def pointer_texts(methods: Sequence[Method]) -> dict[str, str]:
    """Returns what the pointer shows of a run, by the address of its page."""
    texts = {}
    for method in methods:
        for link, name in zip(method.links, method.names, strict=True):
            texts[link] = f"{method.title}, {name}"
    return texts


# Panels


def comparison_panels(
    methods: Sequence[Method], heads: Mapping[str, str], score: Score, reference: str
) -> dict[str, dict[str, Any]]:
    """Returns the panels of the page's plots, by plot and choice."""
    # Colors are those of the figures for papers, which have the table's order.
    in_order = sorted(methods, key=lambda method: method.position)
    return {
        "dots": point_panels(in_order, heads, score),
        "over": curve_panels(in_order, score),
        "differences": difference_panels(methods, score, reference),
        "gains": gain_panels(methods, score, reference),
        "pairs": pair_panels(methods, score, reference),
    }


def point_panels(
    methods: Sequence[Method], heads: Mapping[str, str], score: Score
) -> dict[str, Any]:
    """Returns the panels of a point per run, by measure."""
    links = {method.title: method.links for method in methods}
    panels = {}
    for name, head in heads.items():
        percent = is_in_percent(name, score)
        axis = Axis(head.removesuffix(", %") if percent else head, percent=percent)
        values = {method.title: method.measures[name] for method in methods}
        panels[name] = plain(method_points(values, axis, links))
    return panels


def axes_of_curves(methods: Sequence[Method]) -> dict[str, str]:
    """Returns the horizontal axes that all methods' curves have, by name; simulated time takes a clock."""
    axes = {}
    for name, label in AGAINST.items():
        if all(name in method.curves for method in methods):
            axes[name] = label
    return axes


def curve_panels(methods: Sequence[Method], score: Score) -> dict[str, Any]:
    """Returns the panels of curves, by horizontal axis."""
    panels = {}
    for name, label in axes_of_curves(methods).items():
        curves = {}
        for method in methods:
            scores = method.curves["score"]
            spent = method.curves[name].mean(axis=0)
            curves[method.title] = (spent, scores.mean(axis=0), statistics.deviation(scores))
        x = Axis(label)
        if name != "rounds":
            x = spent_axis(label, [spent for spent, _, _ in curves.values()])
        panel = method_curves(curves, x, axis_of(score))
        if name == "rounds":
            drifts = {start for method in methods for run in method.runs for start in run.drifts}
            panel = with_drifts(panel, drifts)
        panels[name] = plain(panel)
    return panels


def difference_panels(methods: Sequence[Method], score: Score, reference: str) -> dict[str, Any]:
    """Returns the panels of differences, by the method that the others of its group are compared with.

    The reference comes first. Panels without intervals are left out.
    """
    scale = 100 if score.percent else 1
    unit = ", percentage points" if score.percent else ""
    panels = {}
    for base in sorted(methods, key=lambda method: method.name != reference):
        values = {}
        for method in methods:
            if method.group != base.group or method is base:
                continue
            differences = scale * statistics.paired(method.scores, base.scores).gains
            if len(differences) > 1:
                low, high = statistics.interval(differences)
                values[method.title] = (differences.mean(), low, high)
        if values:
            axis = Axis(f"{score.label} minus {base.title}'s{unit}, {terms.weighting(score.name)}")
            panels[base.title] = plain(difference_points(values, axis))
    return panels


def shown_pairs(scores: np.ndarray, sign: int) -> np.ndarray:
    """Returns clients' scores with two methods (n, 2) from the largest gain to the smallest, thinned out."""
    losses = -gains.gains_of(scores, sign)
    in_order = scores[np.argsort(losses, kind="stable")]
    return in_order[evenly(len(in_order), MAX_POINTS)]


def gain_panels(methods: Sequence[Method], score: Score, reference: str) -> dict[str, Any]:
    """Returns the panels of single clients' gains over their group's reference, by method."""
    panels = {}
    for pair in pairs_of(methods, reference):
        shown = shown_pairs(pair.scores, score.sign)
        title = pair.method.title
        axis = Axis(f"{title}'s gain, {score.label}", percent=score.percent)
        panels[title] = plain(client_gains(gains.gains_of(shown, score.sign), axis))
    return panels


def pair_panels(methods: Sequence[Method], score: Score, reference: str) -> dict[str, Any]:
    """Returns the panels of single clients' scores with their group's reference and with a method, by method."""
    panels = {}
    for pair in pairs_of(methods, reference):
        x = Axis(f"{score.label}, {pair.reference.title}", percent=score.percent)
        y = Axis(f"{score.label}, {pair.method.title}", percent=score.percent)
        shown = shown_pairs(pair.scores, score.sign)
        panels[pair.method.title] = plain(client_pairs(shown, x, y))
    return panels


def csv_tables(
    methods: Sequence[Method], heads: Mapping[str, str], score: Score
) -> dict[str, list]:
    """Returns the tables for downloading. Scores are fractions there."""
    runs = []
    curves = []
    for method in methods:
        for number, name in enumerate(method.names):
            run = {"method": method.title, "run": name}
            measured = {}
            for measure, head in heads.items():
                measured[head.removesuffix(", %")] = method.measures[measure][number]
            runs.append(run | measured)
            rounds = method.curves["rounds"][number].astype(int)
            for time, value in zip(rounds, method.curves["score"][number], strict=True):
                curves.append(run | {"round": time, score.name: value})
    return {"runs": table_cells(runs), "curves": table_cells(curves)}


# Sections


def methods_table(
    methods: Sequence[Method],
    heads: Mapping[str, str],
    score: Score,
    standings: Mapping[str, Mapping[str, Any]],
) -> list[Element]:
    """Returns a table with one row per method, and what its deviations, intervals and ranks rest on."""
    number = number_of(score.percent)
    standing_rows = [standings[method.title] for method in methods]
    standing_heads, standing_cells = statistics.interval_columns(standing_rows, number)
    measures = [name for name in heads if name != "score"]
    any_tuned = any(method.tuned for method in methods)

    body = []
    for method, standing in zip(methods, standing_cells, strict=True):
        rounds = method.curves["rounds"][0].tolist()
        trend = gains.trend(rounds, method.curves["score"])
        cells: list[Any] = [method.title, mean_text("score", method, score)]
        cells += [*standing, trend.verdict(score.sign)]
        cells += [mean_text(name, method, score) for name in measures]
        if any_tuned:
            cells.append(Wrapped(method.tuned or "-"))
        cells.append(method.runs[0].summary.get("knows") or "-")
        links = zip(method.names, method.links, strict=True)
        cells.append(Links([Link(name, link) for name, link in links]))
        body.append(cells)

    headings = ["method", heads["score"], *standing_heads, "trend"]
    headings += [heads[name] for name in measures]
    headings += ["tuned"] if any_tuned else []
    headings += [terms.KNOWS, "runs"]
    caption = f"Means over runs. {terms.BUDGET} Click a heading to sort."
    sentences = [terms.LOWER] if score.sign < 0 else []
    sentences.append(f"The score of a run is its {score.label}, {terms.weighting(score.name)}.")
    sentences += [statistics.explanation(standing_rows), LATE]
    if any(terms.EDGE in method.tuned for method in methods):
        sentences.append(terms.AT_EDGE)
    text = " ".join(sentence for sentence in sentences if sentence)
    return [Table(headings, body, caption, sortable=True), Paragraph(text)]


def mean_text(name: str, method: Method, score: Score) -> str:
    """Formats a measure's mean over runs, and its deviation if it is a score."""
    summary = statistics.RunSummary.from_values(method.measures[name])
    if name in ("score", "decile"):
        return summary.text(number_of(score.percent))
    return f"{summary.mean:.3g}" if summary.runs else "-"


def warnings_of(runs: Sequence[RunData]) -> list[Element]:
    """Returns a paragraph on differences that make the runs not directly comparable."""
    facts: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "data": lambda summary: summary["dataset"],
        "the number of clients": lambda summary: summary["num_clients"],
        "the last round": lambda summary: summary["last"]["round"],
    }
    sentences = []
    for fact, read in facts.items():
        values = dict.fromkeys(read(run.summary) for run in runs)
        if len(values) > 1:
            sentences.append(f"The runs differ in {fact}: {', '.join(map(str, values))}.")
    return [Paragraph(" ".join(sentences))] if sentences else []


def failure_notes(failed: Mapping[str, str]) -> list[Element]:
    """Returns a paragraph on methods that failed."""
    if not failed:
        return []
    return [Paragraph(" ".join(f"{name} failed: {reason}." for name, reason in failed.items()))]


def differences_section(
    panels: Mapping[str, Any], standings: Mapping[str, Mapping[str, Any]], score: Score
) -> list[Element]:
    """Returns the plot of paired differences, and the table of those to the reference; [] without intervals."""
    if not panels:
        return []
    options = {title: title for title in panels}
    height = f"{max(12, 6 + 2 * len(standings))}rem"
    elements: list[Element] = [
        Controls([Choice("reference", "Compare with", options, ["differences"])]),
        Plot("differences", "Paired differences of the methods", PAIRED, height),
    ]

    rows = {title: row for title, row in standings.items() if row.get("difference") is not None}
    heads, cells = statistics.difference_columns(list(rows.values()), number_of(score.percent))
    if rows:
        first, *others = heads
        body = [[title, *line] for title, line in zip(rows, cells, strict=True)]
        headings = ["method", f"{first}, {terms.weighting(score.name)}", *others]
        elements.append(Table(headings, body, TESTED, sortable=True))
    return elements


def effects_section(
    methods: Sequence[Method], panels: Mapping[str, Any], score: Score, reference: str
) -> list[Element]:
    """Returns who is helped and who is hurt, and the plots of single clients; [] without a comparison."""
    number = number_of(score.percent)
    body = []
    for pair in pairs_of(methods, reference):
        effect = gains.Effect.from_scores(pair.scores, score.sign)
        mean, low, high = mean_gain(pair.method, pair.reference, score.sign)
        cells = [pair.method.title, statistics.signed_interval(mean, low, high, number)]
        cells += [share_text(effect.helped), share_text(effect.hurt)]
        if score.percent:
            cells.append(share_text(effect.far))
        cells.append(statistics.signed_text(effect.median, number))
        cells.append(statistics.signed_text(effect.worst, number))
        body.append([*cells, *cosine_cells(pair.method)])
    if not body:
        return []

    headings = ["method", "mean gain, mean over clients", "helped", "hurt"]
    headings += ["lose over 5 points"] if score.percent else []
    headings += ["median gain", "worst client", "cosine within groups", "across"]
    options = {title: title for title in panels["gains"]}
    caption = HELPED.format(reference=reference)
    return [
        Table(headings, body, caption, sortable=True),
        *([Paragraph(UNWEIGHTED)] if terms.is_weighted(score.name) else []),
        Controls([Choice("method", "Method", options, ["gains", "pairs"])]),
        Plot("gains", "Gains of single clients", GAINS.format(reference=reference)),
        Plot(
            "pairs",
            "Scores of single clients with two methods",
            PAIRS.format(reference=reference),
        ),
    ]


def share_text(share: float) -> str:
    """Formats a share in percent."""
    return f"{100 * share:.0f} %"


def mean_gain(method: Method, other: Method, sign: int) -> tuple[float, float, float]:
    """Returns the mean gain of clients over another method, and its interval.

    Runs whose data have no digest do not share their clients.
    """
    data = {}
    for trial, run in zip(method.trials, method.runs, strict=True):
        data[trial] = run.config.get("data", {}).get("digest", trial)
    return gains.mean_gain(method.client_scores, other.client_scores, data, sign)


def cosine_cells(method: Method) -> list[str]:
    """Returns the mean cosines of clients' weights within and across true groups; "-" without either."""
    cosines = []
    for run in method.runs:
        if not (run.chooses and run.knows_groups and run.has_groups):
            return ["-", "-"]
        index = run.used["index"][-1]
        weights = run.used["weights"][-1]
        cosines.append(collaboration.sharing(index, weights, run.group))
    return [f"{mean:.2f}" for mean in np.mean(cosines, axis=0)]


def by_client_section(
    rows: Sequence[Mapping[str, Any]], score: Score, reference: str, links: Sequence[Link]
) -> list[Element]:
    """Returns the table of clients by name; of many, of the worst.

    Args:
        rows: Rows of by_client.json: "client", "num_examples", examples by class in "classes", and by method "scores"
            (mean, deviation, number of runs) and "differences" to the reference.
        score: The score.
        reference: The method that the others are compared with.
        links: Links to the files that have all clients.
    """
    if not rows:
        return []
    shown = list(rows)
    sentences = ["Scores are means ± sample deviations over the runs in which a client appears."]
    if len(rows) > MAX_CLIENTS:
        in_order = sorted(rows, key=lambda row: score.sign * mean_over_methods(row))
        shown = in_order[:WORST_CLIENTS]
        direction = "lowest" if score.sign > 0 else "highest"
        sentences.append(
            f"Of {len(rows):,} clients, these are the {len(shown)} with the {direction} mean over methods."
        )

    # Scores that rest on few examples.
    num_few = sum(is_marked(row, score) for row in rows)
    if num_few:
        clients = f"{num_few:,} of {len(rows):,} clients"
        sentences.append(f"* The scores of {clients} rest on {few_examples(score.name)}.")
    if links:
        sentences.append("All clients:")
    text = Paragraph(" ".join(sentences), links)
    return [client_table(shown, score, reference), text]


def is_marked(row: Mapping[str, Any], score: Score) -> bool:
    """Whether a client's scores rest on few test examples."""
    return rests_on_few(score.name, row.get("num_examples") or 0, row.get("classes") or {})


def client_table(rows: Sequence[Mapping[str, Any]], score: Score, reference: str) -> Table:
    """Returns the table of clients by name: their examples, scores and differences to the reference."""
    number = number_of(score.percent)
    methods = list(dict.fromkeys(name for row in rows for name in row["scores"]))
    compared = list(dict.fromkeys(name for row in rows for name in row.get("differences") or {}))
    counts = {int(summary[2]) for row in rows for summary in row["scores"].values() if summary}
    all_runs = (
        max(counts, default=0) if len(counts) == 1 else 0
    )  # of every cell, which then need not name it
    any_classes = any(row.get("classes") for row in rows)

    body = []
    for row in rows:
        name = str(row["client"])
        if is_marked(row, score):
            name = Marked(name, few_examples(score.name))
        cells: list[Any] = [name, row.get("num_examples")]
        if any_classes:
            cells.append(classes_text(row.get("classes") or {}))
        for method in methods:
            summary = statistics.RunSummary.from_values([])
            if row["scores"].get(method):
                mean, std, runs = row["scores"][method]
                summary = statistics.RunSummary(as_number(mean), as_number(std), int(runs))
            text = summary.text(number)
            cells.append(text.removesuffix(f" ({all_runs})"))
        for method in compared:
            difference = as_number((row.get("differences") or {}).get(method))
            known = math.isfinite(difference)
            cells.append(statistics.signed_text(difference, number) if known else "-")
        body.append(cells)

    unit = ", %" if score.percent else ""
    headings = ["client", "test examples", *(["of each class"] if any_classes else [])]
    headings += [f"{method}{unit}" for method in methods]
    headings += [f"{method} minus {reference}" for method in compared]
    caption = f"Each client's {score.label}. Click a heading to sort."
    return Table(headings, body, caption, sortable=True)


def as_number(value: float | None) -> float:
    """Returns a number; NaN for None."""
    return math.nan if value is None else float(value)


def mean_over_methods(row: Mapping[str, Any]) -> float:
    """Returns a client's score, mean over methods; infinite if it has none."""
    means = [as_number(summary[0]) for summary in row["scores"].values() if summary]
    known = [mean for mean in means if math.isfinite(mean)]
    return sum(known) / len(known) if known else math.inf


def links_to_clients(folders: Sequence[Path], start: Path) -> list[Link]:
    """Returns links to the studies' by_client.csv, seen from a folder."""
    links = []
    for folder in folders:
        path = Path(folder).resolve() / "by_client.csv"
        if path.is_file():
            relative = Path(os.path.relpath(path, start)).as_posix()
            links.append(Link(relative, quote(relative)))
    return links


def runs_section(heads: Mapping[str, str], num_methods: int) -> list[Element]:
    """Returns the plot of each run of each method."""
    height = f"{max(14, 6 + ROW * num_methods):g}rem"
    return [
        Controls([Choice("measure", "Compare by", heads, ["dots"])]),
        Plot("dots", "Each run of each method", POINTS, height),
    ]


def curves_section(methods: Sequence[Method]) -> list[Element]:
    """Returns the plot of each method's scores over rounds or costs."""
    return [
        Controls([Choice("against", "Against", axes_of_curves(methods), ["over"])]),
        Plot("over", "Each method over rounds", BAND),
    ]
