"""The networks in PyTorch, as users write them: functions that make one."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from experiments.architectures.linen import CLASSES, STAGES, TOKENS, WIDTH

group_norm = functools.partial(nn.GroupNorm, 8)


def mcmahan() -> nn.Module:
    layers = []
    for before, after in ((1, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(7 * 7 * 64, 512), nn.ReLU(), nn.Linear(512, CLASSES)
    )


def lenet() -> nn.Module:
    layers = []
    for before, after in ((3, 6), (6, 16)):
        layers += [nn.Conv2d(before, after, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers.append(nn.Flatten())
    for before, after in ((400, 120), (120, 84)):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(84, CLASSES))


def three_convolutions() -> nn.Module:
    layers = []
    for before, after in ((3, 128), (128, 128), (128, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 4 * 128, CLASSES))


class Residual(nn.Module):
    def __init__(
        self, inside: nn.Module, shortcut: nn.Module | None = None, activation: bool = False
    ):
        super().__init__()
        self.inside = inside
        self.shortcut = shortcut or nn.Identity()
        self.activation = nn.ReLU() if activation else nn.Identity()

    def forward(self, x):
        return self.activation(self.shortcut(x) + self.inside(x))


def normalized(before, after, size=1, stride=1, norm=group_norm, **options) -> list[nn.Module]:
    return [nn.Conv2d(before, after, size, stride, size // 2, bias=False, **options), norm(after)]


def resnet18(norm=group_norm) -> nn.Module:
    layers = [*normalized(3, 64, 3, norm=norm), nn.ReLU()]
    width = 64
    for stage, after in enumerate((64, 128, 256, 512)):
        for stride in (2 if stage else 1, 1):
            inside = [
                *normalized(width, after, 3, stride, norm),
                nn.ReLU(),
                *normalized(after, after, 3, norm=norm),
            ]
            shortcut = (
                None
                if width == after
                else nn.Sequential(*normalized(width, after, 1, stride, norm))
            )
            layers.append(Residual(nn.Sequential(*inside), shortcut, activation=True))
            width = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


def mobilenet_v2() -> nn.Module:
    layers = [*normalized(3, 32, 3, 2), nn.ReLU6()]
    width = 32
    for expansion, after, blocks, first in STAGES:
        for number in range(blocks):
            stride = first if number == 0 else 1
            inner = expansion * width
            inside = [*normalized(width, inner), nn.ReLU6()] if expansion > 1 else []
            inside += [
                *normalized(inner, inner, 3, stride, groups=inner),
                nn.ReLU6(),
                *normalized(inner, after),
            ]
            block = nn.Sequential(*inside)
            layers.append(Residual(block) if stride == 1 and width == after else block)
            width = after
    layers += [*normalized(width, 1280), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(1280, CLASSES))


def vgg11() -> nn.Module:
    layers = []
    width = 3
    for widths in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
        for after in widths:
            layers += [nn.Conv2d(width, after, 3, padding=1), group_norm(after), nn.ReLU()]
            width = after
        layers.append(nn.MaxPool2d(2))
    dense = [
        nn.Linear(512, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, CLASSES),
    ]
    return nn.Sequential(*layers, nn.Flatten(), *dense)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()

        def conv(before, after):
            return [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]

        def twice(before, after):
            return nn.Sequential(*conv(before, after), *conv(after, after))

        self.down = nn.ModuleList([twice(3, 16), twice(16, 32)])
        self.middle = twice(32, 64)
        self.up = nn.ModuleList([nn.ConvTranspose2d(2 * width, width, 2, 2) for width in (32, 16)])
        self.merge = nn.ModuleList([twice(2 * width, width) for width in (32, 16)])
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        kept = []
        for block in self.down:
            kept.append(block(x))
            x = F.max_pool2d(kept[-1], 2)
        x = self.middle(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), kept.pop()], dim=1))
        return self.head(x.mean((2, 3)))


def depthwise_separable() -> nn.Module:
    layers = [nn.Conv2d(3, 32, 3, padding=1), group_norm(32), nn.ReLU()]
    width = 32
    for after, stride in ((64, 1), (128, 2), (128, 1)):
        layers += [
            nn.Conv2d(width, width, 3, stride, 1, groups=width),
            group_norm(width),
            nn.ReLU(),
        ]
        layers += [nn.Conv2d(width, after, 1), group_norm(after), nn.ReLU()]
        width = after
    return nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8 * 8 * 128, CLASSES))


def autoencoder() -> nn.Module:
    layers = []
    for before, after in ((3, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, 2, 1), nn.ReLU()]
    for before, after in ((64, 32), (32, 16)):
        layers += [nn.ConvTranspose2d(before, after, 3, 2, 1, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.layers = kind(32, 128, 2, batch_first=True)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x):
        return self.head(self.layers(x)[0][:, -1])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.queries = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x, causal=False):
        batch, places, _ = x.shape
        heads = (
            self.queries(self.norms[0](x))
            .reshape(batch, places, 3, 4, WIDTH // 4)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2)
        x = x + self.out(mixed.reshape(batch, places, WIDTH))
        return x + self.perceptron(self.norms[1](x))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.position = nn.Parameter(0.02 * torch.randn(1, 64, WIDTH))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(1, 40, WIDTH))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x, causal=True)
        return self.head(self.norm(x)).flatten(0, 1)
