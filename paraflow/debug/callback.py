"""The debug mode as a callback: the first of a run's, so that it sees what all others do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paraflow.callbacks.base import Callback
from paraflow.debug.collectives import CollectiveCheck
from paraflow.debug.parameters import require_equal

if TYPE_CHECKING:
    from paraflow.trainer import Trainer


class DebugMode(Callback):
    """Compares collectives before they run, and parameters every few steps: what `Trainer(debug=True)` adds.

    What DistributedDataParallel does in C++ is not seen as it runs, so the ranks also compare that they are about to
    run the same forward and the same backward, where all of them run the whole model.

    Args:
        compare_every: After how many steps the ranks' parameters are compared.
        patience: For how many seconds a rank that is not there is waited for.
    """

    def __init__(self, compare_every: int = 10, patience: float | None = None) -> None:
        if isinstance(compare_every, bool) or not isinstance(compare_every, int) or compare_every < 1:
            raise ValueError(f"debug must be True, or a whole number of steps of at least 1, not {compare_every!r}.")
        self.compare_every = compare_every
        self._patience = math.inf if patience is None else patience
        self._check: CollectiveCheck | None = None

    def on_train_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Begins to compare."""
        self._check = CollectiveCheck(trainer.mesh, lambda: trainer.step, self._patience)
        self._check.__enter__()

    def on_step_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Compares where the ranks of a pipeline are: between two steps no message is on its way."""
        if self._check is not None and not trainer.engine.runs_in_turn:
            self._check.announce("a step of the pipeline")

    def on_micro_batch_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Compares where the ranks are."""
        self._announce(trainer, "forward of a micro-batch")

    def on_before_backward(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Compares where the ranks are."""
        self._announce(trainer, "backward of a micro-batch, in which gradients are averaged")

    def _announce(self, trainer: Trainer, what: str) -> None:
        # The ranks of a pipeline are never at one place: each waits for what another computes.
        if self._check is not None and trainer.engine.runs_in_turn:
            self._check.announce(what)

    def on_checkpoint(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Compares parameters before they can be saved."""
        if trainer.step % self.compare_every == 0 or trainer.finishing:
            require_equal(trainer.engine, trainer.step)

    def on_train_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Ends it."""
        self._leave(None)

    def on_exception(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Ends it, and has the other ranks told."""
        self._leave(logs["exception"])

    def _leave(self, error: BaseException | None) -> None:
        check, self._check = self._check, None
        if check is not None:
            check.__exit__(None if error is None else type(error), error, None)
