"""Split logits behave as the whole ones do: what keeps the split, what joins, and what is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional

from paraflow.errors import ModelError
from paraflow.loss import StepOutput
from paraflow.models import CausalLM, CausalLMConfig, MaskedLM, MaskedLMConfig
from paraflow.models.metrics import MetricSet
from paraflow.step import release_graph
from paraflow.tensor_parallel.region import Region
from paraflow.tensor_parallel.split_logits import SplitLogits, needs_all_ranks, whole
from paraflow.tensor_parallel.vocabulary import split_head, split_vocabulary
from tests.pool import Pool
from tests.tensor_parallel.regions import assert_same_gradients, close, my_share, region_of_all, twice

C = 11
SCALE = nn.Parameter(torch.tensor(1.5))
BIAS = nn.Parameter(torch.linspace(-1, 1, C))

KEEPS: dict[str, Any] = {
    "float": lambda x: x.double().float(),
    "to": lambda x: x.to(torch.float64),
    "view": lambda x: x.view(-1, C),
    "reshape": lambda x: x.reshape((x.shape[0] * x.shape[1], -1)),
    "flatten": lambda x: x.flatten(0, 1),
    "flatten of torch": lambda x: torch.flatten(x, 0, -2),
    "unsqueeze": lambda x: x.unsqueeze(1)[None],
    "squeeze": lambda x: x[:, None].squeeze(1),
    "all but the last": lambda x: x[..., :-1, :].contiguous().view(-1, C),
    "shifted": lambda x: x[:, 1:],
    "last": lambda x: x[:, -1],
    "first": lambda x: x[0],
    "ellipsis": lambda x: x[1:, ...],
    "new dimension": lambda x: x[:, None, 0, :],
    "mask": lambda x: x[torch.arange(x.shape[1]).expand(x.shape[:2]) % 2 == 1],
    "indices": lambda x: x[:, [2, 0, 0]],
    "pairs": lambda x: x[torch.tensor([0, 1]), torch.tensor([2, 1])],
    "split": lambda x: x.split(2, dim=1)[1],
    "chunk": lambda x: torch.chunk(x, 2)[0],
    "select": lambda x: x.select(1, 2).narrow(0, 0, 1),
    "index_select": lambda x: x.index_select(1, torch.tensor([1, 2])),
    "unbind": lambda x: x.unbind(1)[2],
    "softcap": lambda x: 30.0 * torch.tanh(x / 30.0) - 1,
    "clamped": lambda x: (-x).clamp(min=-0.5),
    "scaled": lambda x: x * SCALE,
    "with a bias": lambda x: BIAS + x,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: functional.log_softmax(x + 8, dim=2, dtype=torch.float64).float(),
    "sum of two": lambda x: x + 2 * x,
}
ONLY_COPIES: dict[str, Any] = {
    "by row": lambda x: x - x.max(-1, keepdim=True).values.detach(),
    "of a shape": lambda x: x + torch.ones(C),
}
JOINS: dict[str, Any] = {
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "turned": lambda x: x.transpose(1, 2) * 2.0,
    "turned back": lambda x: x.permute(0, 2, 1).sum(1),
    "mean of all": lambda x: x.mean(),
    "one class": lambda x: x[..., 3],
    "classes": lambda x: x[..., 2:7],
    "mask of all": lambda x: x[x > 100],
    "cat": lambda x: torch.cat([x, x], dim=-1),
    "stack": lambda x: torch.stack([x[:, 0], x[:, 1]]),
    "einsum": lambda x: torch.einsum("btc,c->bt", x, torch.ones(C)),
    "flat": lambda x: x.view(-1),
    "compare": lambda x: (x > 0).float(),
    "max of two": lambda x: torch.max(x, torch.zeros(C)),
    "argmax of all": lambda x: x.argmax() * 1.0,
    "max by sample": lambda x: x.max(1).values,
    "random": lambda x: torch.zeros_like(x) + x.new_ones(()),
    "of targets": lambda x: x.log_softmax(-1).gather(-1, torch.zeros(*x.shape[:2], 1, dtype=torch.int64)),
}
RANKS_CLASSES: dict[str, Any] = {
    "argmax": lambda x: x.argmax(-1),
    "argmax kept": lambda x: torch.argmax(x[:, 0], 1, keepdim=True),
    "max": lambda x: x.max(dim=2).values,
    "max of torch": lambda x: torch.max(x, -1, keepdim=True).indices,
    "topk": lambda x: x.topk(5).values,
    "topk of torch": lambda x: torch.topk(x[:, :2], 5, dim=-1).indices,
    "lowest": lambda x: x.topk(3, largest=False).values,
    "logsumexp": lambda x: x.logsumexp(-1),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: torch.mean(x[:, 1:], dim=-1, keepdim=True),
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "logsumexp of torch": lambda x: torch.logsumexp(x[1:], dim=(-1,), keepdim=True),
}


def check(what: str, change: Any, region: Region, *, keeps: bool | None) -> None:
    """The values of a change, and its gradients at the input and weights of the head."""
    split, unsplit = twice(nn.Linear(4, C))
    split_head(split, region)
    SCALE.grad = BIAS.grad = None
    sizes = (2, 3, 2, 2)[: region.degree] if region.gathers == 0 else ()
    x = torch.randn(sum(sizes) or 3, 4, 4)
    outside = my_share(x, region, sizes)
    x.requires_grad_()
    made = change(split(outside))
    if keeps is not None:
        assert isinstance(made, SplitLogits) == keeps, what
    found = whole(made)
    expected = [change(unsplit(part)) for part in (x.split(sizes) if sizes else [x])]
    mine = expected[region.rank if sizes else 0]
    close(found, mine, 2e-6, what)
    assert found.dtype == mine.dtype
    if not mine.requires_grad or not mine.is_floating_point():
        return
    assert made.requires_grad
    torch.stack([part.square().sum() for part in expected]).mean().backward()
    grads = [parameter.grad for parameter in (SCALE, BIAS)]
    SCALE.grad = BIAS.grad = None
    found.square().sum().backward()
    close(outside.grad, my_share(x.grad, region, sizes) * (region.degree if sizes else 1), 4e-6, what)
    assert_same_gradients(split, unsplit, 4e-6)
    for parameter, grad in zip((SCALE, BIAS), grads, strict=True):
        if grad is not None:
            close(parameter.grad, grad, 4e-6, what)


def every_operation() -> None:
    torch.manual_seed(2)
    for region in (region_of_all(), region_of_all(0)):
        for what, change in KEEPS.items():
            check(what, change, region, keeps=True)
        for what, change in ONLY_COPIES.items():
            check(what, change, region, keeps=region.gathers is None)
        for what, change in JOINS.items():
            check(what, change, region, keeps=False)
        for what, change in RANKS_CLASSES.items():
            check(what, change, region, keeps=None)
        refusals(region)
        metrics(region)
    vocabularies()


def refusals(region: Region) -> None:
    head = nn.Linear(4, C)
    split_head(head, region)
    logits = head(torch.ones(2, 4))
    for change in (lambda: logits.mul_(2), lambda: logits.__setitem__(0, 1.0), lambda: torch.exp(logits, out=logits)):
        with pytest.raises(ModelError, match="in place"):
            change()
    with pytest.raises(ModelError, match="cannot be pickled"):
        pickle.dumps(logits)
    assert "this rank holds classes" in f"{logits}"
    step = StepOutput(logits.sum(), 1, output={"logits": logits}, target=None)
    release_graph(step)
    assert isinstance(step.output["logits"], SplitLogits)
    assert not step.output["logits"].requires_grad
    assert copy.deepcopy(step.output["logits"]).shape == (2, C)
    assert needs_all_ranks(step.output) == (region.gathers == 0)


def metrics(region: Region) -> None:
    """The named ones, torchmetrics' and functions; where rows are pooled, ranks without samples take part."""
    head, unsplit = twice(nn.Linear(4, C))
    split_head(head, region)
    specs: dict[str, Any] = {
        "accuracy": "accuracy",
        "f1": "f1",
        "auroc": "auroc",
        "top": torchmetrics.Accuracy(task="multiclass", num_classes=C, top_k=3),
        "macro": torchmetrics.Accuracy(task="multiclass", num_classes=C, average="macro", ignore_index=0),
        "top macro": torchmetrics.Accuracy(task="multiclass", num_classes=C, top_k=2, average="macro"),
        "own": lambda output, target: (output.topk(2).indices == target[:, None]).any(-1).float().mean(),
    }
    group = region.group if region.gathers == 0 else None
    found, expected = MetricSet(specs, torch.device("cpu"), group), MetricSet(specs, torch.device("cpu"), group)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + (region.rank if region.gathers == 0 else 0))
        x, target = torch.randn(6, 4, generator=generator), torch.randint(0, C, (6,), generator=generator)
        samples = 0 if step == 2 and region.gathers == 0 and region.rank == 1 else 6
        found.update(head(x).detach(), target, samples)
        expected.update(unsplit(x).detach(), target, samples)
    assert found.compute() == pytest.approx(expected.compute())


def vocabularies() -> None:
    """Templates whose embedding is the output projection, and a head that shares an embedding's weight."""
    region = region_of_all()
    sizes: dict[str, Any] = {"vocab_size": 23, "layers": 1, "hidden": 8, "heads": 2, "context": 8}
    tokens = torch.randint(0, 23, (3, 7))
    for model in (CausalLM(CausalLMConfig(**sizes)), MaskedLM(MaskedLMConfig(**sizes))):
        split, unsplit = twice(model)
        split_vocabulary(split.embedding, region)  # type: ignore[arg-type]
        batch = {"input_ids": tokens, "labels": tokens}
        found, expected = split.training_step(batch), unsplit.training_step(batch)  # type: ignore[operator]
        assert isinstance(found["output"], SplitLogits)
        close(found["loss"], expected["loss"])
        close(whole(found["output"]), expected["output"])
        found["loss"].backward()
        expected["loss"].backward()
        assert_same_gradients(split, unsplit, 4e-6)
        assert split.state_dict().keys() == unsplit.state_dict().keys()
    untied = nn.ModuleDict({"table": nn.Embedding(23, 8), "head": nn.Linear(8, 23, bias=False)})
    untied["head"].weight = untied["table"].weight
    split, unsplit = twice(untied)
    split_vocabulary(split["table"], region)  # type: ignore[index]
    split_head(split["head"], region)  # type: ignore[index]
    assert len(list(split.parameters())) == 1
    for module in (split, unsplit):
        logits = module["head"](module["table"](tokens))  # type: ignore[index]
        functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    assert_same_gradients(split, unsplit, 4e-6)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_split_logits_are_the_whole_ones(ranks: Pool, world_size: int) -> None:
    ranks(world_size, every_operation)


def test_one_rank() -> None:
    values = torch.randn(2, 4, C, requires_grad=True)
    logits = SplitLogits.of_copies(values, Region(None), C)
    for change in (*KEEPS.values(), *ONLY_COPIES.values(), *JOINS.values(), *RANKS_CLASSES.values()):
        torch.testing.assert_close(whole(change(logits)), change(values))
    assert logits.shape == values.shape
    assert len(logits) == 2
    assert logits.requires_grad
    assert logits.tolist() == values.tolist()
