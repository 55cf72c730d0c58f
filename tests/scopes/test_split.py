"""A head that is split over the data ranks trains as it does on one process, and no rank holds all its classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import paraflow as pf
from paraflow.parts import local
from paraflow.plugins.split import kinds_of
from paraflow.resolve import Request, resolve
from tests.pool import Pool
from tests.scopes.models import HeadBeside, TiedBeside, vectors

COUNT = 13  # the last batch leaves ranks without a sample
CLASSES = 100_003


def trained(model: nn.Module, folder: Path | None, epochs: int, resume: Path | None = None) -> dict[str, torch.Tensor]:
    """What this rank holds of a model after so many epochs, which it may save."""
    torch.manual_seed(3)
    trainer = pf.Trainer(max_epochs=epochs, seed=5, progress=False)
    trainer.fit(model, vectors(COUNT), batch_size=8, resume=resume)
    if folder is not None:
        trainer.save(folder)
    return {name: local(value).detach().clone() for name, value in model.state_dict().items()}


def made(over: int | None = None, *, scoped: bool = True) -> HeadBeside:
    torch.manual_seed(3)
    return HeadBeside(deep=True, scoped=scoped, over=over)


def resume_all(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "saved": trained(made(), folder / "four", 1),
        "resumed": trained(made(), folder / "resumed", 2, folder / "four"),
        "never stopped": trained(made(), None, 2),
        "from one": trained(made(), folder / "from one", 2, folder / "one"),
        "over two": trained(made(2), folder / "over two", 2, folder / "four"),
    }


def test_any_plan_resumes_from_what_it_saved(ranks: Pool, tmp_path: Path) -> None:
    trained(made(scoped=False), tmp_path / "one", 1)
    for rank in ranks(4, resume_all, tmp_path):
        assert all(torch.equal(rank["resumed"][name], value) for name, value in rank["never stopped"].items())
    alone = trained(made(scoped=False), None, 2)
    from_four = trained(made(scoped=False), None, 2, tmp_path / "four")
    for name, value in alone.items():
        torch.testing.assert_close(from_four[name], value, rtol=1e-5, atol=1e-5, msg=name)
    for folder in ("from one", "resumed", "over two"):
        end = trained(made(scoped=False), None, 2, tmp_path / folder)  # nothing is left to train
        for name, value in alone.items():
            torch.testing.assert_close(end[name], value, rtol=1e-5, atol=1e-5, msg=name)


class Sizes(TorchDispatchMode):
    """Notes the sizes of what is computed; what only stands for tensors on all ranks has no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        held = [leaf for leaf in tree_leaves(result) if type(leaf) in (torch.Tensor, nn.Parameter)]
        self.seen.update(size for leaf in held for size in leaf.shape)
        return result


class Watch(pf.Callback):
    def __init__(self) -> None:
        self.sizes = Sizes()

    def on_train_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.sizes.__enter__()

    def on_train_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.sizes.__exit__(None, None, None)


def train_watched(classes: int, scoped: bool, fields: dict[str, Any]) -> set[int]:
    watch = Watch()
    with pf.deferred_init():
        model = HeadBeside(classes, scoped=scoped)
    x, y = vectors(8)
    trainer = pf.Trainer(max_steps=1, progress=False, callbacks=[watch], clip_norm=1.0, **fields)
    trainer.fit(model, (x, y), (x, y), batch_size=8)
    return watch.sizes.seen


def test_no_rank_ever_has_all_classes(ranks: Pool) -> None:
    for fields in ({}, {"tp": 4}):
        for rank, seen in enumerate(ranks(4, train_watched, CLASSES, not fields, fields)):
            assert CLASSES not in seen
            assert -(-CLASSES // 4) in seen or rank == 3


@pytest.mark.slow
def test_no_rank_ever_has_a_million_classes(ranks: Pool) -> None:
    for seen in ranks(4, train_watched, 1_000_000, True, {}):
        assert max(seen) == 250_000


def train_again() -> list[float]:
    model, data = HeadBeside(deep=True), vectors(COUNT)
    first = pf.Trainer(max_epochs=1, progress=False)
    first.fit(model, data, batch_size=8)
    return [trainer.evaluate(model, data, batch_size=8)["loss"] for trainer in (first, pf.Trainer(progress=False))]


def test_a_model_that_is_split_already_is_used_again(ranks: Pool) -> None:
    for before, after in ranks(2, train_again):
        assert before == pytest.approx(after, rel=1e-6)


class ReadsWeights(nn.Module):
    """A layer whose weight is used outside of it, which therefore stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x @ self.inner.weight)


def test_layers_are_split_by_what_stands_around_them() -> None:
    deep = HeadBeside(deep=True)
    assert kinds_of(deep, ["head"]) == {"head.0": "colwise", "head.2": "rowwise", "head.4": "logits"}
    assert kinds_of(HeadBeside(), ["features"]) == {"features.0": "colwise", "features.2": "rowwise"}
    attention = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "head": nn.Linear(8, 4)})
    assert kinds_of(attention, [""]) == {"head": "logits"}
    assert kinds_of(ReadsWeights(), [""]) == {"head": "logits"}
    with pytest.raises(pf.PlanError, match="Nothing in 0 of Sequential can be split"):
        kinds_of(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), ["0"])
    with pytest.raises(pf.PlanError, match="has no such module"):
        kinds_of(deep, ["tail"])


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ({"fsdp": 4}, "split-with-fsdp"),
        ({"tp": 2}, "split-beside-replicas"),
        ({"cpu_offload": "optimizer"}, "split-with-offload"),
        ({"compile": True}, "split-compile"),
    ],
)
def test_what_it_cannot_stand_beside_is_refused(
    flags: dict[str, Any], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    device = torch.device("cpu")
    with pytest.raises(pf.PlanError, match=rule):
        resolve(Request(flags=flags).with_scopes(HeadBeside(), device), device, 8)


def test_what_is_said_of_a_layer_wins() -> None:
    deep = HeadBeside(deep=True)
    joined = {"head.0": "colwise_joined", "head.2": "colwise_joined", "head.4": "logits"}
    assert kinds_of(deep, ["head"], {"head.2": "colwise"}) == joined
    assert kinds_of(deep, ["head"], {"head.*": "colwise"}) == joined
    pair = {"head.0": "colwise", "head.2": "rowwise", "head.4": "logits"}
    assert kinds_of(deep, ["head"], {"head.0": "colwise", "head.2": "rowwise"}) == pair
    assert kinds_of(deep, ["head"], {"head.4": "rowwise"}) == {**pair, "head.4": "rowwise"}
    assert kinds_of(deep, ["head"], {"head.0": "replicate", "head.2": "replicate"}) == {"head.4": "logits"}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"head.4": "sideways"}, "Split's plan says 'sideways' of 'head.4'"),
        ({"tail": "colwise"}, "Split's plan names 'tail', and HeadBeside has no such module"),
        ({"head.4": "vocabulary"}, "Split's plan says 'vocabulary' of 'head.4', which is a Linear"),
        ({"features.0": "colwise"}, "'features.0', which is in none of its modules"),
        ({"head.4": "partial"}, "'head.4', which cannot be 'partial'"),
    ],
)
def test_what_cannot_be_said_of_a_layer_is_refused(plan: dict[str, str], message: str) -> None:
    with pytest.raises(pf.PlanError, match=message):
        kinds_of(HeadBeside(deep=True), ["head"], plan)


def test_tied_layers_are_split_together_or_not_at_all() -> None:
    tied = TiedBeside()
    assert kinds_of(tied, ["table", "head"]) == {"table": "vocabulary", "head": "logits"}
    for alone in ("table", "head"):
        with pytest.raises(pf.PlanError, match="are one parameter, and the split would divide only the first"):
            kinds_of(tied, [alone])
    with pytest.raises(pf.PlanError, match="table and head share one weight"):
        kinds_of(tied, ["table", "head"], {"head": "rowwise"})


def test_names_are_a_list() -> None:
    with pytest.raises(pf.PlanError, match="takes a list of names"):
        pf.plugins.Split("head")
    with pytest.raises(pf.PlanError, match="maps names or patterns"):
        pf.plugins.Split(["head"], plan="colwise")  # type: ignore[arg-type]  # what is refused
    with pytest.raises(pf.PlanError, match="whole number of at least 2"):
        pf.plugins.Split(["head"], degree=1)
