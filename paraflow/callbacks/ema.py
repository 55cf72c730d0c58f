"""An exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from paraflow.callbacks.averages import Averages, load_averages
from paraflow.callbacks.base import Callback

if TYPE_CHECKING:
    from paraflow.trainer import Trainer


class EMA(Callback):
    """Keeps an exponential moving average of the weights: average ← decay · average + (1 − decay) · weight.

    It begins at the weights before the first step, or after step `start_step`. It holds this rank's part of each
    parameter, so where a plan shards parameters it is sharded alike, and an update communicates nothing. A step that
    fp16 leaves out updates nothing.

    Validation within `fit` is of the average; the raw weights are back before any later step or checkpoint, also when
    it raises. Callbacks after this one in the list see the raw weights in ``on_validation_end``. `Trainer.evaluate`
    and `predict` outside of `fit` use what is in the model: the raw weights, unless inside `averaged` or after a run
    with `swap_at_end`.

    A checkpoint has the raw weights as the model's and the averages as this callback's state, both as one device would
    hold them; a resumed run goes on with both to the bit, under any plan. `EMA.load` reads the averages from it.

    Args:
        decay: What of the average stays at an update, in [0, 1).
        update_every: Steps from one update to the next.
        start_step: The step after which the average begins; until then validation is of the raw weights.
        warmup: Whether the decay of update n, from 0, is at most (1 + n) / (10 + n), so that the first weights are
            forgotten soon.
        validate: Whether validation within `fit` is of the average.
        buffers: ``"average"`` averages buffers of a floating dtype too, such as batch normalisation's statistics;
            ``"copy"`` takes the model's own beside the averaged weights. Integers are never averaged.
        swap_at_end: Whether the averaged weights stay in the model when the run ends; `Trainer.save` refuses from then.

    Raises:
        ValueError: An argument is not of its kind.

    Example:
        >>> ema = EMA(decay=0.999, warmup=True)
        >>> round(ema.decay_at(0), 3), round(ema.decay_at(90), 3), ema.decay_at(10**6)
        (0.1, 0.91, 0.999)
    """

    loads_from_disk = True

    def __init__(
        self,
        decay: float = 0.999,
        *,
        update_every: int = 1,
        start_step: int = 0,
        warmup: bool = False,
        validate: bool = True,
        buffers: Literal["average", "copy"] = "average",
        swap_at_end: bool = False,
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, not {decay!r}.")
        for name, value, least in (("update_every", update_every, 1), ("start_step", start_step, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}.")
        if buffers not in ("average", "copy"):
            raise ValueError(f"buffers must be 'average' or 'copy', not {buffers!r}.")
        self.decay, self.update_every, self.start_step, self.warmup = decay, update_every, start_step, warmup
        self.validate, self.swap_at_end = validate, swap_at_end
        self._averages = Averages(buffers=buffers == "average")
        self._swapped_in = False

    def decay_at(self, update: int) -> float:
        """Returns the decay of an update, the first being 0."""
        return min(self.decay, (1 + update) / (10 + update)) if self.warmup else self.decay

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Runs a block with the averages in the model: ``with ema.averaged(): trainer.evaluate(model, data)``."""
        self._follow_before_start()
        with self._averages.in_model():
            yield

    @staticmethod
    def load(model: nn.Module, path: str | Path, *, best: bool = False) -> None:
        """Gives a model on one device the averages of a checkpoint, or of the newest or best one in a folder."""
        load_averages(model, path, "EMA", best=best)

    def on_train_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Begins at the weights as they are, or goes on with the averages of a resumed run."""
        self.bytes_held = self._averages.begin(trainer)

    def on_step_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Training is of the raw weights, even where somebody caught what a validation raised."""
        self._averages.swap_out()

    def on_after_optimizer_step(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Updates the average."""
        step = trainer.step + 1  # the trainer counts the step after this
        if not self._begun and step >= self.start_step:
            self._averages.update(1)
        elif self._begun and step % self.update_every == 0:
            self._averages.update(1 - self.decay_at(self._averages.count - (self.start_step > 0)))

    def on_validation_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Puts the averages in the model, within fit."""
        self._swapped_in = self.validate and self._averages.running and not self._averages.swapped
        if self._swapped_in:
            self._follow_before_start()
            self._averages.swap()

    def on_validation_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Takes out what was put in."""
        if self._swapped_in:
            self._averages.swap_out()

    def on_train_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Leaves the averages in the model, if that is wanted."""
        self._follow_before_start()
        self._averages.end()
        if self.swap_at_end:
            self._averages.swap()

    def on_exception(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Leaves the raw weights in the model."""
        self._averages.swap_out()
        self._averages.end()

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of updates and the averages by full name: a collective."""
        self._follow_before_start()
        return self._averages.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes them up, now or when the run begins."""
        self._averages.load_state_dict(state)

    @property
    def _begun(self) -> bool:
        return self.start_step == 0 or self._averages.count > 0

    def _follow_before_start(self) -> None:
        if self._averages.running and not self._begun and not self._averages.swapped:
            self._averages.follow()
