"""Pages that are written afterwards, of one run and across runs."""

import html_pages
import pytest
from commands import call, one_line
from run_folders import make_run

from pfljax.cli import report
from pfljax.folder import files


@pytest.fixture
def runs(tmp_path):
    """A comparison: two methods, one of them with two seeds."""
    for name, seed in (("local", 0), ("local", 1), ("fedavg", 0)):
        make_run(tmp_path / "runs" / name / f"seed-{seed}", optional=False)
    return tmp_path / "runs"


@pytest.mark.pages
def test_one_run_gets_its_figures_and_its_page(runs):
    folder = runs / "local" / "seed-0"
    assert call(report.COMMAND, folder) == f"report: {folder / 'report.html'}\n"
    assert "federico on" in (folder / "report.html").read_text() and list(
        (folder / "figures").glob("*.png")
    )


@pytest.mark.pages
def test_several_runs_get_a_page_that_leads_to_theirs(runs, tmp_path, monkeypatch):
    line = one_line(call(report.COMMAND, runs, "--reference=ditto", code=2))
    assert line == "--reference=ditto: accepted: a method of the table: fedavg, local" and not list(
        runs.rglob("*.html")
    )
    assert call(report.COMMAND, runs, "--reference=local") == f"report: {runs / 'report.html'}\n"
    links = html_pages.read(runs / "report.html").links
    for name in ("local/seed-0", "local/seed-1", "fedavg/seed-0"):
        assert f"{name}/report.html" in links and (runs / name / "report.html").exists()
    page = tmp_path / "elsewhere" / "two.html"
    call(report.COMMAND, runs / "local" / "seed-0", "--out", page, f"--folder={runs / 'fedavg'}")
    assert (
        "../runs/local/seed-0/report.html" in html_pages.read(page).links
        and "seed-1" not in page.read_text()
    )
    monkeypatch.chdir(tmp_path)
    assert call(report.COMMAND, "runs/local", "runs/fedavg") == "report: report.html\n"
    assert "runs/fedavg/seed-0/report.html" in html_pages.read(tmp_path / "report.html").links


@pytest.mark.pages
@pytest.mark.parametrize("named", ["method", "algorithm"])  # the present and the former name
def test_a_comparison_s_figures_for_a_paper(named, tmp_path):
    """One file of each kind for each picture that the rows have; the width is what is asked for."""
    rounds = {"rounds": [0, 2], "curve_mean": [0.1, 0.5], "curve_std": [None, None]}
    rows = [{named: name, "seeds": [{"accuracy": 0.5}], **rounds} for name in ("local", "fedavg")]
    make_run(tmp_path)
    files.write_json(tmp_path / "table.json", rows)
    paper = tmp_path / "paper"
    assert call(
        report.COMMAND, tmp_path, f"--out={tmp_path / 'a.html'}", f"--paper={paper}", code=2
    )
    (tmp_path / "summary.json").rename(tmp_path / "kept")
    (tmp_path / "local").mkdir()
    make_run(tmp_path / "local")
    printed = call(report.COMMAND, tmp_path, f"--paper={paper}", "--paper_width=5")
    assert printed.endswith(f"figures: {paper / 'scores.pdf'}, {paper / 'rounds.pdf'}, and .png\n")
    assert {path.name for path in paper.iterdir()} == {
        f"{n}.{k}" for n in ("scores", "rounds") for k in ("pdf", "png")
    }
    starts = {".pdf": b"%PDF", ".png": b"\x89PNG"}
    assert all(path.read_bytes().startswith(starts[path.suffix]) for path in paper.iterdir())


def test_mistakes_are_one_line(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    for words, said in (
        ([], "give a run's folder: pfljax report DIR..."),
        ([tmp_path / "nowhere"], f"{tmp_path / 'nowhere'}: No such file or directory"),
        ([tmp_path / "file"], f"{tmp_path / 'file'}: Not a directory"),
        ([runs, tmp_path / "empty"], f"{tmp_path / 'empty'}: contains no finished run; "),
        ([runs, "--out=page"], "--out=page: accepted: a file that ends in .html"),
        (
            [runs / "local" / "seed-0", "--out=a.html"],
            "--out: does not apply here: the page of one run is written to its folder",
        ),
        ([runs, "--paper=paper"], "--paper=paper: accepted for the folder of one comparison"),
        ([runs / "local" / "seed-0", "--paper=paper"], "--paper: does not apply here: "),
        ([runs, "--rounds=3"], "--rounds: unknown flag"),
        ([runs / "local" / "seed-0", "--reference=local"], "--reference: does not apply here: "),
    ):
        assert one_line(call(report.COMMAND, *words, code=2)).startswith(said)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.pages
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", "{"),
        ("summary.json", "{}"),
        ("results.npz", "torn"),
        ("metrics.jsonl", "{"),
        ("config.json", ""),
    ],
)
def test_damaged_runs_are_named(runs, name, content):
    folder = runs / "local" / "seed-1"
    (folder / name).write_text(content)
    assert one_line(call(report.COMMAND, runs, code=1)).startswith(
        f"{folder}: the run's files are damaged"
    )
    assert not (runs / "report.html").exists()


def test_the_help_says_what_is_written():
    text = call(report.COMMAND, "--help")
    assert "pfljax report DIR..." in text and "--folder\n" in text and "--out\n" in text
