"""Links lead somewhere, in the repository and on the site; the site fetches nothing, and is searched from a folder."""

import html
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
HREF = re.compile(r'(?:href|src)="([^"]*)"')
ELSEWHERE = ("http://", "https://", "mailto:", "data:", "javascript:")


def anchors_of(path):
    """The names that a link may end in: of headings, as GitHub and MkDocs make them, and of HTML anchors."""
    text = path.read_text()
    heads = re.findall(
        r"^#+ (.*)$", CODE.sub(lambda found: found[0].replace("#", ""), text), re.MULTILINE
    )
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", head) for head in heads]
    return {
        re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in plain
    } | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_of_pages_lead_to_files_and_headings_of_the_repository(page):
    missing = []
    for found in LINK.finditer(CODE.sub("", page.read_text())):
        link = found[1] or found[2]
        path, _, anchor = urllib.parse.unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if link.startswith(ELSEWHERE):
            continue
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors_of(target)
        ):
            missing.append(link)
    assert not missing


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_links_of_the_site_lead_somewhere_and_nothing_is_fetched(site):
    missing = []
    fetched = []
    ids = {}
    # whose links start at the server's root
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    for page in pages:
        text = page.read_text()
        ids[page] = set(re.findall(r'\bid="([^"]+)"', text))
        fetched += [
            tag for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", text) if fetches(tag)
        ]
    for page in pages:
        for link in map(html.unescape, HREF.findall(page.read_text())):
            path, _, anchor = urllib.parse.unquote(link).partition("#")
            target = (page.parent / path).resolve() if path else page
            if link.startswith(ELSEWHERE):
                continue
            if not target.exists() or (anchor and target in ids and anchor not in ids[target]):
                missing.append((page.relative_to(site).as_posix(), link))
    assert len(pages) > 80 and not missing and not fetched
    assert (site / "llms.txt").read_text() == (ROOT / "docs" / "llms.txt").read_text()


def fetches(tag):
    """Whether a tag makes the browser fetch something from elsewhere; a canonical address does not."""
    return 'rel="canonical"' not in tag and any(
        link.startswith(("http://", "https://", "//")) for link in HREF.findall(tag)
    )


@pytest.mark.long
@pytest.mark.xdist_group("browser")
def test_the_site_is_searched_from_a_folder(site):
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    program = shutil.which("chromium")
    driver_path = shutil.which("chromedriver")
    if not (program and driver_path):
        pytest.skip("needs Chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
    try:
        driver.get((site / "howto" / "data.html").as_uri())
        time.sleep(0.5)
        driver.find_element("css selector", "input.md-search__input").send_keys("early stop")
        end = time.monotonic() + 60
        while not (found := driver.find_elements("css selector", ".md-search-result__item")):
            assert time.monotonic() < end
            time.sleep(0.1)
        assert any("When to stop" in item.text for item in found)
    finally:
        driver.quit()
