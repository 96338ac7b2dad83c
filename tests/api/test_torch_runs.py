"""Runs with PyTorch modules: training is a loop of PyTorch's own, and what they leave behind is PyTorch's again."""

import importlib.util
import re

import numpy as np
import optax
import pytest

import pfljax as pfl

torch = pytest.importorskip("torch", reason="needs the extra torch")
if importlib.util.find_spec("torchax") is None:
    pytest.skip("needs the extra torch", allow_module_level=True)
nn = torch.nn
pytestmark = pytest.mark.slow

RATE = 0.1
SIZES = (5, 9, 2)  # of which a fifth is for testing, at least one


class Network(nn.Module):
    """A convolution with batch normalization and a head."""

    def __init__(self, num_classes=3, rate=0.0):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4, momentum=0.4)
        self.drop = nn.Dropout(rate)
        self.head = nn.Linear(4, num_classes)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(self.drop(x.mean((2, 3))))


def new(*args, seed=0):
    torch.manual_seed(seed)
    return Network(*args)


def clients_of(sizes=SIZES, standardize=False):
    rng = np.random.default_rng(1)
    num = sum(sizes)
    x = (2 + 3 * rng.normal(size=(num, 2, 5, 4))).astype(np.float32)
    client = np.repeat(np.arange(len(sizes)), sizes)
    y = rng.integers(3, size=num)
    return pfl.Federation.from_arrays(
        x, y, client=client, num_classes=3, standardize=standardize, channels_first=True
    )


def local(**options):
    return pfl.LocalTraining(optax.sgd(RATE), **options)


def trained(method, clients, model, rounds=2, out=None, plan="auto", **options):
    run = pfl.Run(method, clients, model, local(**options), execution=pfl.Execution(plan=plan))
    return run.train(rounds=rounds, progress=False, out=out)


def loop(module, clients, client, steps):
    """SGD in PyTorch on all of a client's training examples."""
    x, y = (torch.from_numpy(np.array(array)) for array in clients.examples(client, "train"))
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    module.train()
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y.long()).backward()
        optimizer.step()
    return module.eval()


def probabilities(module, x):
    with torch.no_grad():
        return module(torch.from_numpy(np.array(x))).softmax(-1).numpy()


@pytest.mark.parametrize("plan", ["map", "vmap"])
@pytest.mark.parametrize("sizes", [SIZES, (7,)])
def test_local_training_is_a_loop_of_pytorch_s(sizes, plan):
    """Parameters and batch statistics, also those of small clients, whose mini-batches are filled up."""
    clients = clients_of(sizes)
    result = trained(pfl.Local(), clients, new(), plan=plan, epochs=3)
    for client in range(len(sizes)):
        expected = loop(new(), clients, client, steps=6)
        module, state = result.export(client)
        for name, value in expected.state_dict().items():
            if not name.endswith("num_batches_tracked"):
                np.testing.assert_allclose(state[name], value, rtol=1e-4, atol=1e-5)
        x, _ = clients.examples(client)
        np.testing.assert_allclose(
            result.predict(x, client), probabilities(expected, x), rtol=1e-4, atol=1e-5
        )
        np.testing.assert_allclose(probabilities(module, x), result.predict(x, client), atol=1e-5)


def test_a_round_of_fedavg_is_the_mean_of_loops():
    clients = clients_of()
    sizes = [len(clients.examples(client, "train")[1]) for client in range(3)]
    result = trained(pfl.FedAvg(), clients, new(), rounds=1)
    loops = [loop(new(), clients, client, steps=1).state_dict() for client in range(3)]
    _, state = result.export(0)
    for name in ("conv.weight", "norm.running_mean", "norm.running_var", "head.bias"):
        mean = np.average([each[name].numpy() for each in loops], axis=0, weights=sizes)
        np.testing.assert_allclose(state[name], mean, rtol=1e-4, atol=1e-6)


def test_an_exported_model_loads_into_the_module(tmp_path):
    clients = clients_of()
    result = trained(pfl.Ditto(), clients, new(3, 0.5), batch_size=2)
    x, _ = clients.examples(2)
    module, state = result.export(client=2)
    torch.save(state, tmp_path / "client.pt")
    result.save_model(tmp_path / "client.safetensors", client=2)
    from safetensors.torch import load_file

    files = [
        torch.load(tmp_path / "client.pt", weights_only=True),
        load_file(tmp_path / "client.safetensors"),
    ]
    assert not module.training
    for read in files:
        own = new(3, 0.5, seed=9)
        own.load_state_dict(read)
        np.testing.assert_allclose(probabilities(own.eval(), x), result.predict(x, 2), atol=1e-5)
    assert np.abs(probabilities(module, x) - result.predict(x, 1)).max() > 1e-4


def test_an_exported_module_standardizes_as_training_did():
    """Its statistics come along, so that it is trained further with the same."""
    clients = clients_of(standardize=True)
    result = trained(pfl.Local(), clients, new())
    x, _ = clients.examples(1)
    module, state = result.export(client=1)
    np.testing.assert_allclose(probabilities(module, x), result.predict(x, 1), atol=1e-5)
    with pytest.raises(RuntimeError, match="scaling/mean/x"):
        new().load_state_dict(state)
    train = np.concatenate([clients.examples(client, "train")[0] for client in range(3)])
    np.testing.assert_allclose(
        state["scaling/mean/x"].ravel(), train.mean((0, 2, 3)), rtol=1e-4, atol=1e-5
    )
    again = trained(pfl.Local(), clients_of((8, 8), standardize=True), module, rounds=1)
    _, further = again.export(0)
    np.testing.assert_array_equal(further["scaling/mean/x"], state["scaling/mean/x"])


def test_a_mixture_is_exported_as_an_ensemble():
    clients = clients_of()
    result = trained(pfl.FedEM(components=2), clients, Network)
    x, _ = clients.examples(1)
    module, state = result.export(client=1)
    np.testing.assert_allclose(probabilities(module, x), result.predict(x, 1), atol=1e-5)
    members = [state[f"members.{number}.head.weight"].numpy() for number in (0, 1)]
    assert state["weights"].shape == (2,) and np.abs(members[0] - members[1]).max() > 1e-2


def test_a_run_is_loaded_with_the_module(tmp_path):
    clients = clients_of()
    result = trained(pfl.Ditto(), clients, new(), out=tmp_path / "run")
    x, _ = clients.examples(2)
    again = pfl.load(tmp_path / "run", clients=clients, model=new(), local=local())
    np.testing.assert_allclose(again.predict(x), result.predict(x), atol=1e-6)
    module, _ = again.export(client=2)
    np.testing.assert_allclose(probabilities(module, x), result.predict(x, 2), atol=1e-5)
    with pytest.raises(pfl.ArgumentError, match=r"^model: "):
        pfl.load(tmp_path / "run", clients=clients, model=new(seed=1), local=local())


class Tokens(nn.Module):
    """Embedded tokens, read by an LSTM of two layers with dropout between them."""

    def __init__(self, num_classes):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 8, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x):
        return self.head(self.lstm(self.embed(x))[0][:, -1])


def test_a_network_of_tokens_learns():
    """Which of two tokens comes last, in mini-batches whose last is odd."""
    rng = np.random.default_rng(0)
    x = rng.integers(2, 11, size=(90, 4))
    y = rng.integers(2, size=90)
    x[:, -1] = y
    clients = pfl.Federation.from_arrays(x, y, client=np.arange(90) % 4)
    training = pfl.LocalTraining(optax.adam(0.02), batch_size=7)
    run = pfl.Run(pfl.FedAvg(), clients, Tokens, training)
    assert run.train(rounds=8, progress=False).accuracy > 0.9


@pytest.mark.parametrize(
    ("trainable", "names"),
    [
        ("head", {"head/weight", "head/bias"}),
        (pfl.adapters.lora(rank=2), {"head/weight:a", "conv/weight:a"}),
    ],
)
def test_a_part_of_a_module_is_trained(trainable, names):
    clients = clients_of()
    module = new()
    model = pfl.models.from_torch(module, trainable=trainable)
    result = trained(pfl.FedAvg(), clients, model)
    x, _ = clients.examples(0)
    exported, state = result.export(0)
    np.testing.assert_allclose(probabilities(exported, x), result.predict(x, 0), atol=1e-5)
    before = module.state_dict()
    changed = {name for name, value in state.items() if not torch.equal(value, before[name])}
    trains_all = trainable != "head"
    weights = {"head.weight", "conv.weight"} if trains_all else {"head.weight", "head.bias"}
    assert weights == {name for name in changed if not name.startswith("norm.")}


def test_parameters_without_gradients_are_frozen():
    clients = clients_of()
    module = new()
    module.conv.requires_grad_(False)
    result = trained(pfl.FedAvg(), clients, pfl.models.from_torch(module))
    _, state = result.export(0)
    assert torch.equal(state["conv.weight"], module.conv.weight)
    assert not torch.equal(state["head.weight"], module.head.weight)


class Branching(Network):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


class Unsupported(Network):
    def forward(self, x):
        return super().forward(x + torch.special.airy_ai(x))


class Random(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, num_classes).random_(3))

    def forward(self, x):
        return x.mean((2, 3)) @ self.weight


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Branching, "depends on the values of tensors"),
        (Unsupported, "uses the operator aten::special_airy_ai"),
        (Random, "uses the operator aten::random_"),
        (nn.Flatten(), r"returns outputs of shape \(batch, 40\); accepted: \(batch, 3\)"),
        (lambda: Network(4), r"returns outputs of shape \(batch, 4\); accepted: \(batch, 3\)"),
        (lambda: nn.Conv2d(7, 3, 3), "convolutions take channels first"),
        (lambda: nn.Sequential(Network(), nn.Softmax(-1)), "leave out the softmax at its end"),
    ],
)
def test_bad_modules_are_refused_in_one_line(model, text):
    with pytest.raises(pfl.ArgumentError) as info:
        pfl.Run(pfl.FedAvg(), clients_of(), model, local())
    assert re.search(text, str(info.value)), info.value
    assert str(info.value).startswith("model") and "\n" not in str(info.value)


@pytest.mark.parametrize("value", [3, "resnet18"])
def test_other_values_are_no_modules(value):
    with pytest.raises(pfl.ArgumentError, match=r"^module=.*: accepted: a torch.nn.Module"):
        pfl.models.from_torch(value)
