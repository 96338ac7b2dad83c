"""The page of a comparison. It shows several runs and links to each run's own page."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from pfljax.contract import processes
from pfljax.evaluation import collaboration, gains, statistics
from pfljax.folder import files, former, planned
from pfljax.report import terms
from pfljax.report.comparisons import (
    client_gains,
    client_pairs,
    difference_points,
    method_curves,
    method_points,
    spent_axis,
)
from pfljax.report.markup import (
    Raw,
    cells,
    choice,
    controls,
    document,
    downloads,
    paragraph,
    plot,
    table,
    text,
)
from pfljax.report.page import NAME, write_page
from pfljax.report.picture import Axis, plain
from pfljax.report.pictures import axis_of
from pfljax.report.run_data import BYTES, RunData, Score, evenly, measures, number_of, over_rounds

TRIAL = re.compile(r"(?:split-(\d+)-)?seed-(\d+)$")  # names of the folders of one method's runs
DEPTH = 3  # OUT/GROUP/METHOD/seed-N
MAX_ROUNDS = 300  # per curve

SCORES = ("score", "decile")  # measures of clients' scores
COSTS = {"megabytes": terms.MEGABYTES, "seconds": "seconds per round", "gradients": terms.GRADIENTS}
AGAINST = {
    "rounds": "rounds",
    "megabytes": "MB received and sent per client",
    "seconds": "seconds of training",
}
AGAINST |= {"simulated": "simulated seconds"}
POINTS = "One point per run, a line at the mean. Click a point for its page."
BAND = (
    "Mean over runs; the band is one sample deviation over runs if there are several. Click a method in the legend to "
    "hide it."
)
PAIRED = "Means of the paired differences, with 95 % intervals. Positive: the score is higher than the other's."
TESTED = "Mean difference and 95 % interval, p of a sign-flip test, and in how many units the method is better."
MAX_POINTS = 1000  # clients of a panel
HELPED = (
    "Each client of each run counts once. Helped and hurt: shares of those whose score is better or worse than with "
    "{reference}. Mean gain: the plain mean over clients, with the 95 % t interval, whose gains are first averaged "
    "over the runs on the same data. Cosines are of clients' weights, within and across true groups, means over runs."
)
GAINS = "What single clients gain over {reference}, from the largest gain to the smallest."
PAIRS = "Each point is a client of a run: its scores with {reference} and with the method, equal on the dashed line."
LATE = (
    "The trend is that of the last quarter of the rounds. A line is fitted to each run's scores; there is a trend if "
    "the 95 % interval of the mean change excludes 0. It needs three evaluations and two runs."
)
DOWNLOADS = {"runs": "Runs (CSV)", "curves": "Curves (CSV)"}


class Method(NamedTuple):
    """The finished runs of one method.

    Attributes:
        title: The folder above those of seeds and splits.
        runs: The runs.
        names: Their names within the title.
        links: Addresses of their pages.
        trials: Their seeds and splits.
        measures: Measures of their last rounds, by name; NaN if unknown. Shape (runs,).
        curves: Rounds that all of them evaluated, and score, megabytes and seconds up to them. Shape (runs, T).
        place: Its place in the comparison's table, which is that of its color; 0 without a table.
        tuned: The values that tuning chose, in words.
    """

    title: str
    runs: Sequence[RunData]
    names: Sequence[str]
    links: Sequence[str]
    trials: Sequence[statistics.Trial]
    measures: Mapping[str, np.ndarray]
    curves: Mapping[str, np.ndarray]
    place: int
    tuned: str

    @property
    def group(self) -> str:
        """The folder above the method's. Methods of one group are compared."""
        return self.title.rpartition("/")[0]

    @property
    def name(self) -> str:
        """The method's own folder."""
        return self.title.rpartition("/")[2]

    @property
    def of_clients(self) -> dict[statistics.Trial, np.ndarray]:
        """Clients' last scores (K,) by trial."""
        return {trial: run.test[-1] for trial, run in zip(self.trials, self.runs, strict=True)}

    @property
    def scores(self) -> dict[statistics.Trial, float]:
        """Scores by trial."""
        return dict(zip(self.trials, self.measures["score"].tolist(), strict=True))


def is_run(folder: Path) -> bool:
    """Whether a folder contains a finished run."""
    return (folder / "summary.json").is_file() and (folder / "results.npz").is_file()


def runs_below(folder: Path) -> list[Path]:
    """Returns the folders of finished runs at most `DEPTH` levels below a folder, or the folder itself if it is a run.

    The depth is limited because a page is written for each run, and a whole disk must not be searched by mistake.
    Tuning runs are left out.
    """
    if is_run(folder):
        return [folder]
    return sorted(filter(is_run, folders_with("summary.json", folder)))


def folders_with(name: str, folder: Path) -> list[Path]:
    """Returns the folders one to `DEPTH` levels below a folder that have a file of this name, without tuning runs."""
    found = [
        path.parent for depth in range(1, DEPTH + 1) for path in folder.glob("*/" * depth + name)
    ]
    return [path for path in found if "tuning" not in path.relative_to(folder).parts]


def title_of(path: Path, root: Path) -> tuple[str, str]:
    """Returns a run's title and its name within it, from its path below a folder; "" for what the path does not say."""
    parts = path.relative_to(root).parts
    trial = bool(parts and TRIAL.match(parts[-1]))
    return "/".join(parts[:-1] if trial else parts), parts[-1] if trial else ""


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
    found = list(_read(folders))
    if not found or not processes.is_first():
        return page if found else None
    failed = {
        name: reason for folder in folders for name, reason in _failures(Path(folder)).items()
    }
    reference = None if reference in failed else reference
    reference = statistics.found_reference(
        reference, {title.rpartition("/")[2]: run.summary["method"] for _, title, _, run in found}
    )
    for folder, *_ in found:
        own = folder / NAME
        if not own.exists() or own.stat().st_mtime < (folder / "summary.json").stat().st_mtime:
            write_page(folder)
    methods = _methods(found, page.parent.resolve())
    runs = [run for *_, run in found]
    score = runs[0].score
    dataset = runs[0].summary["dataset"]
    own = {name: name.replace("_", " ") for run in runs for name in run.summary.get("metrics", ())}
    own.pop(score.name, None)
    names = (
        {"score": score.label}
        | ({"decile": "bottom decile"} if score.name != "loss" else {})
        | own
        | COSTS
    )
    texts = {
        link: f"{m.title}, {name}"
        for m in methods
        for link, name in zip(m.links, m.names, strict=True)
    }
    alone = [method.name for method in methods if not method.measures["megabytes"].any()]
    reference = reference or next(iter(alone), methods[0].name)
    standing = _standings(methods, score, reference)
    panels = _panels(methods, names, score, reference)
    data = {"panels": panels, "texts": texts, "csv": _csv(methods, names, score)}
    points = plot("dots", "Each run of each method", POINTS, f"{max(14, 6 + 2 * len(methods))}rem")
    curves = plot("over", "Each method over rounds", BAND)
    parts = {
        "Methods": _table(methods, names, score, standing)
        + _warnings(runs)
        + _told_failures(failed),
        "Differences": _differences(panels["differences"], standing, score),
        "Clients": _clients(methods, panels, score, reference),
        "Runs": controls(choice("measure", "Compare by", names, "dots")) + points,
        "Curves": controls(choice("against", "Against", against(methods), "over")) + curves,
        "Download": downloads(DOWNLOADS),
    }
    lead = f"{len(methods)} methods, {len(found)} runs"
    files.write_text(
        page, document(title or f"Comparison on {dataset}", lead, parts, files.plain(data))
    )
    return page


def _read(folders: Iterable[Path]) -> Iterable[tuple[Path, str, str, RunData]]:
    """Reads the runs: folder, title, name, content. Titles are the parts of their paths that differ."""
    paths = list(
        dict.fromkeys(path.resolve() for folder in folders for path in _runs_of(Path(folder)))
    )
    root = Path(
        os.path.commonpath([path.parent if len(paths) == 1 else path for path in paths] or ["/"])
    )
    for path in paths:
        (title, name) = title_of(path, root)
        run = RunData.read(path)
        yield (
            path,
            title or str(run.summary["method"]),
            name or f"seed-{run.summary.get('seed', 0)}",
            run,
        )


def _runs_of(folder: Path) -> list[Path]:
    """Returns the runs below a folder; of a study's, those of its present table, without methods that failed."""
    runs = runs_below(folder)
    listed = {path.resolve() for path in planned.read(folder)}
    if listed:
        runs = [run for run in runs if run.resolve() in listed]
    failed = {(folder / name).resolve() for name in _failures(folder)}
    return [run for run in runs if run.resolve().parent not in failed]


def _failures(folder: Path) -> dict[str, str]:
    """Returns why methods of a study's table failed, by title; {} without a table."""
    try:
        rows = former.read_table(folder / "table.json")
        return {str(row["method"]): str(row["failed"]) for row in rows if row.get("failed")}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _told_failures(failed: Mapping[str, str]) -> str:
    """Returns a paragraph on methods that failed."""
    return paragraph(" ".join(f"{name} failed: {reason}." for name, reason in failed.items()))


def _methods(found: Sequence[tuple[Path, str, str, RunData]], start: Path) -> list[Method]:
    """Groups the runs by title, the best mean score first. Links lead from the folder `start`."""

    def link(folder):
        return quote(os.path.relpath(folder / NAME, start).replace(os.sep, "/"))

    methods = []
    for title in dict.fromkeys(title for _, title, *_ in found):
        paths, _, names, runs = zip(*(entry for entry in found if entry[1] == title), strict=True)
        last = measures([run.summary for run in runs])
        trials = list(map(_trial, names))
        listed = _listed(paths[0].parent)
        methods.append(
            Method(title, runs, names, list(map(link, paths)), trials, last, _curves(runs), *listed)
        )
    return sorted(
        methods, key=lambda m: -m.runs[0].score.sign * np.nan_to_num(np.mean(m.measures["score"]))
    )


def _listed(folder: Path) -> tuple[int, str]:
    """Returns the place of a folder's method in its comparison's table.json, and what tuning chose; 0, "" if absent."""
    try:
        rows = enumerate(former.read_table(folder.parent / "table.json"))
        found = (
            (place, str(row.get("tuned") or ""))
            for place, row in rows
            if row["method"] == folder.name
        )
        return next(found, (0, ""))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return 0, ""


def _trial(name: str) -> statistics.Trial:
    """Returns seed and split of a run, from its name."""
    split, seed = TRIAL.match(name).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return statistics.Trial(int(seed), None if split is None else int(split))


def _standings(
    methods: Sequence[Method], score: Score, reference: str
) -> dict[str, dict[str, Any]]:
    """Returns intervals, ranks and differences by title, within each group."""
    found = {}
    for group in dict.fromkeys(method.group for method in methods):
        own = {method.title: method.scores for method in methods if method.group == group}
        found |= statistics.standings(
            own, score.sign, f"{group}/{reference}" if group else reference
        )
    return found


def against(methods: Sequence[Method]) -> dict[str, str]:
    """Returns what all methods' curves can be drawn against, by name; simulated time takes a clock."""
    return {
        name: label
        for name, label in AGAINST.items()
        if all(name in method.curves for method in methods)
    }


def _curves(runs: Sequence[RunData]) -> dict[str, np.ndarray]:
    def entry(name):
        return over_rounds([run.rows for run in runs], name)

    rounds, score = entry(runs[0].score.name)
    curves = {
        "rounds": np.tile(rounds, (len(runs), 1)),
        "score": score,
        "seconds": np.nan_to_num(entry("seconds")[1]),
    }
    if np.isfinite(clock := entry("simulated_seconds")[1]).all():
        curves["simulated"] = clock
    curves["megabytes"] = np.sum([np.nan_to_num(entry(name)[1]) for name in BYTES], axis=0) / 1e6
    return {name: values[:, evenly(len(rounds), MAX_ROUNDS)] for name, values in curves.items()}


def _panels(
    methods: Sequence[Method], names: Mapping[str, str], score: Score, reference: str
) -> dict[str, dict[str, Any]]:
    """Returns the panels of points by measure, of differences by reference, and of curves by horizontal axis."""
    links = {method.title: method.links for method in methods}
    dots = {}
    over = {}
    # so that colors are those of the figures for papers
    listed = sorted(methods, key=lambda method: method.place)
    for name, label in names.items():
        axis = Axis(label, percent=score.percent and name in SCORES)
        dots[name] = plain(
            method_points({method.title: method.measures[name] for method in listed}, axis, links)
        )
    for name, label in against(methods).items():
        mean = {m.title: (m.curves[name].mean(axis=0), m.curves["score"]) for m in listed}
        curves = {
            title: (x, values.mean(axis=0), statistics.deviation(values))
            for title, (x, values) in mean.items()
        }
        axis = (
            Axis(label)
            if name == "rounds"
            else spent_axis(label, [at for at, *_ in curves.values()])
        )
        over[name] = plain(method_curves(curves, axis, axis_of(score)))
    return (
        {"dots": dots, "over": over}
        | _of_pairs(methods, score, reference)
        | _of_clients(methods, score, reference)
    )


def _of_pairs(methods: Sequence[Method], score: Score, reference: str) -> dict[str, Any]:
    """Returns the panels of "differences" by the method that the others of its group are compared with.

    `reference` comes first. Panels without intervals are left out.
    """
    found = {}
    scale = 100 if score.percent else 1
    for to in sorted(methods, key=lambda method: method.name != reference):
        others = [method for method in methods if method.group == to.group and method is not to]
        gains = {
            method.title: scale * statistics.paired(method.scores, to.scores) for method in others
        }
        known = {
            title: (each.mean(), *statistics.interval(each))
            for title, each in gains.items()
            if len(each) > 1
        }
        label = f"{score.label} minus {to.title}'s" + ", percentage points" * score.percent
        if known:
            found[to.title] = plain(difference_points(known, Axis(label)))
    return {"differences": found}


def _of_clients(methods: Sequence[Method], score: Score, reference: str) -> dict[str, Any]:
    """Returns the panels of single clients' "gains" over their group's reference, and of "pairs" of both scores."""
    bars = {}
    points = {}
    for method, to, pairs in _compared(methods, reference):
        shown = pairs[np.argsort(score.sign * (pairs[:, 0] - pairs[:, 1]), kind="stable")]
        shown = shown[evenly(len(shown), MAX_POINTS)]

        def axis(label):
            return Axis(label, percent=score.percent)

        gained = score.sign * (shown[:, 1] - shown[:, 0])
        bars[method.title] = plain(
            client_gains(gained, axis(f"{method.title}'s gain, {score.label}"))
        )
        names = (f"{score.label}, {title}" for title in (to.title, method.title))
        points[method.title] = plain(client_pairs(shown, *map(axis, names)))
    return {"gains": bars, "pairs": points}


def _compared(
    methods: Sequence[Method], reference: str
) -> Iterable[tuple[Method, Method, np.ndarray]]:
    """Yields each method that has clients in common with the reference of its group, that, and both scores (n, 2)."""
    of_group = {method.group: method for method in methods if method.name == reference}
    for method in methods:
        to = of_group.get(method.group, method)
        pairs = gains.pairs(method.of_clients, to.of_clients)
        if to is not method and len(pairs):
            yield method, to, pairs


def _csv(methods: Sequence[Method], names: Mapping[str, str], score: Score) -> dict[str, list]:
    """Returns the tables for downloading."""
    runs = []
    curves = []
    for method in methods:
        for number, name in enumerate(method.names):
            run = {"method": method.title, "run": name}
            runs.append(run | {label: method.measures[key][number] for key, label in names.items()})
            points = zip(
                method.curves["rounds"][number].astype(int),
                method.curves["score"][number],
                strict=True,
            )
            curves += [run | {"round": at, score.name: value} for at, value in points]
    return {"runs": cells(runs), "curves": cells(curves)}


def _table(
    methods: Sequence[Method],
    names: Mapping[str, str],
    score: Score,
    standing: Mapping[str, Mapping[str, Any]],
) -> str:
    """Returns a table with one row per method, and what its deviations, intervals and ranks rest on."""
    head, *heads = names.values()
    rows = [standing[method.title] for method in methods]
    more, ranked = statistics.interval_columns(rows, number_of(score.percent))
    body = []
    tuned = any(method.tuned for method in methods)
    for method, own in zip(methods, ranked, strict=True):
        links = zip(method.links, method.names, strict=True)
        addresses = ", ".join(f'<a href="{text(link)}">{text(name)}</a>' for link, name in links)
        runs = Raw(f'<span class="links">{addresses}</span>')
        first, *rest = (_mean(name, method.measures[name], score) for name in names)
        late = gains.trend(method.curves["rounds"][0].tolist(), method.curves["score"])
        knows = method.runs[0].summary.get("knows") or "-"
        # lines break at commas
        values = text(method.tuned or "-").replace(" ", "&nbsp;").replace(",&nbsp;", ", ")
        chosen = [Raw(f'<span class="wrap">{values}</span>')] * tuned
        body.append(
            [method.title, first, *own, late.verdict(score.sign), *rest, *chosen, knows, runs]
        )
    heads = ["method", head, *more, "trend", *heads, *["tuned"] * tuned, terms.KNOWS, "runs"]
    caption = f"Means over runs{', accuracies in percent' * score.percent}. {terms.BUDGET} Click a heading to sort."
    edge = any(terms.EDGE in method.tuned for method in methods)
    lower = terms.LOWER * (score.sign < 0)
    said = f"{lower} {statistics.told([*standing.values()])} {LATE} {terms.AT_EDGE * edge}"
    return table(heads, body, "sortable", caption) + paragraph(said.strip())


def _differences(
    panels: Mapping[str, Any], standing: Mapping[str, Mapping[str, Any]], score: Score
) -> str:
    """Returns the plot of paired differences, and the table of those to the reference; "" without intervals."""
    if not panels:
        return ""
    rows = {title: row for title, row in standing.items() if row.get("difference") is not None}
    heads, body = statistics.difference_columns([*rows.values()], number_of(score.percent))
    lines = [[title, *cells] for title, cells in zip(rows, body, strict=True)]
    options = controls(
        choice("reference", "Compare with", {title: title for title in panels}, "differences")
    )
    height = f"{max(12, 6 + 2 * len(standing))}rem"
    drawn = options + plot("differences", "Paired differences of the methods", PAIRED, height)
    return drawn + (table(["method", *heads], lines, "sortable", TESTED) if lines else "")


def _clients(
    methods: Sequence[Method], panels: Mapping[str, Any], score: Score, reference: str
) -> str:
    """Returns the table of who is helped and who is hurt, and the plots of single clients; "" without a comparison."""
    number = number_of(score.percent)
    body = []

    def share(value):
        return f"{100 * value:.0f} %"

    for method, to, pairs in _compared(methods, reference):
        gained = statistics.signed_interval(*_mean_gain(method, to, score.sign), number)
        effect = gains.Effect.of(score.sign * (pairs[:, 1] - pairs[:, 0]))
        far = [share(effect.far)] * score.percent
        signed = [statistics.signed_text(value, number) for value in (effect.median, effect.worst)]
        shares = [share(effect.helped), share(effect.hurt), *far]
        body.append([method.title, gained, *shares, *signed, *_cosines(method)])
    if not body:
        return ""
    heads = ["method", "mean gain", "helped", "hurt", *["lose over 5 points"] * score.percent]
    heads += ["median gain", "worst client", "cosine within groups", "across"]
    options = controls(
        choice("method", "Method", {title: title for title in panels["gains"]}, "gains", "pairs")
    )
    bars = plot("gains", "Gains of single clients", GAINS.format(reference=reference))
    points = plot(
        "pairs", "Scores of single clients with two methods", PAIRS.format(reference=reference)
    )
    return (
        table(heads, body, "sortable", HELPED.format(reference=reference)) + options + bars + points
    )


def _mean_gain(method: Method, to: Method, sign: int) -> tuple[float, float, float]:
    """Returns the mean gain of clients over another method, and its interval; runs without a digest stand alone."""
    data = {
        t: run.config.get("data", {}).get("digest", t)
        for t, run in zip(method.trials, method.runs, strict=True)
    }
    return gains.mean_gain(method.of_clients, to.of_clients, data, sign)


def _cosines(method: Method) -> list[str]:
    """Returns the mean cosines of clients' weights within and across true groups; "-" without either."""
    told = [run for run in method.runs if run.chooses and run.knows_groups and run.has_groups]
    if len(told) < len(method.runs):
        return ["-", "-"]
    used = [(run.used["index"][-1], run.used["weights"][-1], run.group) for run in told]
    return [
        f"{value:.2f}" for value in np.mean([collaboration.sharing(*each) for each in used], axis=0)
    ]


def _mean(name: str, values: np.ndarray, score: Score) -> str:
    of_runs = statistics.OfRuns.of(values)
    return (
        of_runs.text(number_of(score.percent))
        if name in SCORES
        else f"{of_runs.mean:.3g}"
        if of_runs.runs
        else "-"
    )


def _warnings(runs: Sequence[RunData]) -> str:
    """Returns a paragraph on differences that make the runs not directly comparable."""
    said = []
    for word, of in (
        ("data", lambda run: run.summary["dataset"]),
        ("the number of clients", lambda run: run.summary["num_clients"]),
        ("the last round", lambda run: run.summary["last"]["round"]),
    ):
        values = list(dict.fromkeys(map(of, runs)))
        if len(values) > 1:
            said.append(f"The runs differ in {word}: {', '.join(map(str, values))}.")
    return paragraph(" ".join(said))
