"""The callback: code that is called at the events of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paraflow.interval import Interval

if TYPE_CHECKING:
    from paraflow.trainer import Trainer

Logs = dict[str, Any]


class Callback:
    """Override the events you want; an event that is not overridden costs nothing. docs/callbacks.md has their order.

    Every method is given the trainer and a dict of numbers. Every rank calls every method, with the same numbers; print
    and write files on ``trainer.is_main`` only, and communicate on all ranks or none.

    Attributes:
        every: How often `on_step_end` is called: steps, or an interval such as ``"30s"``. Numbers are brought together
            from all ranks only for the steps at which some callback listens.
        loads_from_disk: Whether `load_state_dict` takes tensors that are still on disk: ``value[slices]`` reads a part,
            ``value[...]`` all. Otherwise each rank is given whole tensors.
        bytes_held: Bytes on this rank's device that it holds while a step is run, such as averages of weights: a choice
            to meet a memory budget counts them.

    Example:
        >>> class PrintLoss(Callback):
        ...     every = 100
        ...     def on_step_end(self, trainer, logs):
        ...         print(trainer.step, logs["loss"])
    """

    every: Interval | str | int = 1
    loads_from_disk: bool = False
    bytes_held: int = 0

    def on_train_begin(self, trainer: Trainer, logs: Logs) -> None:
        """Before the first step, once model, data and plan are ready and state is restored."""

    def on_train_end(self, trainer: Trainer, logs: Logs) -> None:
        """After the last step, if nothing was raised."""

    def on_epoch_begin(self, trainer: Trainer, logs: Logs) -> None:
        """Before an epoch's first step; ``trainer.epoch`` epochs are complete."""

    def on_epoch_end(self, trainer: Trainer, logs: Logs) -> None:
        """After an epoch's last step and the validation that is due with it; logs has the epoch's means."""

    def on_step_begin(self, trainer: Trainer, logs: Logs) -> None:
        """Before a step's first micro-batch."""

    def on_step_end(self, trainer: Trainer, logs: Logs) -> None:
        """After an optimizer step, counted already; logs has the whole batch's loss, ``lr`` and what was measured."""

    def on_micro_batch_begin(self, trainer: Trainer, logs: Logs) -> None:
        """Before a micro-batch's forward."""

    def on_micro_batch_end(self, trainer: Trainer, logs: Logs) -> None:
        """After a micro-batch's backward."""

    def on_before_backward(self, trainer: Trainer, logs: Logs) -> None:
        """Between a micro-batch's forward and backward."""

    def on_after_backward(self, trainer: Trainer, logs: Logs) -> None:
        """After a micro-batch's backward; gradients may be this rank's own still."""

    def on_before_optimizer_step(self, trainer: Trainer, logs: Logs) -> None:
        """Gradients are final: of the whole batch, unscaled, clipped. Not called for a step that is left out."""

    def on_after_optimizer_step(self, trainer: Trainer, logs: Logs) -> None:
        """Parameters and schedule have stepped; the step is not counted yet. Not called for a step that is left out."""

    def on_validation_begin(self, trainer: Trainer, logs: Logs) -> None:
        """Before validation, or `Trainer.evaluate`."""

    def on_validation_end(self, trainer: Trainer, logs: Logs) -> None:
        """After it; logs has its results, each under ``val_``."""

    def on_predict_begin(self, trainer: Trainer, logs: Logs) -> None:
        """Before `Trainer.predict`."""

    def on_predict_end(self, trainer: Trainer, logs: Logs) -> None:
        """After it."""

    def on_checkpoint(self, trainer: Trainer, logs: Logs) -> None:
        """After each step and everything that ends with it: the place to save, for all state is of one moment."""

    def on_exception(self, trainer: Trainer, logs: Logs) -> None:
        """Something was raised, ``logs["exception"]``, and will be raised on."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs of this callback: tensors, numbers, strings, lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` returned."""


HOOKS: tuple[str, ...] = tuple(name for name in vars(Callback) if name.startswith("on_"))
"""The names of all events."""
