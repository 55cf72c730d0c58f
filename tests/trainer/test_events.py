"""The events of a run come in the order that docs/callbacks.md promises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import paraflow as pf
from paraflow.callbacks import HOOKS

DOCUMENT = Path(__file__).parents[2] / "docs" / "callbacks.md"


def documented() -> list[str]:
    block = re.search(r"```text\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    return block[1].split()


def recorder(events: list[str]) -> pf.Callback:
    def note(name: str) -> Any:
        return lambda trainer, logs: events.append(name)

    return pf.callbacks.LambdaCallback(**{name: note(name) for name in HOOKS})


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return pf.configure(torch.nn.Linear(3, 2), optimizer="sgd", lr=0.1, loss="cross_entropy")


DATA = (torch.randn(8, 3), torch.tensor([0, 1] * 4))


def test_order_is_the_documented_one() -> None:
    events: list[str] = []
    trainer = pf.Trainer(max_epochs=2, accumulate=2, progress=False, callbacks=[recorder(events)])
    trainer.fit(net(), DATA, DATA, batch_size=4)
    assert events == documented()


def order_on_a_rank() -> list[str]:
    events: list[str] = []
    trainer = pf.Trainer(max_epochs=2, accumulate=2, progress=False, callbacks=[recorder(events)])
    trainer.fit(net(), DATA, DATA, batch_size=4)
    return events


def test_order_is_the_same_on_two_ranks(ranks: Any) -> None:
    assert ranks(2, order_on_a_rank) == [documented(), documented()]


def test_every_event_is_documented() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert [name for name in HOOKS if name not in text] == []


def test_evaluate_and_predict() -> None:
    events: list[str] = []
    trainer = pf.Trainer(progress=False, callbacks=[recorder(events)])
    trainer.evaluate(net(), DATA)
    trainer.predict(net(), DATA[0])
    assert events == ["on_validation_begin", "on_validation_end", "on_predict_begin", "on_predict_end"]


def test_exception_event_and_the_exception_itself() -> None:
    seen: list[BaseException] = []

    class Failing(pf.Callback):
        def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            raise RuntimeError("of my own")

        def on_exception(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            seen.append(logs["exception"])

    with pytest.raises(RuntimeError, match="of my own"):
        pf.Trainer(progress=False, callbacks=[Failing()]).fit(net(), DATA)
    assert [str(error) for error in seen] == ["of my own"]


def test_counters_count_before_their_events() -> None:
    seen: list[tuple[str, int, int, int]] = []

    class Counting(pf.Callback):
        def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            seen.append(("step", trainer.step, trainer.epoch, trainer.current_epoch))

        def on_epoch_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            seen.append(("epoch", trainer.step, trainer.epoch, trainer.current_epoch))

    pf.Trainer(max_epochs=2, progress=False, callbacks=[Counting()]).fit(net(), DATA, batch_size=4)
    assert seen == [
        ("step", 1, 0, 0),
        ("step", 2, 1, 0),
        ("epoch", 2, 1, 0),
        ("step", 3, 1, 1),
        ("step", 4, 2, 1),
        ("epoch", 4, 2, 1),
    ]


def test_final_gradients_are_of_the_whole_batch_before_the_optimizer_steps() -> None:
    gradients: list[torch.Tensor] = []

    class Look(pf.Callback):
        def on_before_optimizer_step(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            gradients.append(trainer.engine.parameters[0].grad.clone())

    model = net()
    pf.Trainer(max_steps=1, accumulate=4, progress=False, callbacks=[Look()]).fit(model, DATA, batch_size=8)
    fresh = net()
    torch.nn.functional.cross_entropy(fresh(DATA[0]), DATA[1]).backward()
    torch.testing.assert_close(gradients[0], fresh.weight.grad)


def test_steps_that_end_an_epoch_early_still_close_it() -> None:
    events: list[str] = []
    trainer = pf.Trainer(max_steps=1, progress=False, callbacks=[recorder(events)])
    history = trainer.fit(net(), DATA, DATA, batch_size=4)
    assert events[-5:] == ["on_validation_begin", "on_validation_end", "on_epoch_end", "on_checkpoint", "on_train_end"]
    assert trainer.epoch == 0
    assert len(history) == 1
