"""Writes the page of a run (report.html), or of a comparison of runs, from what the runs have left in their folders.

    pfljax report DIR...

For the folder of one run it draws the figures and writes the page. For several folders, or one with runs below it such
as that of a comparison, it writes a page of all these runs, which leads to the page of each. Runs are looked for three
levels deep; their own pages are written where they are missing or older than the run.
"""

from __future__ import annotations

import errno
import os
import zipfile
from pathlib import Path

from absl import flags

from pfljax import report
from pfljax.cli.flags import RUNS, Group
from pfljax.cli.launch import Command
from pfljax.cli.settings import FlagError, Settings
from pfljax.core.errors import RunError
from pfljax.training import files


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    add = Group(RUNS, registry)
    add.repeated("folder", "a run, or a folder with runs below it; the flag's name may be left out")
    add.text("out", None, "page of the comparison; report.html in the folder, or in the current one for several")


def run(settings: Settings) -> None:
    """The command."""
    folders = [Path(folder) for folder in settings.folder]
    if not folders:
        raise FlagError("name a run's folder: pfljax report DIR...")
    for folder in folders:
        if not folder.is_dir():
            raise FlagError(f"{folder}: {os.strerror(errno.ENOTDIR if folder.exists() else errno.ENOENT)}")
        runs = report.runs_below(folder)
        if not runs:
            raise FlagError(f"{folder}: no finished run is there; accepted: folders with summary.json, or above them")
        for path in runs:
            check(path)
    if len(folders) == 1 and report.is_run(folders[0]):
        settings.refuse("out", "the page of one run is in its folder")
        print(f"report: {report.write(folders[0])}")
        return
    page = Path(settings.out or (folders[0] if len(folders) == 1 else Path()) / "report.html")
    if page.suffix != ".html":
        raise settings.error("out", "accepted: a file that ends in .html")
    print(f"report: {report.write_comparison(page, folders)}")


def check(folder: Path) -> None:
    """Reads what a page needs of a run.

    Raises:
        RunError: if that is not there, or damaged.
    """
    try:
        plots = report.Plots.read(folder)
        files.read_json(folder / "config.json")
        _ = plots.summary["algorithm"], plots.summary["last"]["round"], plots.test
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise RunError(f"{folder}: the run's files are damaged, or not those of a run: {error}") from error


COMMAND = Command(__doc__ or "", define, run, devices=None, listed="folder")
