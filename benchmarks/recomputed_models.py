"""Three shapes of model for benchmarks/recomputation.py: even blocks, falling resolution, skip connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paraflow.models import CausalLM, CausalLMConfig


@dataclass
class Chain:
    """A model whose blocks run one after another.

    Attributes:
        name: The shape.
        model: The model.
        blocks: By name, in the order of forward.
        loss: Runs forward.
        segmented: Runs forward with the blocks in so many segments, each recomputed as one.
    """

    name: str
    model: nn.Module
    blocks: dict[str, nn.Module]
    loss: Callable[[], Tensor]
    segmented: Callable[[int], Tensor]

    def step(self) -> None:
        self.loss().backward()  # type: ignore[no-untyped-call]

    def in_segments(self, count: int) -> None:
        self.segmented(count).backward()  # type: ignore[no-untyped-call]


def _segments(blocks: Sequence[Any], count: int) -> list[Sequence[Any]]:
    bounds = [len(blocks) * place // count for place in range(count + 1)]
    return [blocks[low:high] for low, high in pairwise(bounds)]


def transformer(small: bool = False) -> Chain:
    """A decoder of even blocks."""
    layers, hidden, tokens, batch = (4, 64, 64, 2) if small else (9, 192, 128, 4)
    model = CausalLM(CausalLMConfig(vocab_size=512, layers=layers, hidden=hidden, heads=4, context=tokens))
    data = torch.randint(0, 512, (batch, tokens + 1))

    def segmented(count: int) -> Tensor:
        def run(part: Sequence[nn.Module], hidden: Tensor) -> Tensor:
            for block in part:
                hidden = block(hidden, None, None)
            return hidden

        hidden = model.embedding(data[:, :-1])
        for part in _segments(list(model.blocks), count):
            hidden = checkpoint(run, part, hidden, use_reentrant=False)
        logits = F.linear(model.norm(hidden), model.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())

    blocks = {f"blocks.{place}": block for place, block in enumerate(model.blocks)}
    return Chain("transformer", model, blocks, lambda: model.training_step(data)["loss"], segmented)


class Convolution(nn.Module):
    """Two convolutions with batch normalisation, in place where they can be."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def pyramid(small: bool = False) -> Chain:
    """Stages of falling resolution: the first hold the most and compute little for it."""
    width, side, batch = (16, 32, 4) if small else (32, 64, 8)
    sizes = [(3, width, 1), (width, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1)]
    sizes += [
        (2 * width, 4 * width, 2),
        (4 * width, 4 * width, 1),
        (4 * width, 8 * width, 2),
        (8 * width, 8 * width, 1),
    ]
    stages = nn.Sequential(*(Convolution(*size) for size in sizes))
    model = nn.Sequential(stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))
    images, labels = torch.randn(batch, 3, side, side), torch.randint(0, 10, (batch,))

    def segmented(count: int) -> Tensor:
        x = images
        for part in _segments(list(stages), count):
            x = checkpoint(nn.Sequential(*part), x, use_reentrant=False)
        return F.cross_entropy(model[1:](x), labels)

    blocks = {f"0.{place}": block for place, block in enumerate(stages)}
    return Chain("CNN pyramid", model, blocks, lambda: F.cross_entropy(model(images), labels), segmented)


class UNet(nn.Module):
    """An encoder and a decoder with a skip connection at each resolution (Ronneberger et al. 2015)."""

    def __init__(self, width: int, depth: int = 4) -> None:
        super().__init__()
        sizes = [3] + [width * 2**level for level in range(depth)]
        self.down = nn.ModuleList(Convolution(a, b) for a, b in pairwise(sizes))
        self.middle = Convolution(sizes[-1], sizes[-1])
        self.up = nn.ModuleList(
            Convolution(2 * sizes[level], sizes[max(level - 1, 1)]) for level in range(depth, 0, -1)
        )
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for place in range(len(self.down) + 1 + len(self.up)):
            x = self.run(place, x, skips)
        return self.head(x)  # type: ignore[no-any-return]

    def run(self, place: int, x: Tensor, skips: list[Tensor]) -> Tensor:
        if place < len(self.down):
            skips.append(self.down[place](x))
            return F.max_pool2d(skips[-1], 2)
        if place == len(self.down):
            return self.middle(x)  # type: ignore[no-any-return]
        block = self.up[place - len(self.down) - 1]
        return block(torch.cat((F.interpolate(x, scale_factor=2.0), skips.pop()), 1))  # type: ignore[no-any-return]

    def segmented(self, x: Tensor, count: int) -> Tensor:
        skips: list[Tensor] = []

        def run(places: Sequence[int], x: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
            left = list(skips)
            for place in places:
                x = self.run(place, x, left)
            return x, *left

        for places in _segments(range(len(self.down) + 1 + len(self.up)), count):
            x, *skips = checkpoint(run, places, x, *skips, use_reentrant=False)
        return self.head(x)  # type: ignore[no-any-return]


def unet(small: bool = False) -> Chain:
    """An encoder-decoder whose skip connections hold tensors across the blocks between."""
    width, side, batch = (16, 32, 2) if small else (32, 64, 4)
    model = UNet(width)
    images, targets = torch.randn(batch, 3, side, side), torch.randn(batch, 1, side, side)
    blocks = {f"down.{place}": block for place, block in enumerate(model.down)}
    blocks |= {"middle": model.middle} | {f"up.{place}": block for place, block in enumerate(model.up)}
    return Chain(
        "U-Net",
        model,
        blocks,
        lambda: F.mse_loss(model(images), targets),
        lambda count: F.mse_loss(model.segmented(images, count), targets),
    )
