"""Writes the page of a run (report.html), or of a comparison of runs, from the files in the runs' folders.

    pfljax report DIR...

For one run's folder, draws the figures and writes the page. For several folders, or a folder that contains runs (such
as a comparison's), writes a page of all these runs that links to the page of each. Looks for runs up to three levels
deep, and writes their own pages if they are missing or older than the run.

    pfljax report runs/compare --paper=paper

Also writes a comparison's figures for a paper, each as PDF and PNG. Its table in LaTeX is table.tex in its folder.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from absl import flags

from pfljax import report
from pfljax.api import compare
from pfljax.cli.flag_help import HELP
from pfljax.cli.flags import RUNS
from pfljax.cli.launch import Command
from pfljax.cli.parsing import Group
from pfljax.cli.settings import FlagError, Settings
from pfljax.contract.paths import expanded
from pfljax.folder import former


def define(registry: flags.FlagValues) -> None:
    add = Group(RUNS, registry)
    add.repeated("folder", HELP["folder"])
    text = (
        "File of the page. Default: report.html in the folder, or in the current one for several."
    )
    add.add("out", Path, None, text)
    add.declare(compare, "reference")
    add.add("paper", Path, None, HELP["paper"])
    add.add("paper_width", float, 3.3, HELP["paper_width"], above=0)


def read_folders(settings: Settings, command: str) -> list[Path]:
    """Returns the folders that a command is given. Raises `FlagError` if there are none, or if one is no folder."""
    folders = [Path(expanded(folder, "folder")) for folder in settings.folder]
    if not folders:
        raise FlagError(f"give a run's folder: pfljax {command} DIR...")
    for folder in folders:
        if not folder.is_dir():
            code = errno.ENOTDIR if folder.exists() else errno.ENOENT
            raise FlagError(f"{folder}: {os.strerror(code)}")
    return folders


def run(settings: Settings) -> None:
    folders = read_folders(settings, "report")
    for folder in folders:
        if not report.runs_below(folder):
            text = "contains no finished run; accepted: folders with a summary.json, or above one"
            raise FlagError(f"{folder}: {text}")
    if len(folders) == 1 and report.is_run(folders[0]):
        settings.refuse("out", "the page of one run is written to its folder")
        settings.refuse("reference", "the page of one run compares no methods")
        settings.refuse("paper", "the figures of one run are in its folder, figures/")
        print(f"report: {report.write(folders[0])}")
        return
    if settings.paper and (len(folders) > 1 or not (folders[0] / "table.json").is_file()):
        raise settings.error(
            "paper", "accepted for the folder of one comparison, which has a table.json"
        )
    folder = folders[0] if len(folders) == 1 else Path()
    page = Path(settings.out or folder / "report.html")
    if page.suffix != ".html":
        raise settings.error("out", "accepted: a file that ends in .html")
    print(f"report: {report.write_comparison(page, folders, reference=settings.reference)}")
    if settings.paper:
        rows = former.read_table(folders[0] / "table.json")
        figures = report.save_figures(rows, Path(settings.paper), settings.paper_width)
        names = [str(path) for path in figures if path.suffix == ".pdf"]
        print(f"figures: {', '.join(names)}, and .png")


COMMAND = Command(__doc__ or "", define, run, devices=None, listed="folder")
