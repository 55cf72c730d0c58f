"""What split layers get wrong: gradients of what is whole beside them, random numbers, dtypes, saving by one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import paraflow as pf
from paraflow.parts import is_spread, whole
from tests.pain.composed import SEED, Steps, Task, assert_alike
from tests.parity.runs import whole_parameters
from tests.tensor_parallel.models import causal_lm

SHARES = {"tensor_parallel": {"sequence_parallel": True}}


class Language(pf.Model):
    """Norms with biases between split layers, biases behind them, a table that is the head, and fewer key heads."""

    def __init__(self) -> None:
        super().__init__()
        self.net = causal_lm(positions="learned", kv_heads=2, layers=2)
        self.configure(optimizer="sgd", lr=1.0)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        logits = self.net(x)
        return functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"), y.numel()

    def mean_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total, count = self.training_step((x, y))
        return total / count


TOKENS = torch.randint(0, 1_000, (6, 8), generator=torch.Generator().manual_seed(1))
TASK = Task(Language, (TOKENS, TOKENS.roll(1, 1)), batch_size=4)

ON_TWO: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 2, "options": SHARES},
    {"tp": 2, "options": SHARES, "accumulate": 2, "activation_checkpointing": "full"},
]
ON_FOUR: list[dict[str, Any]] = [
    {"tp": 4, "options": SHARES},
    {"tp": 2, "fsdp": 2, "zero": 3, "options": SHARES},
    {"tp": 2, "pp": 2, "accumulate": 2, "activation_checkpointing": "full"},
]


def steps_under(plans: list[dict[str, Any]]) -> list[Steps]:
    return [TASK.under(**plan) for plan in plans]


def test_what_is_whole_beside_split_layers_has_the_whole_gradient(ranks: Any) -> None:
    """Megatron-LM#443, #1446, TransformerEngine#435, #441, gpt-neox#1257, #1259: norms saw a share of the sequence.

    Their gradients, and those of biases behind layers that are split by rows, were not added up, or were added where
    each rank had the whole. With rate 1 every parameter moves by its gradient.
    """
    expected = TASK.by_hand()
    assert_alike(ranks(2, steps_under, ON_TWO), ON_TWO, expected)
    assert_alike(ranks(4, steps_under, ON_FOUR), ON_FOUR, expected)


class Dropping(nn.Module):
    """Dropout of what each rank of a group has a part of, and of what it has alike."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 16)
        self.outer = nn.Dropout(0.5)
        self.inner.register_forward_hook(lambda _, args, output: self.parts.append(output == 0))
        self.outer.register_forward_hook(lambda _, args, output: self.copies.append(output == 0))
        self.parts: list[torch.Tensor] = []
        self.copies: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.down(self.inner(self.up(x))))


def dropped(degrees: dict[str, int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Where the inner and the outer dropout gave zero, in each layer and micro-batch of this rank."""
    torch.manual_seed(1)
    model = pf.configure(nn.Sequential(Dropping(), Dropping()), optimizer="sgd", lr=0.1, loss="mse")
    options = {"tensor_parallel": {"plan": {"*.up": "colwise", "*.down": "rowwise"}}}
    trainer = pf.Trainer(plan=pf.Plan(**degrees, options=options), max_steps=1, seed=SEED, progress=False)
    trainer.fit(model, (torch.ones(4, 16), torch.ones(4, 16)), batch_size=4)
    return [zeros for layer in model for zeros in layer.parts], [zeros for layer in model for zeros in layer.copies]


def test_dropout_is_alike_only_where_activations_are(ranks: Any) -> None:
    """pytorch#141220, #168375, slapo#21: alike over the parts of a layer, or apart over copies of one activation."""
    for degrees in ({"tp": 2, "dp": 2, "accumulate": 2}, {"tp": 2, "pp": 2, "accumulate": 2}):
        at = ranks(4, dropped, degrees)  # ranks 0 and 1 share layers, and so do 2 and 3
        for one, other in ((0, 1), (2, 3)):
            assert all(map(torch.equal, at[one][1], at[other][1])), "copies of one activation"
        inner = {tuple(zeros.flatten().tolist()) for parts, _ in at for zeros in parts}
        outer = {tuple(zeros.flatten().tolist()) for _, copies in at for zeros in copies}
        assert len(inner) == sum(len(parts) for parts, _ in at) == 4 * (4 if "dp" in degrees else 2)
        assert len(outer) == len(inner) // 2


class OneHalf(nn.Module):
    """Only the second of two inner features has a gradient, which is too large for fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False)
        self.up.weight.data.zero_()
        self.down.weight.data.copy_(torch.tensor([[0.0, 1.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def overflowing() -> list[tuple[list[float], float]]:
    found = []
    for scale in (2.0**10, 1.0):
        model = pf.configure(OneHalf(), optimizer="sgd", lr=1.0, loss=lambda output, _: output.float().mean())
        split = pf.plugins.TensorParallel(2, plan={"up": "colwise", "down": "rowwise"})
        precision = pf.plugins.Precision("fp16", initial_scale=scale)
        trainer = pf.Trainer(max_steps=1, progress=False, plugins=[precision, split])
        trainer.fit(model, (torch.full((2, 1), 2.0**10), torch.zeros(2)), batch_size=2)
        scale = trainer.engine.state_dict()["plugins"]["precision"]["scale"]
        found.append((whole(model.up.weight).flatten().tolist(), scale))
    return found


def test_an_overflow_in_one_part_drops_the_step_of_all(ranks: Any) -> None:
    """torchtitan#803: whether gradients are finite was decided by each rank for itself."""
    assert ranks(2, overflowing) == [[([0.0, 0.0], 2.0**9), ([0.0, -(2.0**10)], 1.0)]] * 2


class Mixed(nn.Module):
    """Layers in fp32 and bf16 that are split, and a norm; small whole numbers, which both dtypes have."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 4), nn.Linear(4, 2, dtype=torch.bfloat16)
        for place, parameter in enumerate(self.parameters()):
            with torch.no_grad():
                parameter.copy_((torch.arange(parameter.numel()) % (place + 2) - 1).view(parameter.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).bfloat16()).float()


BITS = (torch.arange(48).view(8, 6) * 7 % 5 < 2).float()


def mixed(plans: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    found = []
    for plan in plans:
        model = pf.configure(Mixed(), optimizer="sgd", lr=1.0, loss=lambda output, _: output.sum(-1).mean())
        split = [pf.plugins.TensorParallel(2, plan={"up": "colwise", "down": "rowwise"})] if plan else []
        trainer = pf.Trainer(max_steps=1, seed=SEED, progress=False, plugins=split, **plan)
        trainer.fit(model, (BITS, torch.zeros(8)), batch_size=8)
        assert is_spread(model.down.weight) == bool(plan)
        found.append({name: value.float() for name, value in whole_parameters(trainer).items()})
    return found


def test_dtypes_may_be_mixed(ranks: Any) -> None:
    """pytorch#186998, #196996: what gradients are added up in, where layers have other dtypes."""
    (expected,) = mixed([{}])
    for world_size, plans in ((2, [{"tp": 2}, {"tp": 2, "accumulate": 2}]), (4, [{"tp": 2, "fsdp": 2}])):
        for results in ranks(world_size, mixed, plans):
            for found in results:
                assert all(torch.equal(value, found[name]) for name, value in expected.items())


def on_main(folder: str, plan: dict[str, Any]) -> tuple[bool, str]:
    """Rank 0 alone looks at the state, and in a second run saves."""
    said = ""
    for saves in (False, True):

        def alone(trainer: pf.Trainer, logs: dict[str, Any], saves: bool = saves) -> None:
            if pf.is_main():
                trainer.engine.state_dict()
                trainer.engine.module.state_dict()
                if saves:
                    trainer.save(folder)

        trainer = pf.Trainer(
            max_steps=2,
            debug=True,
            progress=False,
            callbacks=[pf.callbacks.LambdaCallback(on_checkpoint=alone)],
            **plan,
        )
        try:
            trainer.fit(Language(), TASK.data, batch_size=4)
        except pf.ParaflowError as error:
            said = str(error)
            assert saves
    return trainer.step == 2, said


def test_state_is_no_collective_and_a_save_on_one_rank_is_found(ranks: Any, tmp_path: Path) -> None:
    """transformers#48569, AReaL#1468: rank 0 alone saved a split model, and waited for ever."""
    for plan in ({"tp": 2}, {"pp": 2, "accumulate": 2}):
        for _, said in ranks(2, on_main, str(tmp_path / "alone"), plan):
            assert "rank 0 is about to run" in said
            assert "test_tensor_parallel.py" in said
