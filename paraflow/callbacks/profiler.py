"""Records some steps with torch's profiler: a trace to look at, and a table of what costs the most."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paraflow.callbacks.base import Callback
from paraflow.callbacks.trial import say

if TYPE_CHECKING:
    import torch.profiler

    from paraflow.trainer import Trainer


class Profiler(Callback):
    """Records steps of a run, begins after some and ends by itself; what follows costs nothing more.

    Each rank that records writes ``trace-rank0-step5.json`` (the rank, and the steps done so far) into the folder, for
    ui.perfetto.dev, and the first of them ``table.txt``: the operations that took the most time themselves, on the
    device, or on the host where there is none. A step goes from its `on_step_begin` to the next: validation between two
    steps is in it. Where the run ends early, what was recorded is written; after an exception it is dropped.

    Args:
        folder: Where they are written; it is made.
        wait: Steps that are let pass before each recording.
        warmup: Steps that are recorded and dropped, for the first have the profiler's own start in them.
        active: Steps that are recorded.
        repeat: How many recordings there are, each after its wait and warm-up.
        record_shapes: Whether operations are told apart by the shapes of their inputs.
        profile_memory: Whether memory is recorded.
        with_stack: Whether each operation's Python lines are recorded, which is slow.
        ranks: Who records; None for every rank.
        compressed: Whether traces are written as ``.json.gz``.

    Attributes:
        table: The text of the table, of all recordings so far; empty on ranks that do not write it.
        traces: The traces that this rank has written.

    Raises:
        ValueError: A number of steps is not of its kind.
    """

    def __init__(
        self,
        folder: str | Path,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        *,
        ranks: Sequence[int] | None = None,
        compressed: bool = False,
    ) -> None:
        for name, value, least in (
            ("wait", wait, 0),
            ("warmup", warmup, 0),
            ("active", active, 1),
            ("repeat", repeat, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}.")
        self.folder = Path(folder)
        self.ranks = None if ranks is None else tuple(ranks)
        self._cycle = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        self._options: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }
        self._suffix = ".json.gz" if compressed else ".json"
        self._profile: torch.profiler.profile | None = None
        self._remaining = 0
        self.table = ""
        self.traces: list[Path] = []

    def on_train_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Makes ready; the first step starts the profiler."""
        self._discard()
        self.table, self.traces = "", []
        mine = self.ranks is None or trainer.mesh.rank in self.ranks
        cycle = self._cycle
        self._remaining = (cycle["wait"] + cycle["warmup"] + cycle["active"]) * cycle["repeat"] + 1 if mine else 0

    def on_step_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Goes on to the next step."""
        if not self._remaining:
            return
        self._remaining -= 1
        if self._profile is None:
            self._profile = self._start(trainer)
        elif self._remaining:
            self._profile.step()
        else:
            self._stop()

    def on_train_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Writes what was recorded, where the run ends before the last recording does."""
        self._stop()
        if not self.traces and (self.ranks is None or trainer.mesh.rank in self.ranks):
            say(trainer, "profiler: the run ended before the first step that was to be recorded")

    def on_exception(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Ends, and drops what was being recorded."""
        self._discard()

    def _start(self, trainer: Trainer) -> torch.profiler.profile:
        import torch.profiler

        def write(profile: Any) -> None:
            self._write(profile, trainer)

        schedule = torch.profiler.schedule(**self._cycle)
        # Events are kept over all recordings, and so the table is; each trace is of its own recording.
        profile = torch.profiler.profile(schedule=schedule, on_trace_ready=write, acc_events=True, **self._options)
        profile.start()
        return profile

    def _write(self, profile: torch.profiler.profile, trainer: Trainer) -> None:
        rank, step = trainer.mesh.rank, trainer.step
        self.folder.mkdir(parents=True, exist_ok=True)
        self.traces.append(self.folder / f"trace-rank{rank}-step{step}{self._suffix}")
        profile.export_chrome_trace(str(self.traces[-1]))
        if rank != min(self.ranks or (0,)):
            return
        self.table = f"recorded until step {step}\n{self._costliest(profile)}\n"
        (self.folder / "table.txt").write_text(self.table, encoding="utf-8")
        say(trainer, f"profiler: recorded until step {step}; see {self.folder / 'table.txt'} and {self.traces[-1]}")

    def _costliest(self, profile: torch.profiler.profile) -> str:
        events = profile.key_averages(group_by_input_shape=self._options["record_shapes"])
        on_device = any(event.self_device_time_total > 0 for event in events)
        order = "self_device_time_total" if on_device else "self_cpu_time_total"
        return str(events.table(sort_by=order, row_limit=30))

    def _stop(self) -> None:
        """Ends the profiler, which writes what it is recording."""
        profile, self._profile, self._remaining = self._profile, None, 0
        if profile is not None:
            profile.stop()

    def _discard(self) -> None:
        if self._profile is not None:
            self._profile.on_trace_ready = None
        self._stop()
