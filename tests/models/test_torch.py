"""PyTorch modules as models: parameters, gradients, statistics and predictions are PyTorch's own."""

import importlib.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pfljax as pfl
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Training
from pfljax.models.rewriting import equations

torch = pytest.importorskip("torch", reason="needs the extra torch")
if importlib.util.find_spec("torchax") is None:
    pytest.skip("needs the extra torch", allow_module_level=True)
nn = torch.nn

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(7, 2, 6, 5)).astype(np.float32)
CLASSES = RNG.integers(3, size=7).astype(np.int32)


class Convolutional(nn.Module):
    """Convolutions, batch normalization, pooling and dropout."""

    def __init__(self, num_classes=3, rate=0.0):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3, padding=1, stride=2, groups=2),
        )
        self.drop = nn.Dropout(rate)
        self.head = nn.Linear(12, num_classes)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.body(x)).flatten(1)))


class Recurrent(nn.Module):
    """Embedded tokens, read by an LSTM."""

    def __init__(self, num_classes=3):
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.lstm = nn.LSTM(5, 6, batch_first=True)
        self.head = nn.Linear(6, num_classes)

    def forward(self, x):
        outputs, _ = self.lstm(self.embed(x))
        return self.head(outputs[:, -1])


class Tokens(nn.Module):
    """A Transformer with a constant buffer and a parameter of its own."""

    def __init__(self, num_classes=3):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.start = nn.Parameter(torch.randn(1, 1, 8))
        self.register_buffer("positions", torch.arange(5))
        self.places = nn.Embedding(5, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x):
        h = self.embed(x) + self.places(self.positions)
        h = torch.cat([self.start.expand(len(x), -1, -1), h], dim=1)
        return self.head(self.block(h)[:, 0])


class Grouped(nn.Module):
    """Group normalization of images whose mean is far from 0, and of vectors."""

    def __init__(self, num_classes=3):
        super().__init__()
        self.images = nn.GroupNorm(2, 4, eps=1e-3)
        self.vectors = nn.GroupNorm(5, 10, affine=False)
        self.conv = nn.Conv2d(2, 4, 3)
        self.head = nn.Linear(4, 10)
        self.last = nn.Linear(10, num_classes)
        nn.init.uniform_(self.images.weight)
        nn.init.uniform_(self.images.bias)

    def forward(self, x):
        x = self.images(self.conv(x) + 20)
        return self.last(self.vectors(self.head(torch.tanh(x).mean((2, 3)))))


TEXTS = RNG.integers(11, size=(7, 5)).astype(np.int32)
CASES = [(Convolutional, IMAGES), (Recurrent, TEXTS), (Tokens, TEXTS), (Grouped, IMAGES)]
IDS = ["convolutional", "recurrent", "tokens", "grouped"]


def new(create, *args, seed=0):
    torch.manual_seed(seed)
    return create(*args)


def model_of(module, x):
    return pfl.Model(module, jnp.zeros((1, *x.shape[1:]), x.dtype))


def tensor(x):
    return torch.from_numpy(np.array(x))


def named(params):
    """A tree of parameters by PyTorch's names."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def gradients(module, x, y):
    """PyTorch's losses and gradients in training mode, which moves the module's statistics."""
    module.train()
    module.zero_grad()
    losses = nn.functional.cross_entropy(module(tensor(x)), tensor(y).long(), reduction="none")
    losses.mean().backward()
    return losses.detach().numpy(), {name: p.grad.numpy() for name, p in module.named_parameters()}


@pytest.mark.parametrize(("create", "x"), CASES, ids=IDS)
def test_values_and_gradients_are_pytorch_s(create, x):
    module = new(create)
    model = model_of(module, x)
    params = model.init(jax.random.key(0))
    before = {name: value.numpy().copy() for name, value in module.state_dict().items()}
    for name, value in named(params).items():
        np.testing.assert_array_equal(value, before[name])

    module.eval()
    with torch.no_grad():
        expected = module(tensor(x)).numpy()
    np.testing.assert_allclose(model.apply(params, x), expected, rtol=1e-5, atol=1e-6)

    def mean_loss(params):
        losses = model.loss(params, x, CLASSES, jax.random.key(1))
        return losses.mean(), losses

    grads, losses = jax.grad(mean_loss, has_aux=True)(params)
    expected_losses, expected_grads = gradients(module, x, CLASSES)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5, atol=1e-6)
    for name, grad in expected_grads.items():
        np.testing.assert_allclose(named(grads)[name], grad, rtol=1e-4, atol=1e-6)

    # A statistic's gradient is its old value less the new one.
    after = module.state_dict()
    for path in model.network.statistics:
        name = ".".join(path)
        moved = before[name] - after[name].numpy()
        assert np.abs(moved).max() > 1e-3
        np.testing.assert_allclose(named(grads)[name], moved, rtol=1e-4, atol=1e-6)


def test_parameters_are_named_as_in_pytorch_and_buffers_are_statistics_or_constants():
    model = model_of(new(Convolutional), IMAGES)
    shapes = named(model.network.shapes)
    assert shapes.keys() == {
        *(name for name, _ in Convolutional().named_parameters()),
        "body.1.running_mean",
        "body.1.running_var",
    }
    assert model.network.momenta == [pytest.approx(0.9)]
    assert model.layers == (("body",), ("head",))
    assert "positions" not in named(model_of(new(Tokens), TEXTS).network.shapes)


@pytest.mark.parametrize("real", [1, 2, 5])
def test_statistics_are_those_of_real_examples(real):
    """Whatever the padding is; a single example of one value per channel has a variance of 0."""
    x = IMAGES[:, :, 0, 0]
    module = new(nn.Sequential, nn.BatchNorm1d(2, momentum=0.3), nn.Linear(2, 3))
    model = model_of(module, x)
    params = model.init(jax.random.key(0))
    mask = np.arange(7) < real
    _, written = model.forward(params, x, Training(jax.random.key(0), mask))
    mean = x[:real].mean(axis=0)
    var = x[:real].var(axis=0, ddof=1) if real > 1 else np.zeros(2)
    np.testing.assert_allclose(written["0"]["running_mean"], 0.3 * mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(written["0"]["running_var"], 0.7 + 0.3 * var, rtol=1e-5, atol=1e-6)


def test_statistics_without_momentum_are_means_over_steps():
    module = new(nn.Sequential, nn.BatchNorm2d(2, momentum=None), nn.Flatten(), nn.Linear(60, 3))
    model = model_of(module, IMAGES)
    params = model.init(jax.random.key(0))
    for rows in (IMAGES[:3], IMAGES[3:], IMAGES[:2]):
        module.train()(tensor(rows))
        _, params = model.forward(params, rows, jax.random.key(0))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        expected = module.state_dict()[f"0.{name}"].numpy()
        np.testing.assert_allclose(params["0"][name], expected, rtol=1e-5)


def test_dropout_is_in_training_alone_and_has_its_own_key():
    module = new(Convolutional, 3, 0.5)
    model = model_of(module, IMAGES)
    params = model.init(jax.random.key(0))
    assert model.network.stochastic and not model_of(Convolutional(), IMAGES).network.stochastic
    drawn = [model.apply(params, IMAGES, jax.random.key(number)) for number in (0, 0, 1)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert np.abs(drawn[0] - drawn[2]).max() > 1e-3
    module.eval()
    with torch.no_grad():
        expected = module(tensor(IMAGES)).numpy()
    np.testing.assert_allclose(model.apply(params, IMAGES), expected, rtol=1e-5, atol=1e-6)


def test_dropout_keeps_its_share():
    model = model_of(nn.Sequential(nn.Dropout(0.25), nn.Linear(1, 1)), np.ones((1, 1), np.float32))
    params = {"1": {"weight": jnp.ones((1, 1)), "bias": jnp.zeros(1)}}
    drawn = model.apply(params, jnp.ones((2000, 1)), jax.random.key(0))
    np.testing.assert_allclose(np.unique(drawn), [0, 4 / 3], rtol=1e-6)
    assert np.isclose((drawn == 0).mean(), 0.25, atol=0.05)


class Layers(nn.Module):
    """Recurrent layers with all that they return, from initial states that are zeros or parameters."""

    def __init__(self, layers, is_given, length):
        super().__init__()
        self.layers = layers
        self.is_given = is_given
        widths = [layers.proj_size or layers.hidden_size]
        if isinstance(layers, nn.LSTM):
            widths.append(layers.hidden_size)
        directions = 2 if layers.bidirectional else 1
        number = layers.num_layers * directions
        if is_given:
            starts = [torch.randn(number, 1, width) for width in widths]
            self.starts = nn.ParameterList(starts)
        self.head = nn.Linear(directions * length * widths[0] + number * sum(widths), 3)

    def forward(self, x):
        start = None
        if self.is_given:
            start = tuple(states.expand(-1, len(x), -1).contiguous() for states in self.starts)
            start = start if isinstance(self.layers, nn.LSTM) else start[0]
        x = x if self.layers.batch_first else x.swapaxes(0, 1)
        outputs, last = self.layers(x, start)
        outputs = outputs if self.layers.batch_first else outputs.swapaxes(0, 1)
        last = last if isinstance(last, tuple) else (last,)
        features = [outputs.flatten(1), *(states.swapaxes(0, 1).flatten(1) for states in last)]
        return self.head(torch.cat(features, dim=1))


SEQUENCES = RNG.normal(size=(7, 7, 5)).astype(np.float32)


@pytest.mark.parametrize(
    ("create", "options", "given", "length"),
    [
        (nn.LSTM, {"batch_first": True}, False, 7),
        (nn.LSTM, {"num_layers": 2, "bidirectional": True, "proj_size": 3}, True, 2),
        (nn.LSTM, {"proj_size": 2, "bias": False}, False, 2),
        (nn.LSTM, {"batch_first": True}, True, 1),
        (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True}, False, 7),
        (nn.GRU, {"bias": False}, True, 2),
        (nn.RNN, {"num_layers": 2}, True, 7),
        (nn.RNN, {"nonlinearity": "relu", "bidirectional": True, "batch_first": True}, False, 2),
    ],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_recurrent_layers_are_pytorch_s(create, options, given, length):
    x = SEQUENCES[:, :length]
    module = new(lambda: Layers(create(5, 4, **options), given, length))
    model = model_of(module, x)
    params = model.init(jax.random.key(0))
    expected = module(tensor(x)).detach().numpy()
    np.testing.assert_allclose(model.apply(params, x), expected, rtol=1e-6, atol=1e-6)

    grads = jax.grad(lambda params: model.loss(params, x, CLASSES, jax.random.key(1)).mean())
    _, expected_grads = gradients(module, x, CLASSES)
    found = named(grads(params))
    for name, expected_grad in expected_grads.items():
        np.testing.assert_allclose(found[name], expected_grad, rtol=1e-5, atol=1e-6)


def test_recurrent_layers_are_loops_whose_programs_do_not_grow_with_the_length():
    module = new(nn.LSTM, 5, 6)

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = module

        def forward(self, x):
            return self.lstm(x.swapaxes(0, 1))[0][-1]

    sizes = []
    for length in (3, 300):
        x = np.zeros((2, length, 5), np.float32)
        model = model_of(Last(), x)
        program = jax.make_jaxpr(model.apply)(model.network.shapes, x)
        sizes.append(len(list(equations(program.jaxpr))))
    assert sizes[0] == sizes[1]


def test_dropout_is_between_recurrent_layers_in_training_alone():
    """The first layer's outputs are 1; the second one passes on what dropout makes of them."""
    rate = 0.25
    layers = nn.RNN(1, 50, 2, nonlinearity="relu", dropout=rate, batch_first=True)
    values = {name: torch.zeros_like(value) for name, value in layers.state_dict().items()}
    values["bias_ih_l0"] += 1
    values["weight_ih_l1"] = torch.eye(50)
    layers.load_state_dict(values)

    class Outputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            return self.layers(x)[0].flatten(1)

    x = np.zeros((8, 10, 1), np.float32)
    model = model_of(Outputs(), x)
    params = model.init(jax.random.key(0))
    np.testing.assert_array_equal(model.apply(params, x), np.ones((8, 500)))
    drawn = [np.asarray(model.apply(params, x, jax.random.key(number))) for number in (0, 0, 1)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert np.any(drawn[0] != drawn[2])
    np.testing.assert_allclose(np.unique(drawn[0]), [0, 1 / (1 - rate)], rtol=1e-6)
    assert np.isclose((drawn[0] == 0).mean(), rate, atol=0.03)
    assert model.network.stochastic


class Packs(nn.Module):
    def __init__(self, num_classes=3):
        super().__init__()
        self.lstm = nn.LSTM(1, num_classes, batch_first=True)

    def forward(self, x):
        lengths = torch.full((len(x),), 3)
        packed = nn.utils.rnn.pack_padded_sequence(x[..., None], lengths, batch_first=True)
        return self.lstm(packed)[1][0][-1]


def test_a_class_has_other_initial_parameters_for_each_key_by_its_own_distributions():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(100, 400)
            self.scale = nn.Parameter(3 + 2 * torch.randn(40_000))
            self.ones = nn.Parameter(torch.ones(2))
            nn.init.xavier_normal_(self.dense.weight, gain=2.0)

        def forward(self, x):
            return self.dense(x) * self.ones[0] + self.scale.mean()

    model = model_of(Wide, np.zeros((1, 100), np.float32))
    one, other = (model.init(jax.random.key(number)) for number in (0, 1))
    assert not model.network.fixed
    assert np.abs(one["dense"]["weight"] - other["dense"]["weight"]).max() > 0.1
    std = 2 * np.sqrt(2 / 500)
    np.testing.assert_allclose(np.std(one["dense"]["weight"]), std, rtol=0.02)
    np.testing.assert_allclose(np.mean(one["scale"]), 3, atol=0.05)
    np.testing.assert_allclose(np.std(one["scale"]), 2, rtol=0.02)
    assert 0.09 < np.abs(one["dense"]["bias"]).max() <= 0.1  # uniform within 1 / sqrt(100)
    np.testing.assert_array_equal(one["ones"], [1, 1])
    same = jax.jit(jax.vmap(model.init))(jax.random.split(jax.random.key(3), 2))
    assert np.abs(same["scale"][0] - same["scale"][1]).max() > 1


def test_a_module_is_the_initial_model_and_stays_as_it_is():
    module = new(Convolutional)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = pfl.models.from_torch(module)
    clients = clients_of(IMAGES, CLASSES, [0, 0, 0, 1, 1, 1, 1])
    pfl.Run(pfl.FedAvg(), clients, model, sgd()).train(rounds=1, progress=False)
    assert module.training and not hasattr(module.head, "_forward_hooks_with_kwargs_set")
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    with pytest.raises(ArgumentError, match="initial models must differ"):
        pfl.Run(pfl.FedEM(components=2), clients, model, sgd()).train(rounds=1, progress=False)


def sgd(batch_size=0, epochs=1):
    return pfl.LocalTraining(optax.sgd(0.1), batch_size=batch_size, epochs=epochs)


def clients_of(x, y, client, **options):
    options = {"standardize": False, "num_classes": 3} | options
    return pfl.Federation.from_arrays(x, y, client=np.asarray(client), **options)


PAGE = Path(__file__).parents[2] / "docs/howto/from-pytorch.md"
OPTIMIZERS = re.findall(r"^\| `(\w+\(.*?\))` \| `(optax\..*?\))`", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("in_torch", "in_optax"), OPTIMIZERS)
def test_optimizers_of_the_table_are_pytorch_s(in_torch, in_optax):
    """Five steps on a quadratic, whose gradients are both small and large."""
    curvature = np.array([0.1, 1.0, 3.0], np.float32)
    weights = torch.tensor([2.0, -1.0, 0.5], requires_grad=True)
    params = jnp.array([2.0, -1.0, 0.5])
    clips = in_torch.startswith("clip_grad_norm_")
    arguments = in_torch.partition("(")[2]
    make = "SGD" if clips else in_torch.partition("(")[0]
    options = {"lr": 0.1} if clips else eval(f"dict({arguments}")
    optimizer = getattr(torch.optim, make)([weights], **options)
    transform = eval(in_optax, {"optax": optax})
    state = transform.init(params)
    for _ in range(5):
        optimizer.zero_grad()
        (torch.from_numpy(curvature) * weights**2 / 2).sum().backward()
        if clips:
            torch.nn.utils.clip_grad_norm_([weights], 1.0)
        optimizer.step()
        updates, state = transform.update(curvature * params, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params, weights.detach().numpy(), rtol=2e-4, atol=1e-6)


def test_the_table_has_rows():
    assert len(OPTIMIZERS) >= 9


class TwoLayers(nn.Module):
    """Two layers, with a function of the first one's outputs between them."""

    def __init__(self, num_classes=3):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, num_classes)

    def between(self, x):
        return x

    def forward(self, x):
        return self.last(self.between(self.first(x)) + self.first(x))


class InNoGrad(TwoLayers):
    def between(self, x):
        with torch.no_grad():
            return torch.tanh(x)


class Decorated(TwoLayers):
    @torch.no_grad()
    def between(self, x):
        return torch.tanh(x)


class InInferenceMode(TwoLayers):
    def between(self, x):
        with torch.inference_mode():
            values = torch.tanh(x)
        return values.clone()


class WithData(TwoLayers):
    def between(self, x):
        return torch.tanh(x).data


class Detached(TwoLayers):
    def between(self, x):
        return x + (x.round() - x).detach()


class Checkpointed(TwoLayers):
    reentrant = False

    def between(self, x):
        from torch.utils.checkpoint import checkpoint

        return checkpoint(torch.tanh, x, use_reentrant=self.reentrant)


class CheckpointedAgain(Checkpointed):
    reentrant = True


MEAN = torch.arange(6.0)


class Constants(TwoLayers):
    """Tensors of PyTorch's own: of the file, in a list, on a device, of NumPy, and of half precision."""

    def __init__(self, num_classes=3):
        super().__init__(num_classes)
        self.scales = [torch.ones(6) * 2, {"half": torch.full((6,), 0.5).half()}]

    def between(self, x):
        x = (x - MEAN) * self.scales[0] * self.scales[1]["half"]
        x = x + torch.from_numpy(np.arange(6, dtype=np.float32))
        return torch.where(x > 0, x, torch.tensor(0.0, device="cpu"))


VECTORS = RNG.normal(size=(7, 6)).astype(np.float32)


@pytest.mark.parametrize(
    "create",
    [
        InNoGrad,
        Decorated,
        InInferenceMode,
        WithData,
        Detached,
        Checkpointed,
        CheckpointedAgain,
        Constants,
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_gradients_flow_where_pytorch_s_do(create):
    module = new(create)
    model = model_of(module, VECTORS)
    params = model.init(jax.random.key(0))

    def mean_loss(params):
        return model.loss(params, VECTORS, CLASSES, jax.random.key(1)).mean()

    _, expected = gradients(module, VECTORS, CLASSES)
    grads = named(jax.grad(mean_loss)(params))
    # Re-entrant checkpoints have no gradients if their inputs need none.
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        np.testing.assert_allclose(grads[name], grad, rtol=1e-4, atol=1e-6)


class Applied(nn.Module):
    """A function of a parameter, added to the inputs."""

    def __init__(self, function, values):
        super().__init__()
        self.function = function
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, x):
        return x + 2 * self.function(self.values).sum()


F = nn.functional
BOUNDS = [-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 6.0, 7.0]
ROWS = [[0.0, 0.0, 0.0], [1.0, 2.0, 2.0]]
TIES = [[1.0, 1.0, 0.0], [2.0, 2.0, 2.0]]
ONES = torch.ones(2, 3)
WHERE_CASES_MEET = {
    "abs": (torch.abs, BOUNDS),
    "clamp": (lambda x: x.clamp(-1, 1), BOUNDS),
    "clamp by arrays": (lambda x: x.clamp(torch.tensor(-1.0), torch.tensor(1.0)), BOUNDS),
    "clamp from below": (lambda x: x.clamp(min=0), BOUNDS),
    "clamp_max": (lambda x: torch.clamp_max(x, 6), BOUNDS),
    "clip in place": (lambda x: (1 * x).clip_(-1, 1), BOUNDS),
    "hardsigmoid": (F.hardsigmoid, BOUNDS),
    "hardswish": (F.hardswish, BOUNDS),
    "hardtanh": (F.hardtanh, BOUNDS),
    "l1_loss": (lambda x: F.l1_loss(x, torch.zeros_like(x)), BOUNDS),
    "leaky_relu": (F.leaky_relu, BOUNDS),
    "leaky_relu in place": (lambda x: F.leaky_relu(1 * x, 0.2, inplace=True), BOUNDS),
    "logsigmoid": (F.logsigmoid, BOUNDS),
    "relu6": (F.relu6, BOUNDS),
    "relu6 in place": (lambda x: F.relu6(1 * x, inplace=True), BOUNDS),
    "sinc": (torch.sinc, BOUNDS),
    "threshold": (lambda x: F.threshold(x, 1.0, 0.0), BOUNDS),
    "to the power 0": (lambda x: x**0, BOUNDS),
    "cdist": (lambda x: torch.cdist(x, x.detach()), ROWS),
    "cosine": (lambda x: F.cosine_similarity(x, ONES), ROWS),
    "distance": (lambda x: torch.dist(x, x.detach()), ROWS),
    "norm": (torch.norm, [0.0, 0.0]),
    "norm of rows": (lambda x: x.norm(dim=1, keepdim=True), ROWS),
    "norm, p = 1": (lambda x: x.norm(p=1, dim=1), ROWS),
    "normalize": (lambda x: F.normalize(x, dim=1, eps=1e-3), ROWS),
    "pdist": (torch.pdist, [[0.0, 1.0], [0.0, 1.0], [1.0, 3.0]]),
    "std": (lambda x: x.std(1), ROWS),
    "max": (lambda x: x.max(1).values, TIES),
    "max of all": (torch.max, TIES),
    "max_pool": (lambda x: F.max_pool1d(x[None], 2, 1), TIES),
    "median": (lambda x: x.median(1).values, TIES),
    "min": (lambda x: x.min(1, keepdim=True).values, TIES),
}


@pytest.mark.parametrize(
    ("function", "values"), WHERE_CASES_MEET.values(), ids=list(WHERE_CASES_MEET)
)
def test_derivatives_where_two_cases_meet_are_pytorch_s(function, values):
    module = Applied(function, values)
    x = np.zeros((2, 3), np.float32)
    outputs = module(tensor(x))
    outputs.sum().backward()

    model = model_of(module, x)
    params = model.init(jax.random.key(0))
    np.testing.assert_allclose(model.apply(params, x), outputs.detach().numpy(), rtol=1e-5)
    (grad,) = jax.tree.leaves(jax.grad(lambda params: model.apply(params, x).sum())(params))
    np.testing.assert_allclose(grad, module.values.grad.numpy(), rtol=1e-4, atol=1e-6)


LAYERS = {
    "adaptive max pooling": lambda x: F.adaptive_max_pool2d(x, (3, 4)),
    "adaptive max pooling of one axis": lambda x: F.adaptive_max_pool2d(x, (None, 1)),
    "adaptive max pooling of sequences": lambda x: F.adaptive_max_pool1d(x[0], 3),
    "max pooling with dilation": lambda x: F.max_pool2d(x, 2, 1, dilation=2),
    "max pooling with dilation and strides": lambda x: F.max_pool2d(x, 2, 2, 1, dilation=2),
    "positions of the largest": lambda x: x * F.adaptive_max_pool2d(x, 1, return_indices=True)[1],
}


@pytest.mark.parametrize("function", LAYERS.values(), ids=list(LAYERS))
def test_layers_that_torchax_lacks_are_pytorch_s(function):
    def weighted(x):
        values = function(x)
        return values * torch.arange(1.0, 1 + values.numel()).reshape(values.shape)

    module = Applied(weighted, IMAGES)
    x = np.zeros((2, 3), np.float32)
    outputs = module(tensor(x))
    outputs.sum().backward()

    model = model_of(module, x)
    params = model.init(jax.random.key(0))
    np.testing.assert_allclose(model.apply(params, x), outputs.detach().numpy(), rtol=1e-4)
    (grad,) = jax.tree.leaves(jax.grad(lambda params: model.apply(params, x).sum())(params))
    expected = module.values.grad.numpy()
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class OwnGradient(TwoLayers):
    def between(self, x):
        return Sign.apply(x)


class Stateful(TwoLayers):
    """Adds the last mini-batch's mean to the next one."""

    last_mean = 0.0

    def between(self, x):
        before = self.last_mean
        self.last_mean = x.mean(0)
        return x + before


class StatefulList(TwoLayers):
    def __init__(self, num_classes=3):
        super().__init__(num_classes)
        self.means = []

    def between(self, x):
        self.means.append(x.mean(0))
        return x + sum(self.means)


class Written(TwoLayers):
    def between(self, x):
        out = torch.zeros(len(x), 6, device="cpu")
        out[:, 0] = x[:, 0]
        return out


class DataWritten(TwoLayers):
    def between(self, x):
        x.data.mul_(2)
        return x


class Chosen(TwoLayers):
    def between(self, x):
        return x[x[:, 0] > 0]


class InNumPy(TwoLayers):
    def between(self, x):
        return torch.from_numpy(np.tanh(x.detach().numpy()))


@pytest.mark.parametrize(
    ("create", "text"),
    [
        (OwnGradient, "uses Sign, a torch.autograd.Function with a gradient of its own"),
        (Stateful, "reads tensors that an earlier one stored in an attribute"),
        (StatefulList, "reads tensors that an earlier one stored in an attribute"),
        (Written, "writes into a tensor that is neither an input, a parameter nor a buffer"),
        (DataWritten, "writes into x.data"),
        (Chosen, "depends on the values of tensors"),
        (InNumPy, "depends on the values of tensors"),
        (Packs, "uses the operator aten::_pack_padded_sequence"),
        (lambda: nn.LazyLinear(3), "has lazy layers, so that weight has no shape yet"),
        (nn.LazyLinear(3), "has lazy layers, so that weight has no shape yet"),
        (nn.Linear(6, 3, device="meta"), "has weight on the device meta"),
        (nn.Linear(6, 3).requires_grad_(False), "has no parameter with requires_grad"),
    ],
)
def test_what_jax_cannot_compute_is_refused_in_one_line(create, text):
    with pytest.raises(ArgumentError, match=text) as info:
        pfl.models.build(create, (6,), "classification", 3)
    assert info.value.argument == "model" and "\n" not in str(info.value)


def test_stored_activations_that_nothing_reads_are_accepted():
    class Stores(TwoLayers):
        def between(self, x):
            self.activations = x
            return x

    module = new(Stores)
    model = model_of(module, VECTORS)
    params = model.init(jax.random.key(0))
    expected = module(tensor(VECTORS)).detach().numpy()
    np.testing.assert_allclose(model.apply(params, VECTORS), expected, rtol=1e-5, atol=1e-6)


def test_modules_with_weight_norm_are_copied():
    with pytest.warns(FutureWarning):
        module = torch.nn.utils.weight_norm(nn.Linear(6, 3))
    model = model_of(module, VECTORS)
    expected = module(tensor(VECTORS)).detach().numpy()
    params = model.init(jax.random.key(0))
    np.testing.assert_allclose(model.apply(params, VECTORS), expected, rtol=1e-5, atol=1e-6)
    assert named(params).keys() == {"bias", "weight_g", "weight_v"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_parameters_become_float32(dtype):
    module = new(nn.Linear, 6, 3).to(dtype)
    params = model_of(module, VECTORS).init(jax.random.key(0))
    np.testing.assert_array_equal(named(params)["weight"], module.weight.detach().float().numpy())
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}


def function(num_classes):
    """Layers whose weights code writes, also from a state dict."""
    layers = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, num_classes))
    layers[0].load_state_dict(FIRST)
    layers[1].weight.data.normal_(3.0, 0.1)
    return layers


FIRST = {name: value + 1 for name, value in nn.Linear(6, 5).state_dict().items()}


def test_a_function_creates_a_module_for_each_key():
    model = pfl.models.build(function, (6,), "classification", 3)
    first, second = (named(model.init(jax.random.key(seed))) for seed in (0, 1))
    assert np.abs(first["1.weight"] - second["1.weight"]).max() > 0.01
    assert abs(first["1.weight"].mean() - 3) < 0.2
    for params in (first, second):
        np.testing.assert_array_equal(params["0.weight"], FIRST["weight"].numpy())


class Frozen(nn.Module):
    """A layer with given weights that are not trained."""

    def __init__(self, num_classes=3):
        super().__init__()
        self.first = nn.Linear(6, 5).requires_grad_(False)
        self.first.load_state_dict(FIRST)
        self.last = nn.Linear(5, num_classes)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


@pytest.mark.parametrize("create", [Frozen, Frozen(), pfl.Model(Frozen())])
def test_parameters_without_gradients_are_not_trained(create):
    model = pfl.models.build(create, (6,), "classification", 3)
    params = model.init(jax.random.key(0))
    assert {"last/weight", "last/bias"} == {name.replace(".", "/") for name in named(params)}
    module, state = model.network.exported(params)
    for name, value in FIRST.items():
        assert torch.equal(state[f"first.{name}"], value)
    expected = module(tensor(VECTORS)).detach().numpy()
    np.testing.assert_allclose(model.apply(params, VECTORS), expected, rtol=1e-5, atol=1e-6)
    text = "accepted: networks without frozen parts"
    if not isinstance(create, type):
        with pytest.raises(ArgumentError, match=text):
            pfl.models.Networks({"a": create, "b": nn.Linear(6, 3)})
