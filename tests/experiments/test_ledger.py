"""The ledger: what an entry is, the tables made of it, what is stale, and the papers' scoreboard."""

import copy
import datetime
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
import toys

from experiments.ledger import entries, programs, scoreboard, stale, tables
from experiments.ledger.__main__ import main
from experiments.ledger.entries import ROOT, Column, Value
from pfljax.algorithms import METHODS, fedprox
from pfljax.data import partitions

GIVEN = {
    "title": "A table",
    "command": "pfljax compare",
    "commit": "abc1234",
    "published_in": None,
    "date": "2026-11-22",
    "machine": "2 CPU cores",
    "versions": {"Python": "3.11.7"},
    "methods": ["local", "fedavg"],
    "columns": [{"head": "accuracy", "n": 4, "population": True}, {"head": "rate"}],
    "rows": [
        {"name": "local", "title": "Local", "cells": ["80.0 ± 1.5", "0.1"]},
        {"name": "fedavg", "title": "FedAvg", "cells": ["90.0 ± 2.0 (4.6)", "1"]},
    ],
    "runs": None,
}
ACCURACIES = {"local": [0.5, 0.7, 0.6], "federico": [0.9, 0.6, 0.9]}


def of_runs():
    """An entry whose runs were kept."""
    runs = [
        {"row": row, "column": "D2", "split": 0, "seed": seed, "accuracy": accuracy}
        for row, several in ACCURACIES.items()
        for seed, accuracy in enumerate(several)
    ]
    column = {"head": "D=2", "of": "D2", "figure": "accuracy", "lead": "federico"}
    column["paper"] = "federico.TABLE1.cifar10.{row}.D2"
    rows = [{"name": name, "title": name} for name in ACCURACIES]
    return GIVEN | {"columns": [column], "rows": rows, "runs": runs}


@pytest.fixture
def root(tmp_path):
    """A repository of one entry and one page."""
    entries.write("one", entries.made(GIVEN), tmp_path)
    page = tmp_path / tables.PAGES / "page.md"
    page.write_text(
        "# Page\n\n<!-- ledger: one -->\n<!-- /ledger -->\n\n<!-- ledger: scoreboard -->\n<!-- /ledger -->\n"
    )
    return tmp_path


def test_the_tables_of_the_results_are_those_of_the_ledger(capsys):
    assert main(["check"]) == 0, capsys.readouterr().out


def test_the_files_of_the_ledger_are_as_the_ledger_writes_them():
    for name, entry in entries.read().items():
        assert (ROOT / entries.DATA / f"{name}.json").read_text() == entries.text(entry), name


def test_a_deviation_in_the_text_says_its_n():
    """Outside the tables; each paragraph or item of a list says the number of runs."""
    for path in (ROOT / tables.PAGES).glob("*.md"):
        if path.name != "index.md":  # which says what ± is
            for part in re.split(r"\n\n|\n(?=- )", tables.MARKED.sub("", path.read_text())):
                assert not entries.SPREAD.search(part) or "n = " in part, f"{path.name}: {part}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"colour": 1}, "unknown or missing keys: colour"),
        ({"commit": None}, "either commit or published_in"),
        ({"published_in": "abc1234"}, "either commit or published_in"),
        ({"date": "yesterday"}, "YYYY-MM-DD"),
        ({"columns": [{"head": "accuracy"}, {"head": "rate"}]}, "n above 1"),
        ({"columns": [{"head": "accuracy", "n": 4}]}, "2 cells for 1 columns"),
        ({"columns": [{"head": "rate", "n": 4}, {"head": "rate"}]}, "two columns have one head"),
        ({"rows": [GIVEN["rows"][0]] * 2}, "two rows have one name"),
        ({"columns": [{"head": "rate", "figure": "loss"}], "rows": []}, "no run has loss"),
    ],
)
def test_anything_else_than_an_entry_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        entries.made(GIVEN | change)


def test_a_missing_key_is_refused_with_the_file(root, capsys):
    path = root / entries.DATA / "one.json"
    path.write_text(json.dumps({key: value for key, value in GIVEN.items() if key != "machine"}))
    assert main(["check"], root) == 1
    assert "one.json: Entry with unknown or missing keys: machine" in capsys.readouterr().err


def test_check_finds_an_edited_cell(root, capsys):
    assert main(["check"], root) == 1  # not written yet
    assert main(["write"], root) == 0
    assert main(["check"], root) == 0
    page = root / tables.PAGES / "page.md"
    there = page.read_text()
    capsys.readouterr()
    page.write_text(there.replace("| Local | 80.0", "| Local | 81.0"))
    assert main(["check"], root) == 1
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 2 and all(line.startswith("docs/results/page.md") for line in told)
    assert "81.0" in told[0] and "80.0" in told[1]
    assert main(["write"], root) == 0
    assert page.read_text() == there


def test_check_finds_entries_without_a_page_and_pages_without_an_entry(root, capsys):
    (root / entries.DATA / "one.json").rename(root / entries.DATA / "two.json")
    assert main(["check"], root) == 1
    told = capsys.readouterr().out
    assert "no entry is called one" in told and "two.json: no page shows it" in told


def test_a_published_deviation_becomes_that_of_a_sample():
    """s sqrt(n / (n - 1)) is NumPy's ddof = 1 for ddof = 0."""
    four = np.array([78.0, 79.5, 80.5, 82.0])
    assert entries.sample(four.std(), 4) == pytest.approx(four.std(ddof=1))
    made = tables.table(entries.made(GIVEN))
    assert "accuracy, n = 4 |" in made and "rate |" in made
    assert f"| Local | 80.0 ± {1.5 * np.sqrt(4 / 3):.1f} | 0.1 |" in made
    assert f"| FedAvg | 90.0 ± {2 * np.sqrt(4 / 3):.1f} (4.6) | 1 |" in made


def test_a_sample_deviation_stays_as_it_is():
    raw = GIVEN | {"columns": [{"head": "accuracy", "n": 4}, {"head": "rate"}]}
    assert "| Local | 80.0 ± 1.5 | 0.1 |" in tables.table(entries.made(raw))


def test_a_table_of_runs_has_means_sample_deviations_leads_and_the_papers_values():
    entry = entries.made(of_runs())
    made = tables.table(entry)
    local, best = (100 * np.array(values) for values in ACCURACIES.values())
    assert (
        f"| local | {local.mean():.1f} ± {local.std(ddof=1):.1f} | 40.1 | {(best - local).mean():+.1f} (2 of 3) |"
        in made
    )
    assert f"| federico | {best.mean():.1f} ± {best.std(ddof=1):.1f} | 56.6 |  |" in made
    assert made.startswith("|  | D=2, n = 3 | paper, CIFAR-10 | federico above |")
    assert "not kept" not in tables.block("one", entry) and "not kept" in tables.block(
        "one", entries.made(GIVEN)
    )


def test_a_cell_with_fewer_runs_says_so():
    raw = of_runs()
    raw["runs"] = raw["runs"][1:]
    made = tables.table(entries.made(raw))
    assert "(n = 2)" in made.splitlines()[2] and "(n = " not in made.splitlines()[3]


def test_the_papers_values_are_found_by_the_names_of_folders():
    find = tables.papers_value
    assert find("federico.TABLE1.cifar10.{row}.D3", "fedem") == 55.08
    assert find("fedfomo.TABLE1.mnist.{row}.1.0", "fedfomo-n5") == 98.81
    assert find("fedem.TABLE2.synthetic.{row}.1", "fedavg") == 58.9
    assert find("federico.TABLE1.cifar10.{row}.2", "scaffold") is None


def test_orders_hold_differ_or_tie():
    """Ours a > b > c = d; the paper has a > b, but c above both, and d far below."""
    ours = [Value(90), Value(80), Value(70), Value(70.2)]
    pairs = list(zip(ours, [50, 40, 60, 10], strict=True))
    assert scoreboard.counted(pairs) == {"hold": 3, "differ": 2, "tie": 1}
    # a tie in the paper's values counts as one too
    assert scoreboard.counted([(Value(90), 50), (Value(80), 50.4)]) == {
        "hold": 0,
        "differ": 0,
        "tie": 1,
    }


def test_a_difference_of_half_a_point_is_no_tie_whatever_the_rounding():
    """In floating point, 16.4 - 15.9 is less than 0.5, and 82.8 - 82.3 is 0.5."""
    assert scoreboard.order(Value(16.4), Value(15.9)) == 1
    assert scoreboard.order(Value(82.8), Value(82.3)) == 1


def test_equal_runs_are_no_lead_whatever_the_last_digit():
    """Figures of runs have six digits; scores that differ by 1e-9 may be rounded to different ones."""
    raw = of_runs()
    for run, accuracy in zip(raw["runs"], [0.5, 0.7, 0.6, 0.500001, 0.7, 0.61], strict=True):
        run["accuracy"] = accuracy
    assert "+0.3 (1 of 3) |" in tables.table(entries.made(raw))


def test_deviations_make_ties():
    """Two standard errors of a difference of 3 with s = 4: 2 sqrt(16 / n + 16 / n) is 4.6 for n = 6, 2.8 for n = 16."""
    assert scoreboard.order(Value(80, 4.0, 6), Value(77, 4.0, 6)) == 0
    assert scoreboard.order(Value(80, 4.0, 16), Value(77, 4.0, 16)) == 1
    assert scoreboard.order(Value(77, 4.0, 16), Value(80, 4.0, 16)) == -1

    def runs(*values):
        return entries.summary({(None, seed): value for seed, value in enumerate(values)})

    # paired, the difference is 1 in every run
    assert scoreboard.order(runs(70, 80, 90), runs(69, 79, 89)) == 1


def test_the_scoreboard_counts_every_column_that_has_the_papers_values():
    raw = of_runs()
    made = scoreboard.table(
        {"one": entries.made(raw), "given": entries.made(GIVEN)}, {"one": "page.md"}
    )
    *_, line, paper, whole = made.splitlines()
    assert line == "| FedeRiCo, Table 1, CIFAR-10 | [one](page.md#one), D=2 | 2 | 0 | 0 | 1 |"
    assert paper.startswith("| **FedeRiCo** |") and whole.endswith(
        "| 0 (0 %) | 0 (0 %) | 1 (100 %) |"
    )


def test_the_scoreboard_counts_forms_of_the_papers_method_apart():
    raw = of_runs()
    raw["rows"][1]["title"] = "FedeRiCoFriends"
    made = scoreboard.table(
        {"one": entries.made(of_runs()), "two": entries.made(raw)}, {"one": "page.md"}
    )
    *_, one, two, paper, friends, whole = made.splitlines()
    assert ", D=2 | 2" in one and ", D=2; FedeRiCoFriends | 2" in two
    assert paper.startswith("| **FedeRiCo** |") and friends.startswith("| **FedeRiCoFriends** |")
    assert paper.endswith("| 1 (100 %) |") and whole.endswith("| 2 (100 %) |")


def git(folder, *words):
    own = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    told = subprocess.run(
        ["git", *own, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return told.stdout.strip()


@pytest.fixture
def repository(root):
    """A repository with one commit; returns its root and the commit."""
    engine = root / "pfljax" / "local"
    engine.mkdir(parents=True)
    (engine / "solve.py").write_text("x = 1\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "before")
    return root, git(root, "rev-parse", "HEAD")


FEDPROX = Path(fedprox.__file__).read_text()
LOSS = "solver.mean_loss(params, batch) + self.mu / 2 * distance"
RENAMED = (("distance = ", "square = "), ("* distance", "* square"))


@pytest.fixture
def variant(tmp_path, monkeypatch):
    """FedProx with some of its text replaced, under the name `variant`."""
    known = dict(METHODS)
    cached = programs.digest
    cached.cache_clear()

    def load(*replaced):
        text = FEDPROX.replace("@method(", '@method(name="variant", ')
        for before, after in replaced:
            assert before in text
            text = text.replace(before, after)
        METHODS.pop("variant", None)
        module = types.ModuleType(f"variant_{len(list(tmp_path.glob('*.py')))}")
        path = tmp_path / f"{module.__name__}.py"
        path.write_text(text)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(text, path, "exec"), module.__dict__)
        cached.cache_clear()
        return module.__dict__["FedProx"]

    yield load
    METHODS.clear()
    METHODS.update(known)
    cached.cache_clear()


def test_a_digest_changes_with_what_a_method_computes(variant):
    original = programs.digest_of(METHODS["fedprox"]())
    assert programs.digest_of(variant()()) == original
    changes = {
        "a constant": (LOSS, LOSS.replace("/ 2", "/ 3")),
        "an operation": (LOSS, LOSS.replace("+", "-")),
        "a default": ("        0.1,\n", "        0.2,\n"),
        "the ledger": ("Ledger(gradients=1)", "Ledger(gradients=2)"),
        "what trains": ("data.train, objective", "data.validation, objective"),
    }
    found = {name: programs.digest_of(variant(change)()) for name, change in changes.items()}
    assert len({original, *found.values()}) == 1 + len(changes)


def test_a_digest_does_not_change_with_names_comments_and_places(variant):
    original = programs.digest_of(METHODS["fedprox"]())
    unchanged = [
        *RENAMED,
        ("objective", "loss_of_client"),
        ("# theta <- sum_k", "# something else"),
        ("FedAvg with a proximal term", "A method"),
        ("\n\n@method(", "\n\n\n\n\nUNUSED = 3.0\n\n\n@method("),
    ]
    assert programs.digest_of(variant(*unchanged)()) == original


def test_digests_do_not_depend_on_the_order_of_calls():
    names = ["fedprox", "local", "ditto"]
    programs.digest.cache_clear()
    forward = programs.digests(names)
    programs.digest.cache_clear()
    jax.clear_caches()
    backward = programs.digests(names[::-1])
    assert forward == backward and len(set(forward.values())) == 3
    assert programs.digests(["no method", "partition:natural"]) == {}


@toys.each_method(fast=("q_ffl", "fedfomo", "fedtp", "fedit", "federico"))
def test_every_method_has_a_digest(name):
    """Also those that need more than an MLP and their defaults."""
    assert programs.digest(name) is not None


@pytest.mark.parametrize("name", programs.DEALT)
def test_a_partition_s_digest_is_that_of_the_examples_that_it_deals(name, monkeypatch):
    original = programs.digest_of_partition.__wrapped__(name)
    assert programs.digest_of_partition.__wrapped__(name) == original
    deal = partitions.PARTITIONS[name].assign

    def without_an_example(*args, **options):
        dealt = deal(*args, **options)
        return dealt._replace(indices=[dealt.indices[0][:-1], *dealt.indices[1:]])

    monkeypatch.setattr(partitions.PARTITIONS[name], "assign", without_an_example)
    assert programs.digest_of_partition.__wrapped__(name) != original


def recorded(*methods, partition="iid", **values):
    """An entry of methods, with what they compute now."""
    names = [*methods, f"partition:{partition}"]
    digests = {"programs": programs.digests(names), "programs_jax": programs.jax_version()}
    return entries.made(copy.deepcopy(GIVEN) | {"methods": [*methods]} | digests | values)


def test_stale_names_the_tables_of_the_changed_method_and_no_others(variant):
    variant()
    tables_of = {
        "of both": recorded("local", "variant"),
        "of another": recorded("local"),
        "of it": recorded("variant", date="2026-11-01"),
        "of its original": recorded("fedprox"),
    }
    assert stale.lines(tables_of) == []
    variant(*RENAMED)
    assert stale.lines(tables_of) == []
    variant((LOSS, LOSS.replace("/ 2", "/ 3")))
    reason = "variant computes something else than when this was measured"
    assert stale.lines(tables_of) == [
        f"2026-11-01  of it: {reason}",
        f"2026-11-22  of both: {reason}",
    ]


def test_stale_names_what_is_gone_and_what_cannot_be_compared(variant, monkeypatch):
    variant()
    tables_of = {
        "gone": recorded("variant"),
        "old": entries.made(GIVEN),
        "older": entries.made(GIVEN),
        "timed": entries.made(GIVEN | {"timing": True}),
        "other": recorded("local", programs_jax="0.4.0"),
        "dealt": recorded("local", partition="pairs"),
    }
    METHODS.pop("variant")
    programs.digest.cache_clear()
    digest = programs.digest
    monkeypatch.setattr(programs, "digest", lambda name: "" if "pairs" in name else digest(name))
    *found, other, old = stale.lines(tables_of)
    assert found == [
        "2026-11-22  gone: variant is gone",
        "2026-11-22  dealt: partition pairs deals other examples than when this was measured",
    ]
    assert other.startswith("1 table was measured with jax 0.4.0")
    assert old == "2 tables were measured before programs were recorded"


def test_stale_has_one_line_for_tables_without_programs(root, capsys):
    assert main(["stale"], root) == 0
    assert capsys.readouterr().out == "1 table was measured before programs were recorded\n"


def test_programs_are_those_of_the_entrys_methods():
    digests = {"programs": {"local": "1"}, "programs_jax": "0.10.2"}
    entry = entries.made(GIVEN | digests)
    assert entries.made(json.loads(entries.text(entry))) == entry
    assert "programs" not in entries.text(entries.made(GIVEN))
    with pytest.raises(ValueError, match="ditto is no method of the entry"):
        entries.made(GIVEN | digests | {"programs": {"ditto": "1"}})
    with pytest.raises(ValueError, match="programs with programs_jax"):
        entries.made(GIVEN | {"programs": {"local": "1"}})


def test_broken_names_entries_that_cannot_be_made_again(repository, capsys):
    root, commit = repository
    published = {"commit": None, "published_in": "abc1234"}
    entries.write("good", entries.made(GIVEN | {"commit": commit[:10]}), root)
    entries.write("neither", entries.made(GIVEN | published | {"date": "2026-11-01"}), root)
    entries.write("runs", entries.made(of_runs() | published), root)
    assert main(["broken"], root) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2026-11-01  neither: has neither a commit nor runs",
        "2026-11-22  one: commit abc1234 is missing",
    ]


def test_broken_needs_a_repository(root, capsys):
    assert main(["broken"], root) == 1
    assert "expected a git repository" in capsys.readouterr().err


def test_archived_entries_are_left_out_and_are_entries(root, capsys):
    for name in entries.read(ROOT, entries.ARCHIVE):
        assert name not in entries.read()  # and read has checked it
    archive = root / entries.ARCHIVE
    archive.mkdir()
    text = entries.text(entries.made(GIVEN | {"methods": ["no method"]}))
    (archive / "superseded.json").write_text(text)
    main(["write"], root)
    assert main(["check"], root) == 0 and main(["stale"], root) == 0
    assert "superseded" not in capsys.readouterr().out
    assert [*entries.read(root)] == ["one"]
    assert [*entries.read(root, entries.ARCHIVE)] == ["superseded"]
    (archive / "superseded.json").write_text("{}")
    with pytest.raises(ValueError, match=r"archive/superseded.json: Entry with unknown or missing"):
        entries.read(root, entries.ARCHIVE)


@pytest.mark.parametrize("known", ["commit", "changed since", "missing"])
def test_add_records_programs_of_the_commit_that_was_measured(repository, tmp_path, capsys, known):
    root, commit = repository
    measured = "0123456789abcdef" if known == "missing" else commit
    out = tmp_path / "out"
    for seed in (0, 1):
        finished(out / "local" / f"seed-{seed}", "local", seed, 0.5, measured)
    if known == "changed since":
        (root / "pfljax" / "local" / "solve.py").write_text("x = 2\n")
    assert main(["add", "new", str(out)], root) == 0
    entry = entries.read(root)["new"]
    printed = capsys.readouterr().out
    if known == "commit":
        assert entry.programs == programs.digests(["local", "partition:iid"])
        assert entry.programs_jax == programs.jax_version() and "not recorded" not in printed
        assert entry.programs is not None and len(entry.programs) == 2
    else:
        assert entry.programs is None and "programs are not recorded" in printed


def finished(folder, method, seed, accuracy, commit: str | None = "0123456789abcdef"):
    """A finished run's folder, as far as the ledger reads it."""
    folder.mkdir(parents=True)
    last = {
        "round": 10,
        "accuracy": accuracy,
        "accuracy_mean": accuracy,
        "bytes_down": 3e6,
        "bytes_up": 2e6,
    }
    (folder / "summary.json").write_text(json.dumps({"last": last, "seed": seed, "unseen": None}))
    config = {
        "flags": {"method": method, "learning_rate": 0.1, "partition": "iid"},
        "command": "python -m experiments.federico.table1 --data_file=/data/CIFAR10.npz --out=/data/out",
        "git_commit": commit,
        "versions": {"python": "3.11.7", "jax": "0.10.2"},
    }
    (folder / "config.json").write_text(json.dumps(config))


def entry_with_runs(folder, root, accuracies):
    """An entry of runs of Local on several seeds, without programs."""
    for seed, accuracy in enumerate(accuracies):
        finished(folder / "local" / f"seed-{seed}", "local", seed, accuracy)
    assert main(["add", "new", str(folder)], root) == 0


@pytest.mark.parametrize(
    "again, said",
    [
        ([0.5, 0.7, 0.6, 0.8, 0.9], "5 of 6 runs at commit {} ({}), all with the same figures"),
        (
            [0.5, 0.7, 0.6, 0.8, 0.91],
            "5 of 6 runs at commit {} ({}), 4 equal, the others differ by at most 1 points",
        ),
    ],
)
def test_repeated_runs_record_what_methods_compute_now(repository, tmp_path, capsys, again, said):
    root, commit = repository
    entry_with_runs(tmp_path / "before", root, [0.5, 0.7, 0.6, 0.8, 0.9, 0.4])
    assert entries.read(root)["new"].programs is None
    for seed, accuracy in enumerate(again):
        finished(tmp_path / "after" / "local" / f"seed-{seed}", "local", seed, accuracy, commit)
    assert main(["repeat", "new", str(tmp_path / "after")], root) == 0, capsys.readouterr()

    entry = entries.read(root)["new"]
    today = datetime.date.today().isoformat()
    assert entry.repeated == said.format(commit[:10], today)
    assert entry.programs == programs.digests(["local", "partition:iid"])
    assert f"Repeated: {entry.repeated}." in " ".join(tables.caption("new", entry).split())


@pytest.mark.parametrize(
    "row, seeds, again, commit_known, said",
    [
        ("local", [0, 1], [0.5, 0.75], True, "1 of 2 repeated runs are equal"),
        ("local", [0, 1], [0.5, 0.73], True, "differs by 3.00 points"),
        ("ditto", [0], [0.5], True, "no repeated run has the row"),
        ("local", [7], [0.5], True, "no repeated run has the row"),
        ("local", [0], [0.5], False, "the code is not that of the repeated runs' commit"),
    ],
)
def test_repeated_runs_that_prove_nothing_are_refused(
    repository, tmp_path, capsys, row, seeds, again, commit_known, said
):
    root, commit = repository
    entry_with_runs(tmp_path / "before", root, [0.5, 0.7])
    measured = commit if commit_known else "0123456789abcdef"
    for seed, accuracy in zip(seeds, again, strict=True):
        finished(tmp_path / "after" / row / f"seed-{seed}", row, seed, accuracy, measured)
    assert main(["repeat", "new", str(tmp_path / "after")], root) == 1
    assert said in capsys.readouterr().err
    assert entries.read(root)["new"].repeated is None


def test_a_row_without_a_repeated_run_is_refused(repository, tmp_path, capsys):
    root, commit = repository
    finished(tmp_path / "before" / "ditto" / "seed-0", "ditto", 0, 0.6)
    entry_with_runs(tmp_path / "before", root, [0.5])
    finished(tmp_path / "after" / "local" / "seed-0", "local", 0, 0.5, commit)
    assert main(["repeat", "new", str(tmp_path / "after")], root) == 1
    assert "no run was repeated of ditto" in capsys.readouterr().err


def compared(folder, peer, commit, cells):
    """The folder of a comparison with other code, as far as the ledger reads it."""
    folder.mkdir(parents=True)
    versions = {"python": "3.11.7", "jax": "0.10.2", "torch": "2.13.0"}
    about = {"peer": peer, "rounds": [1, 50], "commit": commit, "versions": versions}
    (folder / "parity.json").write_text(json.dumps({"about": about, "cells": cells}))
    return str(folder)


def after(rounds, difference):
    """The figures of a comparison after some rounds."""
    accuracies = {"accuracy": 0.75, "accuracy_of_peer": 0.8}
    return {"rounds": rounds, "difference": difference, "moved": 1.25} | accuracies


LIBRARY = {"FedAvg": {"note": "", "differs": "", "rows": [after(1, 6e-8), after(50, 7.654321e-7)]}}
AUTHORS = {"Local": {"note": "", "differs": "it has no server"}}


@pytest.fixture
def of_parity(repository):
    """A repository with an entry of comparisons with two peers; returns its root and the commit."""
    root, commit = repository
    columns = [
        {"head": "code"},
        {"head": "after 50", "of": "50", "figure": "difference"},
        {"head": "theirs", "of": "50", "figure": "accuracy_of_peer"},
    ]
    rows = [
        {"name": "library FedAvg", "title": "FedAvg", "cells": ["a library"]},
        {"name": "authors Local", "title": "Local", "cells": ["its authors"]},
    ]
    former = after(50, 0.5) | {"row": "library FedAvg", "column": "50", "split": None, "seed": 0}
    table = {"columns": columns, "rows": rows, "runs": [former], "repeated": "all of it"}
    entries.write("peers", entries.made(GIVEN | table), root)
    return root, commit


@pytest.mark.parametrize("unchanged", [True, False])
def test_parity_replaces_figures_and_leaves_the_text(of_parity, tmp_path, capsys, unchanged):
    root, commit = of_parity
    former = entries.read(root)["peers"]
    folders = [
        compared(tmp_path / "library", "library", commit, LIBRARY),
        compared(tmp_path / "authors", "authors", commit, AUTHORS),
    ]
    if not unchanged:
        (root / "pfljax" / "local" / "solve.py").write_text("x = 2\n")
    today = datetime.date.today()
    assert main(["parity", "peers", *folders, "--machine=2 CPU cores"], root) == 0
    entry = entries.read(root)["peers"]
    assert (entry.title, entry.columns, entry.rows) == (former.title, former.columns, former.rows)
    assert entry.commit == commit[:10]
    assert today <= datetime.date.fromisoformat(entry.date) <= datetime.date.today()
    assert (entry.machine, entry.repeated) == ("2 CPU cores", None)
    assert entry.versions == {"Python": "3.11.7", "jax": "0.10.2", "PyTorch": "2.13.0"}
    assert [(run["row"], run["column"], run["difference"]) for run in entry.runs or []] == [
        ("library FedAvg", "1", 6e-8),
        ("library FedAvg", "50", 7.65432e-7),
    ]
    made = tables.table(entry)
    assert "| FedAvg | a library | 7.65e-07 | 80.0 |" in made
    assert "| Local | its authors | - | - |" in made
    printed = capsys.readouterr().out
    if unchanged:
        assert entry.programs == programs.digests(["local", "fedavg"])
        assert entry.programs_jax == programs.jax_version()
    else:
        assert entry.programs is None and "programs are not recorded" in printed


@pytest.mark.parametrize(
    "peers, commits, said",
    [
        (["library"], ["a"], "no folder compares authors Local"),
        (["library", "authors"], ["a", "b"], "expected folders of one commit"),
        (["library", "authors"], [None, None], "expected folders of one commit"),
    ],
)
def test_parity_refuses_what_makes_no_table(of_parity, tmp_path, capsys, peers, commits, said):
    root, _ = of_parity
    former = entries.read(root)["peers"]
    folders = []
    for peer, commit in zip(peers, commits, strict=True):
        cells = LIBRARY if peer == "library" else AUTHORS
        folders.append(compared(tmp_path / peer, peer, commit, cells))
    assert main(["parity", "peers", *folders], root) == 1
    assert said in capsys.readouterr().err
    assert entries.read(root)["peers"] == former


def test_add_makes_an_entry_of_finished_runs(root, tmp_path, capsys):
    out = tmp_path / "out"
    for seed, accuracy in enumerate([0.5, 0.7]):
        finished(out / "D2" / "local" / f"split-3-seed-{seed}", "local", seed, accuracy)
        finished(out / "D2" / "literal" / f"split-3-seed-{seed}", "federico", seed, accuracy + 0.1)
    words = [
        "add",
        "new",
        str(out),
        "--figures=accuracy,megabytes",
        "--lead=literal",
        "--machine=2 CPU cores",
    ]
    assert main([*words, "--paper=federico.TABLE1.cifar10.{row}.{column}"], root) == 0
    assert "no page shows it" in capsys.readouterr().out
    entry = entries.read(root)["new"]
    assert entry.command == "python -m experiments.federico.table1 --data_file=CIFAR10.npz"
    assert (entry.commit, set(entry.methods)) == ("0123456789", {"local", "federico"})
    assert {(run["row"], run["split"], run["seed"]) for run in entry.runs or []} == {
        (row, 3, seed) for row in ("local", "literal") for seed in (0, 1)
    }
    accuracy, megabytes = entry.columns
    local = next(row for row in entry.rows if row.name == "local")
    values = [entry.value(local, accuracy), entry.value(local, megabytes)]
    assert [value and value.mean for value in values] == pytest.approx(
        [60, 0.5]
    )  # 5 MB in 10 rounds
    assert "| 60.0 ± 14.1 | 40.1 | +10.0 (2 of 2) | 0.5 |" in tables.table(entry)


def test_add_takes_the_cells_of_an_experiments_own_table(root, tmp_path):
    out = tmp_path / "out"
    for seed in (0, 1):
        finished(out / "local" / f"seed-{seed}", "local", seed, 0.5)
    (out / "table.csv").write_text(
        "groups,reading,accuracy,paper,paper\n2,mean,60.0 ± 1.2,40.1 ± 2.8,1\n2,sum,1,2,3\n"
    )
    assert main(["add", "new", str(out), "--cells"], root) == 0
    entry = entries.read(root)["new"]
    assert [column.head for column in entry.columns] == ["reading", "accuracy", "paper", "paper #2"]
    assert [row.cells for row in entry.rows] == [
        ["mean", "60.0 ± 1.2", "40.1", "1"],
        ["sum", "1", "2", "3"],
    ]
    assert entry.runs is not None and len(entry.runs) == 2
    assert "| 2 | mean | 60.0 ± 1.2 | 40.1 | 1 |" in tables.table(entry)


def test_add_refuses_folders_without_runs_and_runs_without_a_commit(root, tmp_path, capsys):
    assert main(["add", "new", str(root)], root) == 1
    assert "no finished runs" in capsys.readouterr().err
    finished(tmp_path / "out" / "local" / "seed-0", "local", 0, 0.5, commit=None)
    assert main(["add", "new", str(tmp_path / "out")], root) == 1
    assert "accepted: --commit" in capsys.readouterr().err
    known = ["add", "new", str(tmp_path / "out"), "--commit=abc"]
    assert main([*known, "--cells"], root) == 1
    assert "table.csv" in capsys.readouterr().err
    for paper in (
        "federico.TABLE9.cifar10",
        "nobody.TABLE1.cifar10",
        "federico.TABLE1.{method}",
        "federico",
    ):
        assert main([*known, f"--paper={paper}"], root) == 1
        assert f"paper {paper}; accepted" in capsys.readouterr().err
    assert main(known, root) == 0


def test_a_column_of_runs_needs_its_figure():
    assert tables.percent(Column("accuracy, unseen", figure="accuracy_unseen"))
    raw = of_runs()
    raw["columns"][0]["figure"] = "megabytes"
    with pytest.raises(ValueError, match="no run has megabytes"):
        entries.made(raw)
