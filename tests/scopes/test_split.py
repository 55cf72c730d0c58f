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
from tests.scopes.models import HeadBeside, vectors

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


def made(*, scoped: bool = True) -> HeadBeside:
    torch.manual_seed(3)
    return HeadBeside(deep=True, scoped=scoped)


def resume_all(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "saved": trained(made(), folder / "four", 1),
        "resumed": trained(made(), folder / "resumed", 2, folder / "four"),
        "never stopped": trained(made(), None, 2),
        "from one": trained(made(), folder / "from one", 2, folder / "one"),
    }


def test_any_plan_resumes_from_what_it_saved(ranks: Pool, tmp_path: Path) -> None:
    trained(made(scoped=False), tmp_path / "one", 1)
    for rank in ranks(4, resume_all, tmp_path):
        assert all(torch.equal(rank["resumed"][name], value) for name, value in rank["never stopped"].items())
    alone = trained(made(scoped=False), None, 2)
    from_four = trained(made(scoped=False), None, 2, tmp_path / "four")
    for name, value in alone.items():
        torch.testing.assert_close(from_four[name], value, rtol=1e-5, atol=1e-5, msg=name)
    for folder in ("from one", "resumed"):
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


def train_watched() -> set[int]:
    watch = Watch()
    with pf.deferred_init():
        model = HeadBeside(CLASSES)
    x, y = vectors(8)
    trainer = pf.Trainer(max_steps=1, progress=False, callbacks=[watch], clip_norm=1.0)
    trainer.fit(model, (x, y), (x, y), batch_size=8)
    return watch.sizes.seen


def test_no_rank_ever_has_all_classes(ranks: Pool) -> None:
    for rank, seen in enumerate(ranks(4, train_watched)):
        assert CLASSES not in seen
        assert -(-CLASSES // 4) in seen or rank == 3


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


def test_names_are_a_list() -> None:
    with pytest.raises(pf.PlanError, match="takes a list of names"):
        pf.plugins.Split("head")
