"""What a Trainer was told about how its runs are looked after, decided once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from signal import SIGINT, SIGTERM

from paraflow.callbacks.base import Callback
from paraflow.callbacks.checkpoint import Checkpoint
from paraflow.callbacks.progress import ProgressBar
from paraflow.data import Source
from paraflow.data.pinned import PinnedSource
from paraflow.dry_run import BATCHES, Snapshot
from paraflow.engine import Engine
from paraflow.errors import ParaflowError
from paraflow.interval import Interval
from paraflow.loggers.base import Logger
from paraflow.watch import Watch
from paraflow.watch.signals import signal_number


@dataclass(frozen=True)
class Settings:
    """How runs are looked after.

    Attributes:
        val_every: How often a fit validates.
        stall_seconds: After how long without a sign of life a run ends whose ranks wait for another; None is never.
        preempt_signal: The number of a further signal that stops a run, or None.
        debug: After how many steps ranks compare their parameters, True for a usual number; False compares nothing.
        dry_run: Whether a fit runs two steps and undoes them.
        overfit: The number of batches that each epoch repeats, or None for all the data.
    """

    val_every: Interval
    stall_seconds: float | None = None
    preempt_signal: int | None = None
    debug: bool | int = False
    dry_run: bool = False
    overfit: int | None = None

    @classmethod
    def of(
        cls,
        val_every: Interval | str | int,
        stall_timeout: Interval | str | None,
        preempt_signal: str | None,
        **others: bool | int | None,
    ) -> Settings:
        """Reads what was said.

        Raises:
            ValueError: Something is not of its kind.
        """
        seconds = None if stall_timeout is None else Interval.parse(stall_timeout).seconds
        return cls(Interval.parse(val_every), seconds, signal_number(preempt_signal), **others)  # type: ignore[arg-type]

    def listeners(
        self, callbacks: Sequence[Callback], loggers: Sequence[Callback], *, progress: bool
    ) -> list[Callback]:
        """Returns all that is called at events, in order."""
        listeners = [*callbacks, *loggers]
        _require_folders_of_their_own(listeners)
        if progress and not any(isinstance(callback, ProgressBar) for callback in callbacks):
            listeners.append(ProgressBar())
        if self.dry_run:
            listeners.append(Snapshot())
        if self.debug is False:
            return listeners
        from paraflow.debug.callback import DebugMode

        every = {} if self.debug is True else {"compare_every": self.debug}
        return [DebugMode(patience=self.stall_seconds, **every), *listeners]

    @property
    def silent(self) -> tuple[type, ...]:
        """The kinds of callbacks that are not called: in a dry run, what would leave something behind."""
        if not self.dry_run:
            return ()
        from paraflow.callbacks import BatchSizeFinder, LearningRateFinder, Profiler

        return (Logger, Checkpoint, Profiler, LearningRateFinder, BatchSizeFinder)

    def watch(self, engine: Engine) -> Watch:
        """Returns the watch over a fit, which signals may stop at a step boundary."""
        signals = [SIGINT, SIGTERM, *([self.preempt_signal] if self.preempt_signal else [])]
        return Watch(engine.mesh, lambda: engine.forwards, self.stall_seconds, signals)

    def watch_reading(self, engine: Engine) -> AbstractContextManager[object]:
        """Returns the watch over an evaluation or prediction, which signals end as they end any program."""
        watched = Watch.current() is not None  # it is a part of a fit
        return nullcontext() if watched else Watch(engine.mesh, lambda: engine.forwards, self.stall_seconds)

    def limited(self, source: Source, val_source: Source | None) -> tuple[Source, Source | None]:
        """Returns the data that is read: all of it, or the few batches of `overfit` or a dry run."""
        limit = BATCHES if self.dry_run else self.overfit
        if val_source is not None and limit is not None:
            val_source = PinnedSource(val_source, limit)
        return (source if self.overfit is None else PinnedSource(source, self.overfit)), val_source


def _require_folders_of_their_own(callbacks: Sequence[Callback]) -> None:
    """Refuses two Checkpoints with one folder: each would remove what the other keeps.

    Raises:
        ParaflowError: There are two.
    """
    folders = [callback.folder.resolve() for callback in callbacks if isinstance(callback, Checkpoint)]
    for folder in folders:
        if folders.count(folder) > 1:
            raise ParaflowError(
                f"Two Checkpoint callbacks write to {str(folder)!r}, and each would remove what the other keeps. Give "
                "each a folder of its own; keep_best and keep say how many stay."
            )
