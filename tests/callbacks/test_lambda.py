from __future__ import annotations

from typing import Any

import pytest

import paraflow as pf
from paraflow.callbacks import LambdaCallback
from tests.callbacks.runs import linear, samples


def run(*callbacks: pf.Callback, **options: Any) -> pf.History:
    trainer = pf.Trainer(callbacks=callbacks, progress=False, **{"max_epochs": 2, **options})
    return trainer.fit(linear(), samples(8), samples(4), batch_size=4)


def test_functions_are_called_at_their_events_with_trainer_and_logs() -> None:
    seen: list[Any] = []
    history = run(
        LambdaCallback(
            on_train_begin=lambda trainer, logs: seen.append(("begin", trainer.step)),
            on_step_end=lambda trainer, logs: seen.append(("step", trainer.step, type(logs["loss"]), logs["lr"])),
            on_validation_end=lambda trainer, logs: seen.append(("validation", logs["val_loss"])),
            on_epoch_end=lambda trainer, logs: seen.append(("epoch", trainer.epoch, logs["loss"])),
        )
    )
    expected: list[Any] = [("begin", 0)]
    for epoch in (1, 2):
        expected += [("step", 2 * epoch - 1, float, 0.1), ("step", 2 * epoch, float, 0.1)]
        expected += [("validation", history["val_loss"][epoch - 1]), ("epoch", epoch, history["loss"][epoch - 1])]
    assert seen == expected


@pytest.mark.parametrize(("every", "expected"), [(1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), ("4st", [4]), ("1h", [])])
def test_every_says_how_often_steps_are_told(every: Any, expected: list[int]) -> None:
    steps: list[int] = []
    run(LambdaCallback(every=every, on_step_end=lambda trainer, logs: steps.append(trainer.step)), max_epochs=3)
    assert steps == expected


def test_several_have_their_own_intervals_and_keep_their_order() -> None:
    seen: list[tuple[str, int]] = []
    run(
        LambdaCallback(every=2, on_step_end=lambda trainer, logs: seen.append(("first", trainer.step))),
        LambdaCallback(on_step_end=lambda trainer, logs: seen.append(("second", trainer.step))),
    )
    assert seen == [("second", 1), ("first", 2), ("second", 2), ("second", 3), ("first", 4), ("second", 4)]


def test_an_exception_is_told_and_raised_on() -> None:
    seen: list[Any] = []

    def fail(trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        run(LambdaCallback(on_epoch_end=fail, on_exception=lambda trainer, logs: seen.append(logs["exception"])))
    assert [str(error) for error in seen] == ["the disk is full"]


def test_what_is_no_event_or_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"no event 'on_batch_end'; the events are on_train_begin.*on_step_end"):
        LambdaCallback(on_batch_end=print)
    with pytest.raises(TypeError, match=r"on_step_end must be a function of \(trainer, logs\), not 3"):
        LambdaCallback(on_step_end=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must hold paraflow\.Callback objects, not .*LambdaCallback.*; write"):
        run(LambdaCallback)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'often' is no interval"):
        run(LambdaCallback(every="often", on_step_end=print))
