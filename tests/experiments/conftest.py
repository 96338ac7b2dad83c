"""A cache for what commands keep, of all tests."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory):
    """A folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PFLJAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
