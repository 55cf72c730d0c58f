"""Prints what a model is made of and what a micro-batch costs in it, before it is trained."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from paraflow.callbacks.base import Callback
from paraflow.callbacks.trial import micro_batch_rows, precision_of, sampler, say
from paraflow.data.batch import count_rows
from paraflow.profiler.attempt import attempt
from paraflow.profiler.summary import ModuleRow, summarise

if TYPE_CHECKING:
    from rich.table import Table

    from paraflow.trainer import Trainer

_UNITS = ("", "K", "M", "G", "T", "P")


class ModelSummary(Callback):
    """Prints a table of the model's modules when training begins; nothing of the measuring is left in the run.

    It has each module's output shape, its parameters, and, for one micro-batch of the size the run will have, the FLOPs
    of forward (a multiplication and an addition are two) and the bytes kept for backward. They are measured on the
    first samples of the training data, once, on every rank; rank 0 prints. Where batches come ready-made, or the model
    is spread over ranks, only parameters are counted, and a line under the table says why.

    Args:
        depth: How deep the table goes: 1 for the model's children.
        flops: Whether a forward is run and measured; without it only parameters are counted.

    Attributes:
        rows: What is printed, a row a module; the first is the whole model.
        samples: The samples of the micro-batch that was measured, 0 for none.
        note: Why no forward was measured, or None.

    Raises:
        ValueError: The depth is no whole number of at least 0.
    """

    def __init__(self, depth: int = 2, flops: bool = True) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
            raise ValueError(f"depth must be a whole number of at least 0, not {depth!r}.")
        self.depth = depth
        self.flops = flops
        self.rows: list[ModuleRow] = []
        self.samples = 0
        self.note: str | None = None

    def on_train_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Measures and prints."""
        self.rows, self.samples, self.note = [], 0, None
        take, why_not = sampler(trainer) if self.flops else (None, "")
        if take is not None:
            self._measure(trainer, take)
        elif why_not:
            self.note = f"FLOPs and activations were not measured: {why_not}."
        if not self.rows:
            shapes = trainer.engine.shapes
            self.rows = summarise(trainer.engine.module, shapes=shapes, depth=self.depth)
        if trainer.progress and trainer.is_main:
            say(trainer, self.table())
            for line in self._lines():
                say(trainer, line)

    def _measure(self, trainer: Trainer, take: Callable[[int], Any]) -> None:
        engine, rows = trainer.engine, micro_batch_rows(trainer)

        def measured() -> tuple[list[ModuleRow], int]:
            batch = take(rows)
            with _uncompiled(compiled=engine.plan.compile):
                step, context = engine.task.training_step, precision_of(engine)
                return summarise(engine.module, lambda: step(batch), context=context, depth=self.depth), count_rows(
                    batch
                )

        found = attempt(measured, trainer.mesh.device)
        if trainer.mesh.any(found is None):
            self.note = "FLOPs and activations were not measured: a micro-batch does not fit in memory."
        elif found is not None:
            self.rows, self.samples = found

    def table(self) -> Table:
        """Returns the rows as a rich table, to be printed with ``rich.print``."""
        from rich.table import Table

        measured = self.rows[0].flops is not None
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("module", overflow="fold")
        table.add_column("class", overflow="fold")
        if measured:
            table.add_column("output", no_wrap=True)
        for name in ("parameters", "FLOPs", "for backward") if measured else ("parameters",):
            table.add_column(name, justify="right", no_wrap=True)
        for row in [*self.rows[1:], self.rows[0]]:
            name = "  " * (row.depth - 1) + row.path.rpartition(".")[2] if row.path else "total"
            shape = "–" if row.output_shape is None else " × ".join(map(str, row.output_shape)) or "scalar"
            costs = (_short(row.flops or 0), _bytes(row.activation_bytes or 0))
            cells = (shape, _parameters(row), *costs) if measured else (_parameters(row),)
            table.add_row(name, row.kind, *cells, style=None if row.path else "bold")
        return table

    def _lines(self) -> list[str]:
        total = self.rows[0]
        lines = [f"{total.parameters:,} parameters, {total.trainable:,} of them trained"]
        if self.samples:
            lines[0] += f"; measured on a micro-batch of {self.samples} samples"
        return [*lines, self.note] if self.note else lines


def _uncompiled(*, compiled: bool) -> AbstractContextManager[Any]:
    """A compiled model is measured as it was written: the hooks that measure must not be compiled into it."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _parameters(row: ModuleRow) -> str:
    if row.parameters == 0 and row.shared:
        return "shared"
    if row.frozen:
        return f"{row.parameters:,} (frozen)" if not row.trainable else f"{row.parameters:,} ({row.frozen:,} frozen)"
    return f"{row.parameters:,}"


def _short(number: int) -> str:
    power = min((len(str(number)) - 1) // 3, len(_UNITS) - 1)
    return f"{number / 1000**power:.4g} {_UNITS[power]}".strip()


def _bytes(number: int) -> str:
    power = min((max(number, 1).bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{number / 1024**power:.4g} {_UNITS[power]}{'iB' if power else 'B'}"
