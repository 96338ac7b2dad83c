"""Pages in a real browser, headless: what is clicked moves what it should, without an error, narrow and wide."""

import csv
import io
import itertools
import shutil
import time

import numpy as np
import pytest
from run_folders import make_run

from pfljax import report
from pfljax.folder import files
from pfljax.report import watching

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DRIVER = shutil.which("chromedriver")
WIDTHS = (390, 1280)
pytestmark = [
    pytest.mark.pages,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs Chromium and chromedriver"),
]


class Page:
    """A page that is open, seen by its scripts."""

    def __init__(self, driver, path, width):
        self.driver = driver
        self.width = width
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
        )
        begin = time.perf_counter()
        driver.get(path.as_uri())
        self.wait("document.documentElement.dataset.ready === 'yes'")
        self.seconds = time.perf_counter() - begin

    def ask(self, expression):
        return self.driver.execute_script(f"return {expression}")

    def wait(self, condition):
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 60, 0.05).until(lambda _: self.ask(condition))

    def see(self, name):
        """Scrolls to a plot and waits until it is drawn."""
        self.ask(f"document.getElementById('{name}').scrollIntoView()")
        self.wait(f"!!document.getElementById('{name}').data")

    def set(self, name, value):
        """Chooses a value as a user does, with the event that this brings."""
        self.ask(
            f"(() => {{ const at = document.getElementById('{name}'); at.value = '{value}';"
            "for (const kind of ['input', 'change']) at.dispatchEvent(new Event(kind, {bubbles: true})); })()"
        )

    def matrix(self):
        return np.array(
            self.ask("document.getElementById('matrix').data[0].z.map((row) => Array.from(row))")
        )

    def text(self, name):
        return self.ask(f"document.getElementById('{name}').textContent")

    def check(self):
        """Nothing was complained of, fetched, or wider than the window."""
        assert [
            entry
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
        ] == []
        assert self.ask("document.getElementById('problem').hidden")
        fetched = self.ask("performance.getEntriesByType('resource').map((entry) => entry.name)")
        assert [name for name in fetched if not name.startswith(("data:", "blob:"))] == []
        assert self.ask("document.documentElement.scrollWidth") <= self.width


@pytest.fixture(scope="module")
def driver():
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield started
    started.quit()


@pytest.fixture(scope="module")
def run_page(tmp_path_factory):
    """Six clients of two groups; at first each uses its own model, at last its group shares a model."""
    folder = make_run(tmp_path_factory.mktemp("run"))
    kept = files.read_npz(folder / "collaboration.npz")
    group = kept["group"]
    kept["index"] = np.stack([np.arange(6), np.arange(6), group])[:, :, None]
    labels = np.arange(12).reshape(6, 2)
    np.savez(
        folder / "collaboration.npz", **kept | {"weights": np.ones((3, 6, 1)), "labels": labels}
    )
    return report.write_page(folder)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_slider_moves_the_matrix_and_a_client_opens(driver, run_page, width):
    page = Page(driver, run_page, width)
    page.see("matrix")
    # by group, last round
    np.testing.assert_allclose(page.matrix(), np.kron(np.eye(2), np.ones((3, 3))))
    assert "round 30" in page.text(
        "round-shown"
    ) and "1.00 within true groups, 0.00 between" in page.text("cosines")
    page.set("round", 0)
    np.testing.assert_allclose(page.matrix(), np.eye(6))
    assert "round 10" in page.text("round-shown") and "0.00 within" in page.text("cosines")
    page.set("round", 2)
    page.set("kind", "weights")  # clients 1, 3 and 5, of group 0, use model 0; the others model 1
    page.set("by", "score")
    worst_first = np.argsort(
        files.read_npz(run_page.parent / "results.npz")["accuracy_test"][-1], kind="stable"
    )
    used = np.eye(6)[[1, 0, 1, 0, 1, 0]]
    np.testing.assert_allclose(page.matrix(), used[np.ix_(worst_first, worst_first)])
    page.see("graph")
    page.see("curves")
    assert page.text("client-text").startswith(f"Client {worst_first[0]},")
    page.ask("document.querySelector('#clients-table button[data-client=\"3\"]').click()")
    told = "Client 3, group 0, found group"
    assert page.text("client-text").startswith(told) and "Uses most client 0 (1.00)" in page.text(
        "client-text"
    )
    page.see("labels")
    assert page.ask("document.getElementById('labels').data[0].customdata") == [6, 7]
    scores = files.read_npz(run_page.parent / "results.npz")["accuracy_test"][:, 3]
    np.testing.assert_allclose(
        page.ask("document.getElementById('curves').data[0].y"), scores, rtol=5e-4
    )
    for name in ("neighbors", "ranking", "spread", "traffic"):
        page.see(name)
    page.check()


def test_clients_are_shown_with_their_names(driver, tmp_path):
    make_run(tmp_path)
    summary = files.read_json(tmp_path / "summary.json")
    rows = [
        dict(row, name=name)
        for row, name in zip(summary["per_client"], ["<b>Ann", *"vwxyz"], strict=True)
    ]
    files.write_json(tmp_path / "summary.json", dict(summary, per_client=rows))
    page = Page(driver, report.write_page(tmp_path), 1280)
    page.ask("document.querySelector('#clients-table button[data-client=\"0\"]').click()")
    assert page.text("client-text").startswith("Client 0 (<b>Ann), group 1")
    assert (
        page.ask("document.getElementById('client').selectedOptions[0].textContent") == "0 (<b>Ann)"
    )
    assert "<b>Ann" in page.ask("document.querySelector('#clients-table tbody').textContent")
    page.check()


def test_the_table_is_sorted_and_the_theme_changes(driver, run_page):
    page = Page(driver, run_page, 1280)
    page.see("matrix")
    cells = "[...document.querySelectorAll('#clients-table tbody tr')].map((row) => row.cells[0].textContent)"
    for expected in ("012345", "543210"):
        page.ask("document.querySelector('#clients-table th button').click()")
        assert "".join(page.ask(cells)) == expected
    ink = "document.getElementById('matrix').layout.font.color"
    before = page.ask(ink)
    page.ask("document.getElementById('theme').click()")
    assert page.ask(ink) != before
    page.ask("document.getElementById('theme').click()")
    assert page.ask(ink) == before
    page.check()


def test_results_are_downloaded_as_csv(driver, run_page):
    page = Page(driver, run_page, 1280)
    page.ask("URL.createObjectURL = (blob) => { window.saved = blob; return 'data:,'; }")
    tables = {}
    for name in ("rounds", "clients", "scores"):
        page.ask(f"document.getElementById('csv-{name}').click()")
        tables[name] = list(csv.DictReader(io.StringIO(page.ask("window.saved.text()"))))
    assert [row["round"] for row in tables["rounds"]] == ["10", "20", "30"]
    assert {row["accuracy"] for row in tables["rounds"]} == {"0.88"}
    assert [(row["client"], row["group"], row["n_train"]) for row in tables["clients"]][:2] == [
        ("0", "1", "9"),
        ("1", "0", "9"),
    ]
    scores = files.read_npz(run_page.parent / "results.npz")["accuracy_test"].T.ravel()
    np.testing.assert_allclose(
        [float(row["accuracy"]) for row in tables["scores"]], scores, rtol=5e-4
    )
    assert [(row["client"], row["round"]) for row in tables["scores"]][3:5] == [
        ("1", "10"),
        ("1", "20"),
    ]
    page.check()


def test_all_controls_have_names_and_are_reached_with_the_keyboard(driver, run_page):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    page = Page(driver, run_page, 1280)
    for control in driver.find_elements(By.CSS_SELECTOR, "button, select, input"):
        assert control.accessible_name.strip() and control.get_attribute("tabindex") != "-1"
    slider = driver.find_element(By.ID, "round")
    slider.send_keys(Keys.HOME)
    assert page.text("round-shown") == "round 10"
    driver.find_element(By.ID, "next").send_keys(Keys.ENTER)
    first = page.text("client-text").split(",")[0]
    driver.find_element(By.ID, "next").send_keys(Keys.ENTER)
    assert page.text("client-text").split(",")[0] != first
    page.check()


@pytest.mark.parametrize("width", [WIDTHS[0], pytest.param(WIDTHS[1], marks=pytest.mark.slow)])
def test_the_page_of_a_comparison_shows_each_run_and_leads_to_its_page(driver, tmp_path, width):
    levels = (
        ("fedavg", 0, 0.5),
        ("fedavg", 1, 0.7),
        ("x<b>y", 0, 0.9),
        ("z", 0, 0.4),
        ("z", 1, 0.5),
    )
    for name, seed, level in levels:
        make_run(tmp_path / name / f"seed-{seed}", level=level, optional=False)
    page = Page(driver, report.write_comparison(tmp_path / "report.html", [tmp_path]), width)
    page.see("dots")

    def points(plot="dots"):
        return page.ask(
            f"document.getElementById('{plot}').data.filter((each) => each.mode === 'markers').map((each) => each.x)"
        )

    assert points() == [[0.9], [0.5, 0.7], [0.4, 0.5]]
    page.see("differences")
    assert points("differences") == [[-15]]  # of z from fedavg
    page.set("reference", "z")
    assert points("differences") == [[15]]
    page.set("measure", "megabytes")
    np.testing.assert_allclose(points()[1], [0.1, 0.1])
    page.see("over")
    means = page.ask(
        "document.getElementById('over').data.filter((each) => each.name).map((each) => each.y)"
    )
    np.testing.assert_allclose(means, [[0.9] * 3, [0.6] * 3, [0.45] * 3])
    page.set("against", "megabytes")
    np.testing.assert_allclose(page.ask("document.getElementById('over').data[0].x"), [3, 3, 3])
    page.check()
    page.ask("document.querySelector('table a').click()")
    page.wait(
        "document.title.includes('federico on') && document.documentElement.dataset.ready === 'yes'"
    )


def test_a_page_has_its_plots_when_it_is_loaded_and_on_paper(driver, tmp_path):
    """The plots in view are drawn before the load event, the others before printing; the table fits the window."""
    for name, seed in itertools.product(("fedavg", "local", "momhead"), range(5)):
        make_run(tmp_path / name / f"seed-{seed}", level=0.5 + 0.1 * seed, optional=False)
    path = report.write_comparison(tmp_path / "report.html", [tmp_path])
    seen = (
        "addEventListener('load', () => window.atLoad = "
        "[...document.querySelectorAll('.plot')].map((at) => !!at.data))"
    )
    path.write_text(path.read_text().replace("</body>", f"<script>{seen}</script></body>"))
    page = Page(driver, path, 1280)
    drawn = page.ask("window.atLoad")
    assert drawn[0] and not drawn[-1]
    wide = "[...document.querySelectorAll('.wide')].map((at) => at.scrollWidth - at.clientWidth)"
    high = "[...document.querySelectorAll('.wide')].map((at) => at.scrollHeight - at.clientHeight)"
    assert max(page.ask(wide)) <= 0 and max(page.ask(high)) <= 0
    page.ask("document.getElementById('theme').click()")
    page.ask("window.dispatchEvent(new Event('beforeprint'))")

    def of_each(key):
        return page.ask(f"[...document.querySelectorAll('.plot')].map((at) => at.layout.{key})")

    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert max(page.ask(high)) <= 0
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    (width,) = set(of_each("width"))
    (ink,) = set(of_each("font.color"))
    assert width < 800 and ink == "#1f2a30"  # of a sheet, and dark on white
    page.ask("window.dispatchEvent(new Event('afterprint'))")
    assert width not in of_each("width") and ink not in of_each("font.color")
    page.check()


@pytest.mark.slow
@pytest.mark.parametrize("neighbors", [25, 1000])
def test_the_page_of_a_thousand_clients_stays_small(driver, tmp_path, neighbors):
    num = 1000
    times = 60 if neighbors < 1000 else 4
    make_run(tmp_path)
    rng = np.random.default_rng(0)
    rounds = np.arange(times)
    group = rng.integers(4, size=num)
    scores = {f"accuracy_{split}": rng.random((times, num)) for split in ("train", "test")}
    np.savez(tmp_path / "results.npz", rounds=rounds, loss_test=scores["accuracy_test"], **scores)
    weights = rng.random((times, num, neighbors)).astype(np.float32)
    np.savez(
        tmp_path / "collaboration.npz",
        round=rounds,
        index=rng.integers(num, size=weights.shape),
        weights=weights / weights.sum(axis=2, keepdims=True),
        topology="peers",
        group=group,
        labels=rng.integers(99, size=(num, 62)),
    )
    summary = files.read_json(tmp_path / "summary.json")
    rows = [dict(summary["per_client"][0], client=k, group=int(group[k])) for k in range(num)]
    files.write_json(tmp_path / "summary.json", dict(summary, num_clients=num, per_client=rows))
    path = report.write_page(tmp_path)
    assert path.stat().st_size < 8e6
    page = Page(driver, path, 1280)
    print(f"{path.stat().st_size / 1e6:.1f} MB, opens in {page.seconds:.1f} s")
    page.see("matrix")
    before = page.matrix()
    page.set("round", 0)
    assert page.matrix().shape == before.shape and not np.allclose(page.matrix(), before)
    page.check()


@pytest.mark.parametrize("width", WIDTHS)
def test_running_studies_are_drawn(driver, tmp_path, width):
    """A folder without a summary, as a run leaves it that was killed."""
    folder = make_run(tmp_path / "runs" / "<b>fedavg" / "seed-0")
    (folder / "summary.json").unlink()
    path = tmp_path / "watch.html"
    path.write_text(watching.page([tmp_path / "runs"], 5))
    page = Page(driver, path, width)
    page.see("accuracy")
    assert page.ask("document.getElementById('accuracy').data[0].y") == [0.88] * 3
    assert page.ask("document.querySelector('td').textContent") == "<b>fedavg/seed-0"
    page.check()
