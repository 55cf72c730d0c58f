"""One weight under two names, whatever is between them: stages, split layers, shards, and a change of the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import paraflow as pf
from tests.matrix.models import Words, words
from tests.pain.composed import SEED, Steps, Task, assert_alike
from tests.parity.runs import whole_parameters


class Tied(Words):
    """The table is the head, too."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.configure(optimizer="sgd", lr=1.0)

    def mean_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total, count = self.training_step((x, y))
        return total / count


TASK = Task(Tied, words(11), batch_size=8, epochs=2, clip=0.5)
VOCABULARY = {"tensor_parallel": {"plan": {"table": "vocabulary", "head": "logits"}}}
THERE_AND_BACK = {"pipeline": {"schedule": "zbv", "chunks": 2}}  # the first and the last stage are on one rank

ON_TWO: list[dict[str, Any]] = [
    {"pp": 2, "accumulate": 2},
    {"pp": 2, "accumulate": 2, "options": THERE_AND_BACK},
    {"tp": 2},
    {"tp": 2, "options": VOCABULARY},
]
ON_FOUR: list[dict[str, Any]] = [
    {"pp": 4, "accumulate": 2},
    {"pp": 2, "fsdp": 2, "zero": 3, "accumulate": 2},
    {"pp": 2, "tp": 2, "accumulate": 2, "options": VOCABULARY},
    {"fsdp": 2, "tp": 2, "zero": 3, "options": VOCABULARY},
    {"pp": 2, "dp": 2, "accumulate": 2, "apply_groups": 2},
]


def steps_under(plans: list[dict[str, Any]]) -> list[Steps]:
    found = []
    for plan in plans:
        model = Tied()
        found.append(TASK.under(model, **plan))
        here = model.table.weight is not None and model.head.weight is not None
        assert not here or model.table.weight is model.head.weight
        assert here or plan["pp"] > 1
    return found


def test_it_is_trained_as_one_and_counts_once_in_the_norm(ranks: Any) -> None:
    """torchtitan#1524, accelerate#4171: embedding and head on other stages, or in other groups, went their own ways.

    Every stage that holds it has it bit by bit (`whole_parameters` compares).
    """
    expected = TASK.by_hand()
    assert torch.equal(expected.parameters["table.weight"], expected.parameters["head.weight"])
    assert_alike(ranks(2, steps_under, ON_TWO), ON_TWO, expected)
    assert_alike(ranks(4, steps_under, ON_FOUR), ON_FOUR, expected)


PLANS: list[pf.Plan] = [
    pf.Plan(pp=2, accumulate=2),
    pf.Plan(tp=2, options=VOCABULARY),
    pf.Plan(pp=2, accumulate=2, options=THERE_AND_BACK),
    pf.Plan(fsdp=2),
]


def going_on(folder: str, plan: pf.Plan | None, last: int) -> dict[str, torch.Tensor]:
    """Goes on with a run up to a step, and saves."""
    model = Tied().configure(optimizer="adamw", lr=1e-2, eps=1e-2)  # with moments, of which there is one set as well
    trainer = pf.Trainer(
        plan=plan,
        max_epochs=9,
        max_steps=last,
        seed=SEED,
        progress=False,
        callbacks=[pf.callbacks.Checkpoint(folder, every="1st")],
    )
    trainer.fit(model, TASK.data, batch_size=8, resume=folder if last > 2 else None)
    return whole_parameters(trainer)


def test_the_tie_outlives_saving_and_loading_under_any_plan(ranks: Any, tmp_path: Path) -> None:
    """torchtitan#2495, pytorch#176076: the tie was lost in loading.

    Megatron-LM#1517, #7162: what one layout has saved, another loads.
    """
    for place, plan in enumerate(PLANS):
        first, second = ranks(2, going_on, str(tmp_path / "run"), plan, 2 * place + 2)
        assert all(torch.equal(value, second[name]) for name, value in first.items())
    last = going_on(str(tmp_path / "run"), None, 10)
    expected = going_on(str(tmp_path / "alone"), None, 2)
    expected = going_on(str(tmp_path / "alone"), None, 10)
    assert torch.equal(last["table.weight"], last["head.weight"])
    for name, value in expected.items():
        torch.testing.assert_close(last[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
