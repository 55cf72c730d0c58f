"""Looks for a learning rate before training: the loss over rates that rise step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paraflow.callbacks.base import Callback
from paraflow.callbacks.curve import Curve, require_matplotlib
from paraflow.callbacks.range_test import Smoothed, has_diverged, rates, steepest
from paraflow.callbacks.trial import reads_once, say
from paraflow.meters import step_means
from paraflow.optim.base_rate import ratios, set_base_rate, set_rates
from paraflow.sandbox import preserved
from paraflow.watch import Watch

if TYPE_CHECKING:
    from paraflow.data import Batch
    from paraflow.trainer import Trainer


class LearningRateFinder(Callback):
    """Trains for some steps at rates that rise exponentially, suggests a rate, and puts everything back as it was.

    It suggests the rate at which the smoothed loss falls most steeply; an average of losses stands at the average of
    its rates' logarithms, or it would come late. The steps are real ones on the run's data (further epochs of it where
    one is short), under its plan; the schedule rests. A resumed run is not tested. An iterator is not read, for what
    was read of it could not be put back.

    Args:
        low: The first rate, of the optimizer's first group; others keep their ratio to it.
        high: The last rate.
        steps: How many there are.
        folder: Where ``learning-rate.png`` is drawn; None for no picture.
        apply: Whether the run takes the suggestion as its base rate, which a schedule multiplies.
        stop_factor: The test ends where the smoothed loss is above so many times its best.

    Attributes:
        suggestion: The rate that is suggested, or None.
        curve: The lists ``lr`` and ``loss`` (of the whole batch), ``smoothed_lr`` and ``smoothed``, an entry a step.
        reason: Why there is no suggestion, or an empty text.

    Raises:
        ValueError: An argument is not of its kind.
        ParaflowError: A folder was given, and matplotlib is not installed.
    """

    def __init__(
        self,
        low: float = 1e-7,
        high: float = 10.0,
        steps: int = 100,
        folder: str | Path | None = None,
        apply: bool = False,
        stop_factor: float = 4,
    ) -> None:
        if not 0 < low < high < math.inf:
            raise ValueError(f"low and high must be rates above 0, the second the greater, not {low!r} and {high!r}.")
        if not isinstance(steps, int) or steps < 10:
            raise ValueError(f"steps must be a whole number of at least 10, not {steps!r}.")
        if not stop_factor > 1:
            raise ValueError(f"stop_factor must be above 1, not {stop_factor!r}.")
        if folder is not None:
            require_matplotlib("LearningRateFinder(folder=...)")
        self.low, self.high, self.steps = low, high, steps
        self.folder = None if folder is None else Path(folder)
        self.apply = apply
        self.stop_factor = stop_factor
        self._reset()

    def _reset(self) -> None:
        self.suggestion: float | None = None
        self.curve: dict[str, list[float]] = {name: [] for name in ("lr", "loss", "smoothed_lr", "smoothed")}
        self.reason = ""
        self._epochs = 0

    def on_train_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Tests, unless the run was resumed."""
        if trainer.step:
            return
        self._reset()
        if reads_once(trainer.run.feed.source):
            self.reason = "the data is an iterator, which can be read only once; give a list, or a function"
        else:
            with preserved(trainer):
                self._test(trainer)
            self.suggestion, self.reason = steepest(self.curve["smoothed_lr"], self.curve["smoothed"])
        self._report(trainer)
        if self.apply and self.suggestion is not None:
            engine = trainer.engine
            set_base_rate(engine.optimizer, engine.schedule, self.suggestion)
            engine.lr = float(engine.optimizer.param_groups[0]["lr"])

    def _test(self, trainer: Trainer) -> None:
        """Trains at one rate after another until the loss diverges."""
        engine, average, place = trainer.engine, Smoothed(), Smoothed()
        batches = chain.from_iterable(repeat(trainer.run.feed))  # epoch after epoch
        multiples = ratios(engine.optimizer)
        schedule, engine.schedule = engine.schedule, None
        try:
            for rate in rates(self.low, self.high, self.steps):
                set_rates(engine.optimizer, [rate * multiple for multiple in multiples])
                loss = self._step(trainer, batches)
                entry = (rate, loss, math.exp(place.add(math.log(rate))), average.add(loss))
                for values, value in zip(self.curve.values(), entry, strict=True):
                    values.append(value)
                if has_diverged(self.curve["smoothed"], self.stop_factor) or Watch.asked_to_stop(trainer.mesh):
                    return
        finally:
            engine.schedule = schedule
            self._epochs = trainer.run.feed.epoch + (trainer.run.feed.position > 0)

    def _step(self, trainer: Trainer, batches: Iterator[Batch]) -> float:
        """Makes one step and returns its loss before it, the same on every rank.

        What fp16 leaves out while it looks for its scale is no step; where it leaves out every one, that is the end.
        """
        engine, loss = trainer.engine, math.nan
        for _ in range(self.steps):
            result = engine.train_step(next(batches))
            loss = trainer.mesh.broadcast(float(step_means(result, trainer.mesh)["loss"]))
            if result.stepped or not math.isfinite(loss):
                return loss
        return math.nan

    def _report(self, trainer: Trainer) -> None:
        count = len(self.curve["lr"])
        found, line = self.suggestion, f"learning rate: no suggestion, for {self.reason}"
        if found is not None:
            line = f"learning rate: {found:.2e} suggested, where the loss falls most steeply in {count} steps"
        if self._epochs > 1:
            line += f"; they read {self._epochs} epochs of the data"
        if self.folder is not None and count and trainer.is_main:
            line += f"; see {self._draw(self.folder)}"
        say(trainer, line)

    def _draw(self, folder: Path) -> Path:
        smoothed, best = self.curve["smoothed"], min(self.curve["smoothed"])
        curve = Curve(
            *(self.curve["smoothed_lr"], smoothed, "learning rate", "loss"),
            faint=(self.curve["lr"], self.curve["loss"]),
            marked=self.suggestion,
            label=f"suggested: {self.suggestion or 0:.2e}",
            top=None if self.suggestion is None else best + 1.5 * (smoothed[0] - best),
        )
        return curve.draw(folder / "learning-rate.png")
