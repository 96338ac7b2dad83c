"""What users of PyTorch's modules are told without PyTorch or torchax, and that pfljax imports neither."""

import importlib.util
import subprocess
import sys

import flax.linen as nn
import pytest

import pfljax as pfl


@pytest.mark.parametrize("missing", ["torch", "torchax"])
def test_the_extra_is_named(missing, monkeypatch):
    find_spec = importlib.util.find_spec

    def find(name, *args):
        return None if name == missing else find_spec(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "torchax":
        pytest.importorskip("torch", reason="needs the extra torch")
    with pytest.raises(pfl.ArgumentError) as info:
        pfl.models.from_torch(lambda: None)
    expected = f"model: needs {missing}: pip install 'pfljax[torch]'"
    assert str(info.value) == expected


@pytest.mark.parametrize("value", [3, "resnet18", None])
def test_other_values_are_no_modules(value):
    with pytest.raises(pfl.ArgumentError, match=r"^module=.*: accepted: a torch.nn.Module"):
        pfl.models.from_torch(value)


@pytest.mark.slow
def test_a_flax_model_imports_no_pytorch():
    code = """
import sys
import flax.linen as nn
import pfljax as pfl
pfl.models.build(nn.Dense(3), (5,), "classification", 3)
print({"torch", "torchax"} & sys.modules.keys())
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert printed.stdout.strip() == b"set()"
    assert isinstance(pfl.Model(nn.Dense(3)).module, nn.Dense)
