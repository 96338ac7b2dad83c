"""The address of process 0: only this machine's loopback if the others connect there."""

from unittest import mock

import jax
import pytest

from pfljax.contract import processes


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("localhost:80", True),
        ("127.0.0.1:80", True),
        ("127.9.9.9:80", True),
        ("[::1]:80", True),
        ("0.0.0.0:80", False),
        ("[::]:80", False),
        ("10.0.0.1:80", False),
        ("host.example:80", False),
        ("localhost.example:80", False),
        ("auto", False),
    ],
)
def test_the_coordinator_listens_on_loopback_where_its_address_is(address, expected, monkeypatch):
    assert processes.on_loopback(address) == expected
    given = mock.Mock()
    monkeypatch.setattr(jax.distributed, "initialize", given)
    monkeypatch.setattr(jax.config, "update", mock.Mock())
    processes.start(address, 1, 0)
    assert given.call_args.kwargs.get("coordinator_bind_address") == (address if expected else None)
    assert given.call_args.kwargs.get("coordinator_address") == (
        None if address == "auto" else address
    )
