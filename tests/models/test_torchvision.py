"""Weights of torchvision's networks and of CLIP's image encoder, against plain PyTorch with the same names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import pfljax as pfl

torch = pytest.importorskip("torch", reason="needs the extra torch")
nn = torch.nn
pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(3, 33, 32, 3)).astype(np.float32)


def convolution(inputs, width, size, stride=1, groups=1):
    return nn.Conv2d(inputs, width, size, stride, (size - 1) // 2, groups=groups, bias=False)


class Block(nn.Module):
    """torchvision's BasicBlock and Bottleneck."""

    def __init__(self, inputs, width, stride, bottleneck):
        super().__init__()
        if bottleneck:
            layers = [(inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        else:
            layers = [(inputs, width, 3, stride), (width, width, 3, 1)]
        for number, (before, after, size, step) in enumerate(layers, 1):
            setattr(self, f"conv{number}", convolution(before, after, size, step))
            setattr(self, f"bn{number}", nn.BatchNorm2d(after))
        self.num = len(layers)
        self.downsample = None
        if stride != 1 or inputs != after:
            shortcut = convolution(inputs, after, 1, stride)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(after))

    def forward(self, x):
        y = x
        for number in range(1, self.num + 1):
            y = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(y))
            if number < self.num:
                y = torch.relu(y)
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, outputs, blocks, bottleneck, width):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        inputs = width
        for stage, num in enumerate(blocks):
            layers = []
            for number in range(num):
                stride = 2 if stage and not number else 1
                layers.append(Block(inputs, width * 2**stage, stride, bottleneck))
                inputs = width * 2**stage * (4 if bottleneck else 1)
            setattr(self, f"layer{stage + 1}", nn.Sequential(*layers))
        self.stages = len(blocks)
        self.fc = nn.Linear(inputs, outputs)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for stage in range(self.stages):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.fc(x.mean((2, 3)))


def activated(inputs, width, size, stride=1, groups=1):
    conv = convolution(inputs, width, size, stride, groups)
    return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU6())


class Inverted(nn.Module):
    def __init__(self, inputs, width, stride, expansion):
        super().__init__()
        hidden = expansion * inputs
        layers = [activated(inputs, hidden, 1)] if expansion != 1 else []
        layers += [activated(hidden, hidden, 3, stride, hidden)]
        layers += [convolution(hidden, width, 1), nn.BatchNorm2d(width)]
        self.conv = nn.Sequential(*layers)
        self.adds = stride == 1 and inputs == width

    def forward(self, x):
        return x + self.conv(x) if self.adds else self.conv(x)


class MobileNetV2(nn.Module):
    def __init__(self, outputs, stages, first, last):
        super().__init__()
        layers = [activated(3, first, 3, 2)]
        inputs = first
        for expansion, width, num, stride in stages:
            for number in range(num):
                layers.append(Inverted(inputs, width, stride if not number else 1, expansion))
                inputs = width
        layers.append(activated(inputs, last, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(last, outputs))

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


class Attended(nn.Module):
    """A block of OpenAI's CLIP."""

    def __init__(self, width, heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_1 = nn.LayerNorm(width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)}
        )

    def forward(self, x):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        y = self.mlp["c_fc"](self.ln_2(x))
        return x + self.mlp["c_proj"](y * torch.sigmoid(1.702 * y))


class Visual(nn.Module):
    def __init__(self, outputs, width, depth, heads, patch, num):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, patch, patch, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(width))
        self.positional_embedding = nn.Parameter(torch.randn(num + 1, width))
        self.ln_pre = nn.LayerNorm(width)
        blocks = nn.ModuleList([Attended(width, heads) for _ in range(depth)])
        self.transformer = nn.ModuleDict({"resblocks": blocks})
        self.ln_post = nn.LayerNorm(width)
        self.proj = nn.Parameter(torch.randn(width, outputs))

    def forward(self, x):
        x = self.conv1(x).flatten(2).transpose(1, 2)
        first = self.class_embedding.expand(len(x), 1, -1)
        x = self.ln_pre(torch.cat([first, x], dim=1) + self.positional_embedding)
        for block in self.transformer["resblocks"]:
            x = block(x)
        return self.ln_post(x[:, 0]) @ self.proj


class CLIP(nn.Module):
    """With a part of the text encoder, which is left out."""

    def __init__(self, *sizes):
        super().__init__()
        self.visual = Visual(*sizes)
        self.ln_final = nn.LayerNorm(4)
        self.logit_scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.visual(x)


def in_transformers_names(state, width):
    """The same weights by the names of the library transformers."""
    names = {
        "visual.class_embedding": "vision_model.embeddings.class_embedding",
        "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
        "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
        "logit_scale": "logit_scale",
    }
    parts = {"attn.out_proj": "self_attn.out_proj", "ln_1": "layer_norm1", "ln_2": "layer_norm2"}
    parts |= {"mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
    renamed = {"visual_projection.weight": state["visual.proj"].T}
    for name, value in state.items():
        head, _, leaf = name.rpartition(".")
        if name in names:
            renamed[names[name]] = value
        elif head in ("visual.ln_pre", "visual.ln_post"):
            new = {"visual.ln_pre": "pre_layrnorm", "visual.ln_post": "post_layernorm"}[head]
            renamed[f"vision_model.{new}.{leaf}"] = value
        elif "resblocks" in name:
            _, _, _, number, *inner = name.split(".")
            block = f"vision_model.encoder.layers.{number}"
            if inner[-1].startswith("in_proj_"):
                for row, letter in enumerate("qkv"):
                    third = value[row * width : (row + 1) * width]
                    leaf = inner[-1].removeprefix("in_proj_")
                    renamed[f"{block}.self_attn.{letter}_proj.{leaf}"] = third
            else:
                renamed[f"{block}.{parts['.'.join(inner[:-1])]}.{leaf}"] = value
    return renamed


STAGES = ((1, 4, 1, 1), (6, 6, 2, 2), (3, 8, 1, 2))
SIZES = {"first": 5, "last": 11}
CASES = {
    "resnet18": (
        "resnet",
        lambda: ResNet(4, (2, 2), False, 6),
        pfl.models.PretrainedResNet(4, (2, 2), False, 6),
    ),
    "resnet50": (
        "resnet",
        lambda: ResNet(4, (2, 1, 1), True, 4),
        pfl.models.PretrainedResNet(4, (2, 1, 1), True, 4),
    ),
    "mobilenet_v2": (
        "mobilenet_v2",
        lambda: MobileNetV2(4, STAGES, **SIZES),
        pfl.models.PretrainedMobileNetV2(4, STAGES, **SIZES),
    ),
    "clip": (
        "clip",
        lambda: CLIP(4, 12, 2, 3, 8, 12),
        pfl.models.ViT(4, 8, 12, 2, 3, style="clip"),
    ),
}


def random_module(create):
    """A module with random parameters and statistics."""
    torch.manual_seed(0)
    module = create()
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if name.endswith("running_var"):
                value.uniform_(0.5, 2)
            elif value.ndim == 1:
                value.normal_(0.5, 0.2)
    return module.eval()


def images(name):
    return IMAGES[:, :32, :24] if name == "clip" else IMAGES


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_pytorch(name, suffix, tmp_path):
    layout, create, network = CASES[name]
    module = random_module(create)
    state = module.state_dict()
    path = tmp_path / f"weights.{suffix}"
    if suffix == "pt":
        torch.save(state, path)
    else:
        if name == "clip":
            state = in_transformers_names(state, 12)
        save_file({key: np.ascontiguousarray(value.numpy()) for key, value in state.items()}, path)
    x = images(name)
    frozen = pfl.models.weights.Saved(path, layout)
    trainable = "head" if name == "clip" else "head/bias"
    model = pfl.Model(
        network, jnp.asarray(x), frozen=frozen, trainable=trainable, frozen_dtype="float32"
    )
    params = model.init(jax.random.key(0))
    with torch.no_grad():
        expected = module(torch.from_numpy(x.transpose(0, 3, 1, 2).copy())).numpy()
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(model.apply(params, x), expected, rtol=1e-3, atol=1e-4)


def test_a_head_for_other_classes_is_new_and_adapters_learn(tmp_path):
    layout, create, _ = CASES["resnet18"]
    torch.save(random_module(create).state_dict(), tmp_path / "resnet.pt")
    model = pfl.Model(
        pfl.models.PretrainedResNet(None, (2, 2), False, 6),
        frozen=pfl.models.weights.Saved(tmp_path / "resnet.pt", layout),
        trainable=["head", pfl.adapters.lora(rank=2, where="conv2")],
        frozen_dtype="float32",
    )
    y = np.arange(40) % 2
    x = RNG.normal(size=(40, 32, 32, 3)) + 2 * y[:, None, None, None]
    clients = pfl.Federation.from_arrays(x, y, client=np.arange(40) // 20)
    run = pfl.Run(pfl.FedAvg(), clients, model, pfl.LocalTraining(learning_rate=0.05))
    assert run.train(rounds=10, progress=False).accuracy > 0.7


class Own:
    """Pickled objects could run code."""


@pytest.mark.parametrize("content", [[1, 2], {"a": 3}, Own()])
def test_other_pickled_files_are_refused(content, tmp_path):
    torch.save(content, tmp_path / "other.pt")
    frozen = pfl.models.weights.Saved(tmp_path / "other.pt", "resnet")
    model = pfl.Model(CASES["resnet18"][2], jnp.asarray(IMAGES), frozen=frozen, trainable="head")
    with pytest.raises(pfl.ArgumentError, match=r"^frozen: other\.pt: accepted: a state dict"):
        _ = model.network
