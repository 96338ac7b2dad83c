"""README's table is the registry's."""

from pathlib import Path

from experiments import methods

ROOT = Path(__file__).parents[2]


def test_readme_has_the_registry_s_table():
    assert methods.table() in (ROOT / "README.md").read_text()


def test_the_files_that_it_links_are_there():
    links = [part.split(")")[0] for part in methods.table().split("](")[1:]]
    assert len(links) == len(methods.METHODS)
    for link in links:
        assert (ROOT / link).is_file()
