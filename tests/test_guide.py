"""The guide's scripts run as they stand there, and the messages that it explains are those that are raised."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.errors import ParaflowError
from paraflow.pipelining.orders import SCHEDULES
from paraflow.tensor_parallel.layout import KINDS
from tests.pool import Pool, RankError

GUIDE = Path(__file__).parents[1] / "docs" / "guide.md"
TEXT = GUIDE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
# What each script prints, in the order of the guide; a step of section 1 logs what it returned beside the loss.
PRINTS = [
    r"\[\d.*\] \[0\.\d",
    r"5 20\ntorch.Size\(\[96\]\)",
    r"meta\n[\s\S]+ recompute [\s\S]+\nTrue",
    r"True torch.Size\(\[256, 1000\]\)",
    r"\) trains as one process does: 2 steps",
    r"stopped after (\d|[1-4]\d) epochs",
    "the same weights",
]


@pytest.mark.parametrize("place", range(len(PRINTS)))
def test_a_script_runs(place: int, tmp_path: Path) -> None:
    assert len(BLOCKS) == len(PRINTS)
    (tmp_path / "script.py").write_text(BLOCKS[place], encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert re.search(PRINTS[place], result.stdout), result.stdout


def test_what_it_links_to_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (GUIDE.parent / target).exists(), target


class Stepping(nn.Linear):
    """A layer whose step returns what a function makes of its output."""

    def __init__(self, make: Callable[[torch.Tensor], Any], **recipe: Any) -> None:
        super().__init__(3, 2)
        self.make = make
        pf.configure(self, **recipe)

    def training_step(self, batch: Any) -> Any:
        return self.make(self(batch[0]))


X, Y = torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)


def net(**recipe: Any) -> nn.Linear:
    return pf.configure(nn.Linear(3, 2), **{"loss": "cross_entropy", **recipe})


def fit(model: nn.Module, data: Any = (X, Y), epochs: int = 1, **trainer: Any) -> None:
    pf.Trainer(max_epochs=epochs, progress=False, **trainer).fit(model, data)


def check_rules() -> None:
    from paraflow.rules import Facts, check

    check(Facts(plan=pf.Plan(dp=4), world_size=4, batch_size=2, provided=frozenset({"dp"})))


def load_another(folder: Path) -> None:
    fit(net(), callbacks=[pf.callbacks.Checkpoint(folder)])
    pf.checkpoint.load_model(nn.Linear(3, 5), folder)


class Half(nn.Module):
    """Two layers, of which forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)  # type: ignore[no-any-return]


def fit_half() -> None:
    fit(pf.configure(Half(), loss="cross_entropy"))


class Tied(nn.Module):
    """Layers of which the last one's weight is used by code that does not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = dict(self.named_parameters())
        return self.third(self.second(self.first(x)) @ weights["first.weight"])  # type: ignore[no-any-return]


class Looking(nn.Sequential):
    """Layers between which a value is looked at."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self[0](x)
        return self[1](hidden * 2 if hidden.sum() > 0 else hidden)  # type: ignore[no-any-return]


def share_out_few_heads() -> None:
    from paraflow.tensor_parallel.derive import Attention
    from paraflow.tensor_parallel.heads import share_of

    share_of(Attention("attention", "q", "k", "v", "o", heads=2, kv_heads=2, head_dim=4), degree=3, rank=0)


def cut_one_layer() -> None:
    from paraflow.pipelining.cut import cut

    cut(nn.Linear(3, 2), 2)


def look_between_layers() -> None:
    from paraflow.pipelining.replay import Replay

    model = Looking(nn.Linear(3, 3), nn.Linear(3, 2))
    Replay(model, [["0"], ["1"]]).trace(lambda: model(X))


def scopes_on_three_ranks() -> None:
    from paraflow.scope_plans import fields_of

    with pf.replica(), pf.split(2):
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    fields_of(model, 3, {}, torch.device("cpu"))


REFUSALS: dict[str, Callable[[Path], Any]] = {
    "cannot be divided over": lambda folder: check_rules(),
    "is for 2 ranks, and the world has 1": lambda folder: fit(net(), dp=2),
    "has no target for the loss": lambda folder: fit(net(), X),
    "has no loss: its output": lambda folder: fit(net(loss=None), X),
    "The loss must be a scalar tensor": lambda folder: fit(Stepping(lambda out: out.sum(1))),
    "The loss does not depend on any parameter": lambda folder: fit(Stepping(lambda out: out.mean().detach())),
    "need what the model predicted": lambda folder: fit(Stepping(lambda out: out.mean(), metrics=["accuracy"])),
    "Nothing measures": lambda folder: fit(net(), callbacks=[pf.callbacks.Checkpoint(folder, monitor="mse")], epochs=2),
    "An iterator can be read only once": lambda folder: fit(net(), iter([(X, Y)]), epochs=2),
    "is of another model": load_another,
    "ranks cannot share out": lambda folder: share_out_few_heads(),
    "units to put in stages": lambda folder: cut_one_layer(),
    "reads the values of a tensor that is not on every stage": lambda folder: look_between_layers(),
    "of which a world of 3 is no multiple": lambda folder: scopes_on_three_ranks(),
}


OF_TWO_RANKS = "had no part in the loss of the first step"
OF_A_LAYOUT: dict[str, Callable[[], Any]] = {
    "is known to be splittable": lambda: fit(net(), tp=2),
    "is used outside of its own module": lambda: fit_tied(),
    "was called outside of a step": lambda: call_what_is_in_stages(),
}


def fit_tied() -> None:
    fit(pf.configure(Tied(), loss="cross_entropy"), plugins=[pf.plugins.Pipeline(2, stages=["second"])])


def call_what_is_in_stages() -> None:
    model = pf.configure(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), loss="cross_entropy")
    fit(model, pp=2)
    model(X)


def refused_on_two_ranks() -> list[str]:
    said = []
    for refused in OF_A_LAYOUT.values():
        with pytest.raises(ParaflowError) as caught:
            refused()
        said.append(str(caught.value))
    return said


def test_every_message_that_is_explained_is_tested() -> None:
    table = TEXT.split("## 12.")[1]
    assert set(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)) == {*REFUSALS, OF_TWO_RANKS, *OF_A_LAYOUT}


@pytest.mark.parametrize("message", REFUSALS)
def test_a_message_is_raised(message: str, tmp_path: Path) -> None:
    with pytest.raises(ParaflowError, match=re.escape(message)):
        REFUSALS[message](tmp_path)


def test_a_message_of_two_ranks_is_raised(ranks: Pool) -> None:
    with pytest.raises(RankError, match=OF_TWO_RANKS):
        ranks(2, fit_half)


def test_the_messages_of_layouts_are_raised(ranks: Pool) -> None:
    for said in ranks(2, refused_on_two_ranks):
        assert [message in text for message, text in zip(OF_A_LAYOUT, said, strict=True)] == [True] * 3, said


def test_its_plugins_are_made_as_it_says() -> None:
    section = TEXT.split("## 8.")[1].split("## 9.")[0]
    calls = re.findall(r"^pf\.plugins\..*$", section, re.MULTILINE)
    assert len(calls) == 8
    for call in calls:
        eval(call, {"pf": pf})
    schedules = re.findall(r'^\| (`"[^|]+) \|', section, re.MULTILINE)
    assert set(re.findall(r'"(\w+)"', " ".join(schedules))) == set(SCHEDULES)
    kinds = re.findall(r"^\| (`[a-z_`, ]+) \| (?:each|rows|whole)", section, re.MULTILINE)
    assert set(re.findall(r"\w+", " ".join(kinds))) == set(KINDS)


def test_the_names_are_those_of_the_code() -> None:
    from paraflow.models.losses import _LOSSES
    from paraflow.models.named_metrics import _CLASSIFICATION, _REGRESSION
    from paraflow.optim import optimizer_names, schedule_names

    rows = dict(re.findall(r"^\| `(\w+)=` \| ([^|]+) \|", TEXT, re.MULTILINE))
    named = {row: set(re.findall(r"`(\w+)`", cell)) for row, cell in rows.items()}
    assert named["loss"] == set(_LOSSES)
    assert named["metrics"] == {*_CLASSIFICATION, *_REGRESSION}
    assert named["optimizer"] <= set(optimizer_names())
    assert named["schedule"] == set(schedule_names())
