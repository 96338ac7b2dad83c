"""The public names of data: modules list them, and former ones still work."""

import pytest

import pfljax as pfl
from pfljax import data

PUBLIC = (data, data.sources, pfl.partitions)


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_a_public_module_lists_its_names(module):
    assert dir(module) == sorted(module.__all__)


def test_former_names_work_with_a_warning():
    clients = data.digits(num_clients=4)
    with pytest.warns(FutureWarning, match=r"^Federation\.own is now local_clients$"):
        assert clients.own is None
    with pytest.warns(FutureWarning, match=r"^examples\(part=\) is now split=$"):
        x, _ = clients.examples(0, part="train")
    assert len(x) == clients.train.size[0]
    with pytest.warns(FutureWarning, match=r"^pfljax\.data\.codes_of is now distinct_codes$"):
        assert data.codes_of is data.distinct_codes
    with pytest.raises(AttributeError, match="has no attribute 'owned'"):
        _ = clients.owned
