"""A round of FedEM on its synthetic data in PyTorch, for comparison in `experiments.benchmark`.

Every client weights the M components by their losses on its data (the E-step) and trains each for an epoch of SGD; the
server averages. Models are the paper's, with one logit. SGD uses the authors' momentum and weight decay, and its
buffers stay with the client. All data is in memory. Like pfljax, neither form reuses the E-step's scores in the first
mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn import functional

from pfljax.data import Federation

RATE = 0.1
MOMENTUM = 0.9
DECAY = 5e-4
BATCH = 128
# components (F + 1, M), the last row the biases -> the next ones
Round = Callable[[torch.Tensor], torch.Tensor]


def client_data(federation: Federation) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The clients' training examples (n_k, F) and classes (n_k,)."""
    train = federation.train
    sizes = np.asarray(federation.train.size)
    xs = [torch.from_numpy(np.array(train.x[k, :size])) for k, size in enumerate(sizes)]
    ys = [torch.from_numpy(np.float32(train.y[k, :size])) for k, size in enumerate(sizes)]
    return xs, ys


def ordinary(xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor], num_models: int) -> Round:
    """The usual loop: modules, autograd, and an optimizer for each client and component."""

    def make():
        return [torch.nn.Linear(xs[0].shape[1], 1) for _ in range(num_models)]

    nets = [make() for _ in xs]
    optimizers = [
        [
            torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
            for net in own
        ]
        for own in nets
    ]
    pis = [torch.full((num_models,), 1 / num_models) for _ in xs]

    def losses_of(net, x, y):
        return functional.binary_cross_entropy_with_logits(net(x)[:, 0], y, reduction="none")

    def one_round(components: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(components)
        for k, (x, y) in enumerate(zip(xs, ys, strict=True)):
            with torch.no_grad():
                for net, component in zip(nets[k], components.T, strict=True):
                    net.weight.copy_(component[None, :-1])
                    net.bias.copy_(component[-1:])
                losses = torch.stack([losses_of(net, x, y) for net in nets[k]], dim=1)
                q = torch.softmax(pis[k].log() - losses, dim=1)
                pis[k] = q.mean(dim=0)
            order = torch.randperm(len(y)) if len(y) > BATCH else torch.arange(len(y))
            for net, optimizer, own in zip(nets[k], optimizers[k], q.T, strict=True):
                for batch in order.split(BATCH):
                    optimizer.zero_grad()
                    (
                        (losses_of(net, x[batch], y[batch]) * own[batch]).sum() / len(batch)
                    ).backward()
                    optimizer.step()
            with torch.no_grad():
                trained = [torch.cat([net.weight[0], net.bias]) for net in nets[k]]
                total += len(y) * torch.stack(trained, dim=1)
        return total / sum(map(len, ys))

    return one_round


class Fused:
    """Manual gradients, with all components in one product: the E-step for all clients at once, then client by client.

    Attributes:
        x: (n, F + 1) examples of all clients, concatenated, with a column of ones for the biases.
        y: (n, 1) classes.
        owner: (n,) client of each example.
        sizes: n_k.
        pi: (K, M) mixture weights.
        momentum: (K, F + 1, M) the clients' buffers.
    """

    def __init__(self, xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor], num_models: int):
        x = torch.cat(list(xs))
        self.y = torch.cat(list(ys))[:, None]
        self.sizes = [len(y) for y in ys]
        self.x = torch.cat([x, torch.ones(len(x), 1)], dim=1)
        self.n = torch.tensor(self.sizes)
        self.owner = torch.repeat_interleave(torch.arange(len(xs)), self.n)
        self.pi = torch.full((len(xs), num_models), 1 / num_models)
        self.momentum = torch.zeros(len(xs), self.x.shape[1], num_models)

    @torch.no_grad()
    def __call__(self, components: torch.Tensor) -> torch.Tensor:
        z = self.x @ components
        q = torch.softmax(
            self.pi.log()[self.owner] - functional.softplus(z).sub_(self.y * z), dim=1
        )
        self.pi = torch.zeros_like(self.pi).index_add_(0, self.owner, q).div_(self.n[:, None])
        models = components.repeat(len(self.sizes), 1, 1)
        self.train(models, q)
        return torch.tensordot(self.n / self.n.sum(), models, dims=1)

    def train(self, models: torch.Tensor, q: torch.Tensor) -> None:
        """Trains all clients' components (K, F + 1, M) for an epoch, in place, with weights q (n, M)."""
        parts = [torch.split(leaf, self.sizes) for leaf in (self.x, self.y, q)]
        for x, y, own, w, buffer, size in zip(
            *parts, models, self.momentum, self.sizes, strict=True
        ):
            if size > BATCH:
                order = torch.randperm(size)
                x, y, own = (leaf.index_select(0, order) for leaf in (x, y, own))
            for batch_x, batch_y, batch_q in zip(
                *(leaf.split(BATCH) for leaf in (x, y, own)), strict=True
            ):
                error = torch.mm(batch_x, w).sigmoid_().sub_(batch_y).mul_(batch_q)
                buffer.mul_(MOMENTUM).add_(w, alpha=DECAY).addmm_(
                    batch_x.T, error, alpha=1 / len(batch_y)
                )
                w.sub_(buffer, alpha=RATE)


class FusedOverClients(Fused):
    """Like `Fused`, but with one batched product for the same mini-batch of all clients that have one."""

    def __init__(self, xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor], num_models: int):
        super().__init__(xs, ys, num_models)
        start = torch.cumsum(self.n, 0) - self.n
        self.steps = []
        for first in range(0, max(self.sizes), BATCH):
            clients = torch.nonzero(self.n > first)[:, 0]
            places = first + torch.arange(BATCH)
            inside = places < self.n[clients, None]
            places = start[clients, None] + torch.where(inside, places, 0)
            self.steps.append(
                (clients, places, (inside / inside.sum(dim=1, keepdim=True))[..., None])
            )

    def train(self, models: torch.Tensor, q: torch.Tensor) -> None:
        order = torch.argsort(self.owner + torch.rand(len(self.owner), dtype=torch.float64))
        for clients, places, share in self.steps:
            batch = order[places]
            x = self.x[batch]
            w = models[clients]
            buffer = self.momentum[clients]
            error = torch.bmm(x, w).sigmoid_().sub_(self.y[batch]).mul_(q[batch]).mul_(share)
            buffer.mul_(MOMENTUM).add_(w, alpha=DECAY).baddbmm_(x.transpose(1, 2), error)
            models[clients] = w.sub_(buffer, alpha=RATE)
            self.momentum[clients] = buffer
