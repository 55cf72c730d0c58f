"""Writes numbers to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paraflow.errors import ParaflowError
from paraflow.interval import Interval
from paraflow.loggers.base import Event, Logger
from paraflow.loggers.support import configuration, require_package, writing

if TYPE_CHECKING:
    from paraflow.trainer import Trainer


class WandbLogger(Logger):
    """Logs to a run of Weights & Biases, with plan, seed and versions as its config.

    `Logger` says how numbers are named; W&B's own step is the optimizer step. A resumed run goes on with the same run,
    by the id that the checkpoint holds. W&B cannot take back what it has, so numbers of steps that it has already are
    not sent again (a resumed run would give the same). A run that you have begun yourself with ``wandb.init``, as in a
    sweep, is used, and not finished.

    W&B writes on its own, so a run that is killed may lack the last row, and what W&B held back (15 seconds as it is
    set by default). A failure before the first step ends the run; later ones warn once, and training goes on.

    Args:
        project: The project.
        name: The name of the run.
        every: How often a step is logged; None for epochs and validation only.
        folder: Where W&B keeps its files; its own default is ``./wandb``.
        mode: ``"online"``, ``"offline"`` or ``"disabled"``; by default as WANDB_MODE says.
        config: Joined to the run's config.
        **init: Further arguments of ``wandb.init``, such as ``entity``, ``group`` or ``tags``.

    Attributes:
        run_id: The id of the run, on rank 0 once it has begun.

    Raises:
        ParaflowError: wandb is not installed; or from `fit`: the run cannot begin.
    """

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        every: Interval | str | int | None = 50,
        folder: str | Path | None = None,
        mode: str | None = None,
        config: Mapping[str, Any] | None = None,
        **init: Any,
    ) -> None:
        require_package("wandb", "WandbLogger", "wandb")
        super().__init__(every)
        self.folder = None if folder is None else Path(folder)
        self.run_id: str | None = None
        self._config = dict(config or {})
        self._init = {"project": project, "name": name, "mode": mode, **init}
        self._resumed_id: str | None = None
        self._run: Any = None
        self._is_ours = True
        self._first_step = 0

    def begin(self, trainer: Trainer) -> None:
        """Begins the run, or goes on with it after a resume."""
        if self.folder is not None:
            with writing(self, self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
        resumed_id, self._resumed_id = self._resumed_id if trainer.step else None, None
        wandb = import_module("wandb")
        self._is_ours = wandb.run is None
        try:
            self._run = self._init_run(wandb, resumed_id) if self._is_ours else wandb.run
            self._run.config.update({**configuration(trainer), **self._config}, allow_val_change=True)
            self._first_step = self._run.step
        except Exception as error:
            raise ParaflowError(
                f"W&B could not begin a run: {error} Log in with `wandb login`, or give WandbLogger(mode='offline')."
            ) from error
        self.run_id = self._run.id

    def _init_run(self, wandb: Any, resumed_id: str | None) -> Any:
        resumed = {} if resumed_id is None else {"id": resumed_id, "resume": "allow"}
        return wandb.init(dir=None if self.folder is None else str(self.folder), **{**self._init, **resumed})

    def write(self, event: Event, step: int, epoch: int, numbers: dict[str, float]) -> None:
        """Adds the numbers to the step's row."""
        if step < self._first_step:
            return
        try:
            self._run.log(numbers, step=step)
        except Exception as error:
            self.warn_once("W&B", f"W&B does not take the numbers of step {step}, and training goes on: {error}")

    def end(self, step: int, error: BaseException | None) -> None:
        """Finishes the run, unless it is the user's own."""
        run, self._run = self._run, None
        if not self._is_ours:
            return
        try:
            run.finish(exit_code=0 if error is None else 1)
        except Exception as failure:
            self.warn_once("W&B", f"W&B could not finish the run: {failure}")

    def state_dict(self) -> dict[str, Any]:
        """Returns the id of the run."""
        return {"run_id": self.run_id or self._resumed_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up the id of the run to go on with."""
        self._resumed_id = state["run_id"]
