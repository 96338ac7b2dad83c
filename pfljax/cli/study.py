"""The folder of a scaling study. Its finished rows are kept across runs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import jax

from pfljax import report
from pfljax.cli import build
from pfljax.cli.measure import MEASURES, Cell, described_data
from pfljax.cli.settings import Settings

# Flags that may differ between runs that share a folder: those that span the grid, and those that change no cell.
from pfljax.folder import files
from pfljax.training import describe

# Flags that may differ between runs that share a folder: those that span the grid, and those that change no cell.
FREE = (
    *("algorithms", "num_clients", "cohort", "plan", "chunk", "devices", "out", "preset", "total_rounds"),
    *("participation", "fine_tune_epochs", "coordinator", "process_id", "profile"),
)


class Study:
    """The rows of a study's folder."""

    def __init__(self, settings: Settings):
        """Reads the folder.

        Raises:
            FlagError: if it contains something else, or a study with other settings.
        """
        self.settings, self.out = settings, Path(settings.out)
        self.rows: dict[Cell, dict] = {}
        path = self.out / "scaling.json"
        if not path.exists():
            if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
                raise settings.error("out", "contains something other than a scaling study; choose a new folder")
            return
        try:
            before = files.read_json(path)
            old, rows = {**before["settings"]}, {Cell(*(row[n] for n in Cell._fields)): row for row in before["cells"]}
        except (ValueError, TypeError, KeyError) as error:
            text = "contains a scaling.json that is damaged or from an earlier version; choose a new folder"
            raise settings.error("out", text) from error
        if any(not {"status", *MEASURES} <= {*row} for row in rows.values()):
            raise settings.error("out", "contains a scaling study from an earlier version; choose a new folder")
        new = files.plain(self.common())
        changed = [f"{k} was {old[k]!r} and is {v!r}" for k, v in new.items() if k in old and old[k] != v]
        if changed:
            raise settings.error("out", f"was measured with other settings: {'; '.join(changed)}; choose a new folder")
        self.rows = rows

    def common(self) -> dict:
        """Returns what the cells of a study have in common."""
        same = {f"--{name}": value for name, value in self.settings.values.items() if name not in FREE}
        return same | {"jax": jax.__version__, "device": jax.local_devices()[0].device_kind}

    def finished(self, cell: Cell) -> bool:
        """Whether the cell was already measured."""
        return cell in self.rows and self.rows[cell]["status"] == "measured"

    def lines(self) -> Iterator[tuple[str, list[dict]]]:
        """Groups the measured rows that differ only in K; names each group by its method and what else differs."""
        measured = [row for row in self.rows.values() if row["status"] == "measured"]
        differ = [name for name in ("cohort", "plan", "devices") if len({row[name] for row in measured}) > 1]
        words = {"cohort": lambda n: f"S={n or 'K'}", "plan": str, "devices": lambda n: f"{n} device(s)"}
        named = lambda row: ", ".join([row["algorithm"], *(words[name](row[name]) for name in differ)])
        for name in dict.fromkeys(map(named, measured)):
            own = [row for row in measured if named(row) == name]
            kept = (
                total_bytes if self.settings.client_store == "device" else lambda row: row["peak_resident_bytes"] or 0
            )
            yield name, [row | {"memory_bytes": kept(row)} for row in own]

    def write(self) -> None:
        """Writes scaling.json and scaling.csv."""
        total = self.settings.total_rounds
        for row in self.rows.values():
            if row["status"] == "measured":
                row["projected_hours"] = row["seconds_per_round"] * total / 3600 if total else None
        rows = list(self.rows.values())
        fitted = {
            name: {
                what: report.slope([row["num_clients"] for row in own], [row[key] for row in own])
                for what, key in (("time", "seconds_per_round"), ("memory", "memory_bytes"))
            }
            for name, own in self.lines()
        }
        config = {"flags": dict(sorted(self.settings.values.items())), "command": build.command()}
        content = {
            "config": config | describe.environment(),
            "settings": self.common(),
            "data": described_data(self.settings),
            "slopes": fitted,
            "cells": rows,
        }
        files.write_json(self.out / "scaling.json", content)
        text = io.StringIO()
        writer = csv.DictWriter(text, ["status", "reason", *Cell._fields, *MEASURES], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        files.write_text(self.out / "scaling.csv", text.getvalue())


def total_bytes(row: dict) -> int:
    """Returns the bytes that a round needs on a device."""
    return row["argument_bytes"] + row["output_bytes"] + row["temporary_bytes"]
