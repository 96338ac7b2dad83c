"""The page of methods is the registry's."""

from pathlib import Path

from experiments import methods

ROOT = Path(__file__).parents[2]


def test_the_page_is_written_from_the_registry():
    assert methods.PAGE.read_text() == methods.page()


def test_the_files_that_it_links_are_there():
    links = [part.split(")")[0] for part in methods.table().split("](")[1:]]
    assert len(links) == len(methods.METHODS)
    for link in links:
        assert (methods.PAGE.parent / link).is_file()


def test_readme_tells_the_number_of_methods():
    assert f"{len(methods.METHODS)} methods" in (ROOT / "README.md").read_text()
