"""Cross-entropy of split logits is torch's, without a rank that makes the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paraflow.models.losses import cross_entropy, loss_function
from paraflow.models.token_loss import token_cross_entropy
from paraflow.tensor_parallel.region import Region
from paraflow.tensor_parallel.split_logits import SplitLogits, whole
from paraflow.tensor_parallel.vocabulary import split_head
from tests.pool import Pool
from tests.tensor_parallel.regions import assert_same_gradients, close, my_share, region_of_all, twice

WEIGHT = torch.linspace(0.5, 2.0, 11)

LOSSES: dict[str, Any] = {
    "mean": functional.cross_entropy,
    "sum": lambda logits, target: functional.cross_entropy(logits, target, reduction="sum"),
    "none": lambda logits, target: functional.cross_entropy(logits, target, reduction="none").square().sum(),
    "smooth": lambda logits, target: functional.cross_entropy(logits, target, label_smoothing=0.1),
    "weighted": nn.CrossEntropyLoss(weight=WEIGHT),
    "weighted and smooth": nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2),
    "ignored": lambda logits, target: functional.cross_entropy(logits, target.clone().fill_(3), ignore_index=3),
    "scaled": lambda logits, target: functional.cross_entropy(30 * (logits / 30).tanh() + 1e4, target),
    "masked": lambda logits, target: functional.cross_entropy(logits[target > 2], target[target > 2]),
    "repeated": lambda logits, target: functional.cross_entropy(logits[[1, 0, 0]], target[[1, 0, 0]]),
    "probabilities": lambda logits, target: functional.cross_entropy(logits, functional.one_hot(target, 11).float()),
    "likelihood": lambda logits, target: functional.nll_loss(logits.log_softmax(-1), target),
    "likelihood, weighted": lambda logits, target: functional.nll_loss(
        torch.log_softmax(logits, -1), target.where(target > 1, -100), WEIGHT
    ),
    "sequences": lambda logits, target: functional.cross_entropy(
        torch.stack((logits[:2], logits[1:3])).transpose(1, 2), torch.stack((target[:2], target[1:3]))
    ),
    "turned": lambda logits, target: functional.cross_entropy(
        logits[None].transpose(1, 2), target[None], label_smoothing=0.1
    ),
    "turned, each": lambda logits, target: functional.cross_entropy(
        logits[None].mT.float(), target[None], reduction="none"
    )[0, 0],
    "ours": cross_entropy,
    "by name": lambda logits, target: pair(loss_function("cross_entropy")(logits[:, None], target[:, None])),
    "counted": lambda logits, target: pair(loss_function(nn.CrossEntropyLoss(WEIGHT))(logits, target)),
    "z-loss": lambda logits, target: logits.logsumexp(-1).square().mean(),
    "margin": lambda logits, target: (logits.topk(3).values[:, 2] - logits.max(-1).values).mean(),
    "sum of all": lambda logits, target: (logits * logits).sum() / len(target),
}


def pair(loss: Any) -> torch.Tensor:
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss


def check(name: str, region: Region, sizes: tuple[int, ...], **how: Any) -> None:
    """A head with a loss, of the mean over ranks where they have rows of their own."""
    dtype, tolerance = how.get("dtype", torch.float32), how.get("tolerance", 2e-6)
    split, unsplit = twice(nn.Linear(6, 11).to(dtype))
    split_head(split, region)
    x = torch.randn(sum(sizes), 6, dtype=dtype)
    target = torch.randint(0, 11, (sum(sizes),))
    target[0], target[-1] = 10, 4  # the last class, and one that "masked" leaves to every rank
    target[sizes[0]] = 5
    outside, mine = my_share(x, region, sizes), my_share(target, region, sizes)
    x.requires_grad_()
    logits = split(outside)
    assert isinstance(logits, SplitLogits)
    loss = LOSSES[name](logits, mine)
    if region.gathers == 0:
        expected = [LOSSES[name](unsplit(a), b) for a, b in zip(x.split(sizes), target.split(sizes), strict=True)]
        close(loss, expected[region.rank], tolerance, name)
        torch.stack(expected).mean().backward()
    else:
        expected = [LOSSES[name](unsplit(x), target)]
        close(loss, expected[0], tolerance, name)
        expected[0].backward()
    if name == "ignored":
        assert loss.isnan()
        loss = loss.nan_to_num()
    loss.backward()
    close(
        outside.grad, my_share(x.grad, region, sizes) * (region.degree if region.gathers == 0 else 1), tolerance, name
    )
    assert_same_gradients(split, unsplit, tolerance)


def every_loss() -> None:
    torch.manual_seed(1)
    for gathers in (None, 0):
        region = region_of_all(gathers)
        sizes = (5, 4, 3, 6)[: region.degree]
        for name in LOSSES:
            if name != "ignored":
                check(name, region, sizes)
        check("mean", region, sizes, dtype=torch.bfloat16, tolerance=0.03)
        check("smooth", region, sizes, dtype=torch.float64, tolerance=1e-12)
    nothing_to_predict()
    ragged()
    hooks()
    labels_of_no_class()


def nothing_to_predict() -> None:
    """A mean over no targets is NaN, as torch's is, and its gradient is 0."""
    for gathers in (None, 0):
        region = region_of_all(gathers)
        head = nn.Linear(6, 11)
        split_head(head, region)
        logits = head(torch.randn(4, 6))
        target = torch.full((4,), -100)
        loss = functional.cross_entropy(logits, target)
        assert loss.isnan()
        loss.backward()
        assert head.weight.grad.to_local().eq(0).all()
        assert token_cross_entropy(logits, target) == 0


def ragged() -> None:
    """Ranks that pool their rows may have sequences of different lengths, and next to none."""
    region = region_of_all(0)
    shapes = [(2, 3), (1, 5), (4, 1), (1, 1)][: region.degree]
    split, unsplit = twice(nn.Linear(6, 11))
    split_head(split, region)
    xs, targets = [torch.randn(*shape, 6) for shape in shapes], [torch.randint(0, 11, shape) for shape in shapes]
    losses = [token_cross_entropy(unsplit(x), target) for x, target in zip(xs, targets, strict=True)]
    torch.stack(losses).mean().backward()
    logits = split(xs[region.rank])
    loss = token_cross_entropy(logits, targets[region.rank])
    loss.backward()
    close(loss, losses[region.rank], 2e-6)
    close(whole(logits), unsplit(xs[region.rank]), 2e-6)
    assert_same_gradients(split, unsplit, 2e-6)


def hooks() -> None:
    """A hook on the logits, registered after the loss was taken, sees gradients of this rank's rows only."""
    for gathers in (None, 0):
        region = region_of_all(gathers)
        head = nn.Linear(6, 11, bias=False)
        split_head(head, region)
        logits = head(torch.ones(2, 6))
        loss = functional.cross_entropy(logits.float(), torch.tensor([1, 2]))
        weight = 0.0 if gathers is None or region.rank == 0 else 1.0
        logits.register_hook(lambda gradient, weight=weight: gradient * weight)
        loss.backward()
        assert bool(head.weight.grad.to_local().eq(0).all()) == (gathers is None)


def labels_of_no_class() -> None:
    region = region_of_all()
    head = nn.Linear(6, 11)
    split_head(head, region)
    with pytest.raises(IndexError, match="Target 11 is out of bounds"):
        functional.cross_entropy(head(torch.ones(1, 6)), torch.tensor([11]))
    with pytest.raises(ValueError, match="batch_size"):
        functional.cross_entropy(head(torch.ones(1, 6)), torch.tensor([1, 2]))


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that anything gives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if type(leaf) is torch.Tensor]
        self.elements = max(self.elements, *sizes, 0)
        return result


def many_classes(gathers: int | None) -> tuple[int, int]:
    """The largest tensor that a step makes, and how many logits there are on the rank or, pooled, in the whole."""
    region = region_of_all(gathers)
    classes, rows = 100_000, 8
    with torch.device("meta"):
        head: Any = nn.Linear(4, classes, bias=False)
    split_head(head, region)
    local = torch.zeros(region.sizes_of(classes)[region.rank], 4)
    make: Any = type(head.weight.data)
    head.weight = nn.Parameter(make(local, head.weight._spec, requires_grad=False))
    mine = rows // region.degree if gathers == 0 else rows
    inputs, target = torch.randn(mine, 4, requires_grad=True), torch.arange(mine) * 20_000 % classes
    with Largest() as largest:
        logits = head(inputs)
        loss = functional.cross_entropy(logits, target, label_smoothing=0.1)
        loss.backward()
        logits.detach().argmax(-1)
        logits.detach().topk(5)
    return largest.elements, classes * rows


def largest_tensors() -> None:
    for gathers in (None, 0):
        found, all_logits = many_classes(gathers)
        assert found <= all_logits // region_of_all().degree, (found, all_logits)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_of_split_logits(ranks: Pool, world_size: int) -> None:
    ranks(world_size, every_loss)


def test_no_rank_makes_all_logits(ranks: Pool) -> None:
    ranks(2, largest_tensors)


def test_one_rank_has_all_classes() -> None:
    values = torch.randn(5, 11, requires_grad=True)
    logits = SplitLogits.of_copies(values, Region(None), 11)
    target = torch.tensor([0, 10, 3, -100, 7])
    loss = functional.cross_entropy(logits, target, weight=WEIGHT, label_smoothing=0.1)
    torch.testing.assert_close(loss, functional.cross_entropy(values, target, weight=WEIGHT, label_smoothing=0.1))
    torch.testing.assert_close(whole(logits.softmax(-1)), values.softmax(-1))
