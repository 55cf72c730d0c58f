"""Memory that runs out in a step: on one rank or in one process, before or in backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paraflow as pf
from paraflow.data.batch import Batch, MicroBatch
from paraflow.memory import in_parts
from paraflow.watch.board import Board
from tests.pool import RankError

SAMPLES, BATCH = 23, 10


class TooMuch(torch.autograd.Function):
    """Asks for memory that no machine has, in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str) -> torch.Tensor:
        ctx.where = where
        if where == "forward":
            torch.empty(2**50)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.where in ("backward", "late backward"):
            torch.empty(2**50)
        return gradient, None


class Hungry(pf.Model):
    """Runs out of memory on one rank, in training, when a micro-batch has more samples than fit."""

    def __init__(self, fits: int, rank: int, where: str, counted: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = torch.nn.Linear(5, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)
        self.fits, self.rank, self.where, self.counted = fits, rank, where, counted
        self.sizes: list[int] = []

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        self.sizes.append(len(x))
        much = len(x) > self.fits and pf.rank() == self.rank
        hidden = self.first(x)
        if much and self.where == "late backward":
            hidden = TooMuch.apply(hidden, self.where)
        output = self.last(torch.tanh(self.norm(hidden)))
        if much and self.where != "late backward":
            output = TooMuch.apply(output, self.where)
        losses = torch.nn.functional.cross_entropy(output, y, reduction="none")
        return (losses[y > 0].sum(), (y > 0).sum()) if self.counted else losses.mean()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 5, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)


def train(fits: int, rank: int = 0, where: str = "forward", counted: bool = False, **plan: Any) -> dict[str, Any]:
    model = Hungry(fits, rank, where, counted).configure(optimizer="adamw", lr=1e-2)
    trainer = pf.Trainer(max_epochs=2, seed=5, progress=False, **plan)
    history = trainer.fit(model, data(), batch_size=BATCH)
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "loss": history["loss"],
        "parts": trainer.run.parts,
        "sizes": model.sizes,
        "steps": trainer.step,
    }


def assert_same(mine: dict[str, Any], whole: dict[str, Any]) -> None:
    assert mine["steps"] == whole["steps"]
    assert mine["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    for name, value in mine["weights"].items():
        torch.testing.assert_close(value, whole["weights"][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward", "late backward"])
def test_one_process_halves_until_it_fits(where: str, counted: bool) -> None:
    whole = train(99, counted=counted)
    mine = train(3, where=where, counted=counted, auto="O1", optimizer_implementation="default")
    assert mine["parts"] == 4  # 10, 5, then 3 + 3 + 2 + 2
    assert mine["sizes"][:4] == [2, 10, 5, 3]  # auto measures two samples; each attempt begins with the whole batch
    assert_same(mine, whole)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("hungry", [0, 1])
def test_all_ranks_halve_when_one_runs_out(ranks: Any, where: str, counted: bool, hungry: int) -> None:
    whole = train(99, counted=counted)
    results = ranks(2, train, 2, hungry, where, counted, auto="O1", optimizer_implementation="default")
    for mine in results:
        assert mine["parts"] == 4  # 5, then 3 + 2, then 2 + 1 + 1 + 1
        assert_same(mine, whole)


def test_three_ranks_of_which_two_run_out(ranks: Any) -> None:
    whole = train(99)
    for mine in ranks(3, train_hungry_pair, 2):
        assert_same(mine, whole)


def train_hungry_pair(fits: int) -> dict[str, Any]:
    return train(fits, rank=max(pf.rank(), 1), auto="O1", optimizer_implementation="default")


def test_gradients_that_were_exchanged_in_part_are_not_exchanged_again(ranks: Any) -> None:
    with pytest.raises(RankError, match=r"ran out of memory in backward, while gradients were being averaged"):
        ranks(2, train, 2, 1, "late backward", auto="O1")


def test_nothing_fits() -> None:
    with pytest.raises(pf.errors.ParaflowError, match="micro-batch of 1 sample does not fit"):
        train(0, auto="O1")


def test_what_was_said_is_kept_and_the_error_says_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(Board, "post", lambda _, kind, traceback: told.append(traceback))
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        train(3, accumulate=2)
    note = "on micro-batches of 5 samples. Write accumulate=4, or leave accumulate out"
    assert note in caught.value.__notes__[0]
    assert note in told[0]


def notes_of_shards() -> list[str]:
    try:
        train(3, rank=pf.rank(), fsdp=2)
    except RuntimeError as error:
        return error.__notes__
    return []


def test_what_cannot_be_halved_is_not_told_to(ranks: Any) -> None:
    for rank, notes in enumerate(ranks(2, notes_of_shards)):
        assert notes == [f"Rank {rank} ran out of memory on micro-batches of 5 samples. Write accumulate=2."]


def test_statistics_of_a_step_that_was_given_up_are_forgotten() -> None:
    class Counting(Hungry):
        def __init__(self, fits: int) -> None:
            super().__init__(fits, 0, "forward", False)
            self.norm = torch.nn.BatchNorm1d(8)

    model = Counting(5).configure(optimizer="sgd", lr=1e-30)
    trainer = pf.Trainer(max_steps=1, seed=5, progress=False, auto="O1")
    trainer.fit(model, data(), batch_size=BATCH)
    assert int(model.norm.num_batches_tracked) == 2
    other = Counting(99).configure(optimizer="sgd", lr=1e-30)
    pf.Trainer(max_steps=1, seed=5, progress=False, accumulate=2).fit(other, data(), batch_size=BATCH)
    torch.testing.assert_close(model.norm.running_mean, other.norm.running_mean)


def test_a_stand_in_stays_one() -> None:
    batch = Batch([MicroBatch(torch.arange(3), 3), MicroBatch(torch.arange(2), 0)], samples=3, shares=(3, 0))
    parts = in_parts(batch, 2).micro_batches
    assert [(micro.data.tolist(), micro.samples) for micro in parts] == [
        ([0, 1], 2),
        ([2], 1),
        ([1], 0),
        ([1], 0),
    ]


def test_metrics_see_the_parts_that_were_run() -> None:
    model = Hungry(5, 0, "forward", False)

    def both(batch: Any) -> dict[str, Any]:
        x, y = batch
        if len(x) > 5:
            torch.empty(2**50)
        output = model.last(torch.tanh(model.norm(model.first(x))))
        return {"loss": torch.nn.functional.cross_entropy(output, y), "output": output, "target": y}

    model.training_step = both  # type: ignore[method-assign]
    model.configure(optimizer="sgd", lr=1e-30, metrics=["accuracy"])
    trainer = pf.Trainer(max_epochs=1, seed=5, progress=False, auto="O1")
    measured = trainer.fit(model, data(), batch_size=BATCH)["accuracy"]
    x, y = data()
    output = model.last(torch.tanh(model.norm(model.first(x))))
    assert measured == pytest.approx([float((output.argmax(-1) == y).float().mean())])


class Statistics(Hungry):
    def __init__(self, fits: int, rank: int, where: str) -> None:
        super().__init__(fits, rank, where, counted=False)
        self.norm = torch.nn.BatchNorm1d(8)


def statistics(where: str) -> dict[str, Any]:
    model = Statistics(3, 1, where).configure(optimizer="adamw", lr=1e-2)
    trainer = pf.Trainer(max_epochs=1, seed=5, progress=False, auto="O1", stall_timeout="20s")
    trainer.fit(model, (torch.randn(24, 5), torch.zeros(24, dtype=torch.long)), batch_size=12)
    return {"parts": trainer.run.parts, "batches": int(model.norm.num_batches_tracked)}


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_ranks_that_share_statistics_give_up_a_step_together(ranks: Any, where: str) -> None:
    for mine in ranks(2, statistics, where):
        assert mine == {"parts": 2, "batches": 4}


def test_a_step_may_take_its_batch_apart() -> None:
    class Popping(Hungry):
        def training_step(self, batch: Any) -> Any:
            return super().training_step((batch.pop("x"), batch.pop("y")))

    model = Popping(5, 0, "forward", False).configure(optimizer="sgd", lr=0.1)
    trainer = pf.Trainer(max_epochs=1, seed=5, progress=False, auto="O1")
    x, y = data()
    trainer.fit(model, {"x": x, "y": y}, batch_size=BATCH)
    assert (trainer.step, trainer.run.parts) == (3, 2)


class Late(Hungry):
    """Has more memory while auto measures it."""

    def training_step(self, batch: Any) -> Any:
        self.fits = 1 if self.sizes else 99
        return super().training_step(batch)


def test_parts_of_one_sample_are_run_with_one_sample() -> None:
    model = Late(1, 0, "forward", False).configure(optimizer="adamw", lr=1e-2)
    trainer = pf.Trainer(max_epochs=1, seed=5, progress=False, auto="O1")
    trainer.fit(model, data(), batch_size=BATCH)
    assert (trainer.plan.accumulate, trainer.run.parts) == (1, 16)
    assert model.sizes[-13:] == [1] * 13  # a batch of ten and the last one of three


def test_where_not_even_what_is_measured_fits_samples_come_one_by_one() -> None:
    mine = train(1, auto="O1", optimizer_implementation="default")
    assert (mine["parts"], set(mine["sizes"][1:])) == (1, {1})
    assert_same(mine, train(99))


def test_on_two_ranks_a_stand_in_is_one_sample(ranks: Any) -> None:
    for mine in ranks(2, train, 1, 1, auto="O1", optimizer_implementation="default"):
        assert_same(mine, train(99))


def test_a_run_that_goes_on_keeps_its_division(tmp_path: Any) -> None:
    def go(steps: int, resume: str | None = None) -> pf.Trainer:
        model = Hungry(99, 0, "forward", False).configure(optimizer="sgd", lr=0.1)
        trainer = pf.Trainer(
            max_steps=steps, seed=5, progress=False, auto="O1", callbacks=[pf.callbacks.Checkpoint(tmp_path)]
        )
        trainer.fit(model, data(), batch_size=BATCH, resume=resume)
        return trainer

    first = go(2)
    first.engine.plan = first.engine.plan.with_fields(accumulate=2)  # as where less memory was free
    first.save(tmp_path / "step-00000009")
    second = go(3, resume="auto")
    assert second.plan.accumulate == 2
    assert len(second.engine.batch.micro_batches) == 2


def test_dropout_is_drawn_as_if_the_step_had_been_in_parts_at_once() -> None:
    def go(accumulate: int | None, fits: int, early: bool) -> dict[str, torch.Tensor]:
        class Dropping(Hungry):
            def training_step(self, batch: Any) -> Any:
                x, y = batch
                if early and len(x) > self.fits:
                    torch.empty(2**50)
                hidden = torch.nn.functional.dropout(self.first(x), 0.5)
                if len(x) > self.fits:
                    torch.empty(2**50)
                return torch.nn.functional.cross_entropy(self.last(hidden), y)

        model = Dropping(fits, 0, "forward", False).configure(optimizer="sgd", lr=0.1)
        options: dict[str, Any] = {"auto": "O1"} if accumulate is None else {"accumulate": accumulate}
        pf.Trainer(max_steps=1, seed=5, progress=False, **options).fit(model, data(), batch_size=BATCH)
        return model.state_dict()

    whole = go(2, 99, early=False)
    for early in (True, False):
        for name, value in go(None, 5, early=early).items():
            torch.testing.assert_close(value, whole[name], rtol=1e-6, atol=1e-7)


def test_buffers_that_are_replaced_are_put_back() -> None:
    class Counting(Hungry):
        def __init__(self) -> None:
            super().__init__(5, 0, "forward", False)
            self.register_buffer("count", torch.zeros(()))

        def training_step(self, batch: Any) -> Any:
            self.count = self.count + 1
            return super().training_step(batch)

    model = Counting().configure(optimizer="sgd", lr=0.1)
    pf.Trainer(max_epochs=1, seed=5, progress=False, auto="O1").fit(model, data(), batch_size=BATCH)
    assert float(model.count) == 6  # three steps of two parts
