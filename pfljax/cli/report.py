"""Writes the page of a run (report.html), or of a comparison of runs, from what the runs have left in their folders.

    pfljax report DIR...

For the folder of one run it draws the figures and writes the page. For several folders, or one with runs below it such
as that of a comparison, it writes a page of all these runs, which leads to the page of each. Runs are looked for three
levels deep; their own pages are written where they are missing or older than the run.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from absl import flags

from pfljax import report
from pfljax.cli.flags import RUNS, Group
from pfljax.cli.launch import Command
from pfljax.cli.settings import FlagError, Settings


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
        if not report.runs_below(folder):
            raise FlagError(f"{folder}: no finished run is there; accepted: folders with summary.json, or above them")
    if len(folders) == 1 and report.is_run(folders[0]):
        settings.refuse("out", "the page of one run is in its folder")
        print(f"report: {report.write(folders[0])}")
        return
    page = Path(settings.out or (folders[0] if len(folders) == 1 else Path()) / "report.html")
    if page.suffix != ".html":
        raise settings.error("out", "accepted: a file that ends in .html")
    print(f"report: {report.write_comparison(page, folders)}")


COMMAND = Command(__doc__ or "", define, run, devices=None, listed="folder")
