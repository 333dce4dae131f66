"""Small models for tests, with the shapes that make real ones difficult, and their matrices as Muon should see them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention over (batch, length, heads, width of a head)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) / k.shape[-1] ** 0.5
    length = scores.shape[-1]
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -1e4)
    return (scores.softmax(-1) @ v).transpose(1, 2)


class Block(nn.Module):
    """Pre-norm attention with fused query, key and value, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(self.attend(q, k, v).reshape(batch, length, width))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class TinyGpt(nn.Module):
    """A language model; its head is the token embedding itself, or a matrix of its own."""

    def __init__(self, *, tied: bool = True, vocab: int = 24, length: int = 8, width: int = 16, heads: int = 2,
                 num_blocks: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.first_position = 0
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.1)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[self.first_position:][:tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ConvNet(nn.Module):
    """Two convolutions, one of them depthwise, and a classifier."""

    def __init__(self, channels: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.hidden = nn.Linear(channels, 2 * channels)
        self.classifier = nn.Linear(2 * channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.depthwise(self.stem(images))).mean((-1, -2))
        return self.classifier(F.relu(self.hidden(x)))


def tiny_gpt(*, tied: bool = True, seed: int = 0) -> TinyGpt:
    """A :class:`TinyGpt` whose weights depend on the seed alone."""
    return _seeded(lambda: TinyGpt(tied=tied), seed)


def conv_net(seed: int = 0) -> ConvNet:
    """A :class:`ConvNet` whose weights depend on the seed alone."""
    return _seeded(ConvNet, seed)


def _seeded(make, seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


#: Matrices of :func:`tiny_gpt`, by name: every linear layer of the blocks, as (batch, rows, cols).
TINY_GPT_MATRICES = {
    f"blocks.{i}.{name}.weight": (1, rows, cols)
    for i in range(2)
    for name, rows, cols in (("qkv", 48, 16), ("proj", 16, 16), ("up", 64, 16), ("down", 16, 64))
}

#: Matrices of :func:`conv_net`: a kernel is one matrix, output channels by the rest; a depthwise kernel is none.
CONV_NET_MATRICES = {"stem.weight": (1, 8, 27), "hidden.weight": (1, 16, 8)}

def _generator(step: int, micro: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1 + rank + 100 * micro + 10_000 * step)


def token_batch(step: int, micro: int, rank: int, *, vocab: int = 24) -> Tensor:
    """Return two sequences of nine tokens: eight to read, eight to predict."""
    return torch.randint(0, vocab, (2, 9), generator=_generator(step, micro, rank))


def token_loss(module: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy of the next token."""
    logits = module(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def image_batch(step: int, micro: int, rank: int) -> Tensor:
    """Return two images of 3 x 6 x 6."""
    return torch.randn(2, 3, 6, 6, generator=_generator(step, micro, rank))


def square_loss(module: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean square of the output, for input that is cast to the dtype of the module."""
    return module(batch.to(next(module.parameters()).dtype)).float().square().mean()


class FailsInBackward(torch.autograd.Function):
    """Passes its input on, and raises ZeroDivisionError in its backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError
