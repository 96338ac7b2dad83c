"""What a case of the campaign may cost."""

import resource
from pathlib import Path

import pytest

ROOM = 8 << 30  # bytes that a case may ask for


@pytest.fixture(autouse=True)
def little_memory():
    """Whoever asks for all of the memory gets an error, and does not end the process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = (
        int(Path("/proc/self/statm").read_text().split()[0])
        if Path("/proc/self/statm").exists()
        else 0
    )
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
