"""Sharded data parallelism where others are wrong: windows, weights of tokens, norms, clipping, tied weights."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import paraflow as pf
from paraflow.parts import is_spread, whole
from paraflow.plugins import FSDP
from tests.matrix.models import Words, words
from tests.pain.test_accumulation import NUMBERS, Slope
from tests.parity.runs import Recorder

LEVELS: list[dict[str, Any]] = [
    {"zero": 1},
    {"zero": 2, "reduce": "last"},
    {"zero": 3},
    {"zero": 3, "reduce": "last"},
    {"zero": 2, "reshard_after_forward": True},
]
"""The ways of FSDP in which gradients wait for each other, or do not."""


class Constant(pf.Model):
    """The gradient of each entry of its weight is 1 whatever the data, so that it counts optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.configure(optimizer="sgd", lr=1.0)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.weight.sum() + 0 * batch.sum()

    validation_step = training_step


def count_steps(world_size: int, accumulate: int) -> list[tuple[list[float], list[float]]]:
    """Five micro-batches a rank, in windows of `accumulate`: the weight and the norms, at each level."""
    results = []
    for level in LEVELS:
        model, recorder = Constant(), Recorder()
        trainer = pf.Trainer(
            accumulate=accumulate,
            clip_norm=float("inf"),
            progress=False,
            callbacks=[recorder],
            plugins=[FSDP(world_size, **level)],
        )
        trainer.fit(model, torch.arange(5.0 * world_size), batch_size=accumulate * world_size)
        results.append((whole(model.weight).tolist(), recorder.norms))
    return results


def test_the_last_short_window_is_a_whole_step(ranks: Any) -> None:
    """Lightning#19987, transformers#38837: gradient 1, five micro-batches, two a step; the last is not halved.

    A window that ends with `fit` is applied (Keras), and the next one begins with no gradient of it.
    """
    for weight, norms in ranks(2, count_steps, 2, 2)[1]:
        assert weight == [-3.0] * 3
        assert norms == pytest.approx([3**0.5] * 3)
    for weight, norms in ranks(3, count_steps, 3, 5)[2]:  # each rank has one entry
        assert (weight, norms) == ([-1.0] * 3, pytest.approx([3**0.5]))


class Ragged(pf.Model):
    """The mean over tokens of weight × row length; the rows have 1 to 8 tokens."""

    def __init__(self, means: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.means = means
        self.configure(optimizer="sgd", lr=1.0)

    def training_step(self, lengths: torch.Tensor) -> Any:
        total, tokens = (self.weight * lengths * lengths).sum(), lengths.sum()
        return {"loss": total / tokens, "weight": tokens} if self.means else (total, tokens)


LENGTHS = torch.arange(1.0, 9.0)
MEAN = float((LENGTHS**2).sum() / LENGTHS.sum())  # 5.667, and the mean of the rows' means is 4.5


def ragged(plans: list[dict[str, Any]]) -> list[tuple[float, float]]:
    results = []
    for plan in plans:
        for level in LEVELS:
            if plan.get("comm_hook") and level.get("reduce") == "last":
                continue  # refused: fsdp-comm-hook
            for means in (False, True):
                model, recorder = Ragged(means), Recorder()
                trainer = pf.Trainer(
                    clip_norm=float("inf"), progress=False, callbacks=[recorder], plugins=[FSDP(2, **level)], **plan
                )
                trainer.fit(model, LENGTHS, batch_size=8)
                assert recorder.norms == pytest.approx([MEAN], rel=1e-2 if plan.get("comm_hook") else 1e-5)
                results.append((1 - whole(model.weight).item(), recorder.losses[0]))
    return results


def test_tokens_weigh_alike_and_the_logged_loss_is_neither_divided_nor_scaled(ranks: Any) -> None:
    """Lightning#20350, transformers#34191, composer PR#3273: the mean over all tokens of all ranks and micro-batches.

    transformers#37766: the same for every number of micro-batches. Lightning#2569, fastai#3023: and so is what is
    logged. torchtitan#1842, verl#5625: no mean of means.
    """
    plans = [{"accumulate": 1}, {"accumulate": 2}, {"accumulate": 4}, {"accumulate": 2, "precision": "fp16"}]
    for gradient, loss in ranks(2, ragged, plans)[1]:
        assert (gradient, loss) == pytest.approx((MEAN, MEAN), rel=1e-5)


def test_windows_sent_in_16_bits_are_finite_and_right(ranks: Any) -> None:
    """pytorch PR#43307: a communication hook and accumulation gave NaN."""
    for gradient, loss in ranks(2, ragged, [{"accumulate": 4, "comm_hook": hook} for hook in ("fp16", "bf16")])[0]:
        assert gradient == pytest.approx(MEAN, rel=1e-2)
        assert loss == pytest.approx(MEAN, rel=1e-5)


class Inside(pf.Callback):
    """Evaluates, and tries to save, after every micro-batch."""

    def __init__(self, folder: str) -> None:
        self.folder, self.seen, self.refused = folder, [], 0

    def on_micro_batch_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.seen.append(trainer.evaluate(trainer.engine.module, NUMBERS[:3], batch_size=2)["loss"])
        try:
            trainer.save(self.folder)
        except pf.ParaflowError as error:
            self.refused += "between two steps" in str(error)


class Sloped(Slope):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


def look_inside(folder: str) -> list[tuple[Any, ...]]:
    results = []
    for level in LEVELS:
        model, inside = Sloped(), Inside(folder)
        trainer = pf.Trainer(accumulate=2, progress=False, callbacks=[inside], plugins=[FSDP(2, **level)])
        trainer.fit(model, DataLoader(NUMBERS, batch_size=4))
        results.append((whole(model.weight).item(), trainer.step, inside.seen, inside.refused))
    return results


def test_nothing_ends_a_window_early_and_none_is_saved_half(ranks: Any, tmp_path: Path) -> None:
    """accelerate#1847, #3017: a validation loader that ends inside a window ends no window.

    transformers#22143: the gradients of a window that is open would be lost, so nothing is saved then.
    """
    for results in ranks(2, look_inside, str(tmp_path / "half")):
        assert results == [(pytest.approx(-18.5), 3, [2.0] * 5, 5)] * len(LEVELS)
    assert not (tmp_path / "half").exists()


class Wide(pf.Model):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 256, bias=False)
        self.configure(optimizer="sgd", lr=0.1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).square().mean()


def alive_in_a_window(degree: int, level: dict[str, Any], deferred: bool) -> tuple[int, int]:
    """After the first of two micro-batches: whole tensors that are alive, and bytes of gradients of this rank."""
    found: list[tuple[int, int]] = []

    def look(trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        gc.collect()
        tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
        tensors += [one.grad for one in tensors if one.is_leaf and type(one.grad) is torch.Tensor]
        size = 64 * 256 * 4
        found.append(
            (
                len({one.data_ptr() for one in tensors if not one.is_meta and one.untyped_storage().size() >= size}),
                sum(one.nbytes for one in trainer.engine.gradients()),
            )
        )

    trainer = pf.Trainer(
        max_steps=1,
        accumulate=2,
        progress=False,
        plugins=[FSDP(degree, **level)],
        callbacks=[pf.callbacks.LambdaCallback(on_after_backward=look)],
    )
    with pf.deferred_init() if deferred else nullcontext():
        model = Wide()
    trainer.fit(model, torch.ones(16, 64), batch_size=16)
    return found[0]


@pytest.mark.parametrize(("degree", "deferred"), [(2, False), (4, True)])
def test_gradients_that_wait_are_shards_unless_asked_otherwise(ranks: Any, degree: int, deferred: bool) -> None:
    """pytorch PR#118298, verl#7458: between micro-batches whole gradients were kept; now memory falls with ranks."""
    for whole_ones, held in ranks(degree, alive_in_a_window, degree, {"zero": 3}, deferred):
        assert (whole_ones, held) == (0, 64 * 256 * 4 // degree)
    for whole_ones, held in ranks(degree, alive_in_a_window, degree, {"zero": 3, "reduce": "last"}, deferred):
        assert (whole_ones, held) == (1, 0), "as asked for: one reduction a step, and whole gradients until then"


class Slopes(pf.Model):
    """The gradient is 2 in each of five entries and 4 in one more, so its norm is 6; a third parameter is frozen."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.five = nn.Parameter(torch.zeros(5, dtype=dtype))
        self.one = nn.Parameter(torch.zeros(1, dtype=dtype))
        self.frozen = nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False)
        # Made before, and from a generator, which can be read once only.
        self.configure(optimizer=torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=1.0))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.five.sum() * 2 + self.one.sum() * 4 + self.frozen.sum()).float() * batch.mean()


def clip_to_half(plans: list[dict[str, Any]], dtype: torch.dtype = torch.float32) -> list[tuple[Any, ...]]:
    """The norm of one step that is clipped to 3, and where the parameters are afterwards."""
    results = []
    for plan in plans:
        scale = plan.get("scale")
        model, recorder = Slopes(dtype), Recorder()
        plugins = [pf.plugins.Precision("fp16", initial_scale=scale)] if scale else []
        trainer = pf.Trainer(
            max_steps=1,
            clip_norm=3.0,
            progress=False,
            callbacks=[recorder],
            plugins=plugins,
            **{key: value for key, value in plan.items() if key != "scale"},
        )
        trainer.fit(model, torch.ones(8), batch_size=8)
        assert model.five.grad is None or trainer.engine.last_norm is not None
        found = {name: whole(value).float().tolist() for name, value in trainer.engine.model_state().items()}
        results.append((recorder.norms[0], found["five"], found["one"], found["frozen"]))
    return results


HALVED = (pytest.approx(6.0), pytest.approx([-1.0] * 5), pytest.approx([-2.0]), [1.0] * 4)
ON_TWO: list[dict[str, Any]] = [
    *({"fsdp": 2, "zero": zero} for zero in (1, 2, 3)),
    {"fsdp": 2, "accumulate": 4, "optimizer_implementation": "foreach"},
    {"fsdp": 2, "optimizer_implementation": "fused"},
    {"fsdp": 2, "apply_groups": 3},
    {"fsdp": 2, "scale": 1.0},
    {"fsdp": 2, "scale": 2.0**10, "accumulate": 2},
    {"fsdp": 2, "scale": 2.0**10, "cpu_offload": "optimizer"},
    {"dp": 2, "cpu_offload": "optimizer"},
    {"fsdp": 2, "cpu_offload": "optimizer", "optimizer_implementation": "fused"},
    {"fsdp": 2, "cpu_offload": "params"},
    {"dp": 2, "cpu_offload": "params", "scale": 2.0**10},
]
ON_FOUR: list[dict[str, Any]] = [{"fsdp": 4}, {"dp": 2, "fsdp": 2}, {"dp": 2, "fsdp": 2, "zero": 1, "accumulate": 2}]


def test_the_norm_is_that_of_the_whole_gradient_and_clipping_reaches_what_is_applied(ranks: Any) -> None:
    """Lightning#19235, pytorch#72548, #170862, LoongForge#152: the norm of a rank's shards was logged and clipped by.

    pytorch PR#88955: what ranks have alike is counted once; fairscale: replicas of shards are another group.
    Lightning#9599: gradients are clipped without their scale. AReaL#335: parameters that come from a generator.
    Megatron-LM#6489, pytorch#153268, #157682: fused and foreach optimizers. pytorch#148532, torchtune#1977, #2108,
    InternEvo#398, pytorch#111650, #82206: gradients and masters on the host are clipped and unscaled, too.
    """
    for results in ranks(2, clip_to_half, ON_TWO):
        for plan, result in zip(ON_TWO, results, strict=True):
            assert result == HALVED, plan
    for results in ranks(4, clip_to_half, ON_FOUR):
        assert results == [HALVED] * len(ON_FOUR)


class Halves(nn.Module):
    """A layer in fp32, one in bf16 and one that is never used; gradients are exact in eight bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(6, 1), nn.Linear(6, 1, dtype=dtype), nn.Linear(6, 6)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).float() + self.second(x.to(self.second.weight.dtype)).float()


def train_halves() -> list[tuple[Any, ...]]:
    results = []
    for dtype, gathered in ((torch.bfloat16, None), (torch.float32, "bf16")):
        for reduce in ("each", "last"):
            model = Halves(dtype)
            pf.configure(
                model, optimizer="sgd", lr=1.0, loss=lambda output, target: (output.squeeze(-1) * target).mean()
            )
            plugin = FSDP(2, reduce=reduce, gather_dtype=gathered)  # type: ignore[arg-type]
            trainer = pf.Trainer(
                max_steps=1, progress=False, accumulate=2, plugins=[plugin], precision=gathered or "fp32"
            )
            trainer.fit(model, (HALF_X, torch.ones(8)), batch_size=8)
            state = {name: whole(value) for name, value in model.state_dict().items()}
            assert [state[f"{part}.weight"].dtype for part in ("first", "second")] == [torch.float32, dtype]
            results.append(tuple(state[f"{part}.weight"].float() for part in ("first", "second", "unused")))
    return results


HALF_X = torch.arange(48.0).view(8, 6) % 8


def test_dtypes_may_be_mixed_with_accumulation_and_unused_parameters(ranks: Any) -> None:
    """pytorch#186998, #196996: the dtype of reduction under accumulation, and parameters without a gradient."""
    for results in ranks(2, train_halves):
        for first, second, unused in results:
            torch.testing.assert_close(first, -HALF_X.mean(0, keepdim=True), rtol=0, atol=0)
            torch.testing.assert_close(second, -HALF_X.mean(0, keepdim=True), rtol=0, atol=0)
            assert not unused.any()


def train_tied(folder: str, stop_at: int, resume: bool, deferred: bool = False, **plan: Any) -> torch.Tensor:
    if deferred:
        with pf.deferred_init():
            model = Words(tied=True)
    else:
        model = Words(tied=True)
    trainer = pf.Trainer(
        max_steps=stop_at, seed=3, progress=False, callbacks=[pf.callbacks.Checkpoint(folder, 1)], clip_norm=1.0, **plan
    )
    trainer.fit(model, words(16), batch_size=8, resume=folder if resume else None)
    assert model.head.weight is model.table.weight
    assert is_spread(model.head.weight) == ("fsdp" in plan)
    assert len(list(model.parameters())) == len(list(Words(tied=True).parameters()))
    return whole(model.table.weight).detach().clone()


def tie(folder: str) -> list[torch.Tensor]:
    results = []
    for place, deferred in enumerate((False, True)):
        train_tied(f"{folder}/{place}", 2, False, deferred, fsdp=2)
        results.append(train_tied(f"{folder}/{place}", 4, True, deferred, fsdp=2))
    with pytest.raises(pf.ModelError, match="head shares a parameter with a module outside of it, and tied weights"):
        pf.Trainer(progress=False, plugins=[FSDP(2, units=["head"])]).fit(Words(tied=True), words(8), batch_size=8)
    return results


def test_a_tie_outlives_sharding_and_loading(ranks: Any, tmp_path: Path) -> None:
    """torchtitan#1524, #2495, accelerate#4171, pytorch#176076: embedding and head are one parameter in one unit."""
    expected = train_tied(str(tmp_path / "one"), 4, False)
    for results in ranks(2, tie, str(tmp_path)):
        for weight in results:
            torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(train_tied(str(tmp_path / "0"), 4, True), expected, rtol=1e-5, atol=1e-6)
