"""What a run has measured, epoch by epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paraflow.errors import ParaflowError


class History:
    """One list of numbers a metric, one entry an epoch; ``val_`` marks those of validation.

    Attributes:
        history: The lists by metric.
        epoch: The epochs' numbers, from 0.

    Example:
        >>> history = History()
        >>> history.add(0, {"loss": 2.0}); history.add(1, {"loss": 1.0, "val_loss": 1.5})
        >>> history["loss"], history["val_loss"]
        ([2.0, 1.0], [nan, 1.5])
    """

    def __init__(self) -> None:
        self.history: dict[str, list[float]] = {}
        self.epoch: list[int] = []
        self._latest: dict[str, tuple[int, float]] = {}

    def add(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Adds an epoch's numbers; what was not measured in an epoch is NaN in it."""
        for key in logs:
            self.history.setdefault(key, [math.nan] * len(self.epoch))
        for key, values in self.history.items():
            values.append(float(logs[key]) if key in logs else math.nan)
        self.epoch.append(epoch)

    def note(self, step: int, logs: Mapping[str, Any]) -> None:
        """Remembers when numbers were measured, for `measured`."""
        self._latest.update({name: (step, float(value)) for name, value in logs.items()})

    def measured(self, name: str, step: int) -> float | None:
        """Returns a metric's value if it was measured at a step, else None."""
        measured_at, value = self._latest.get(name, (None, None))
        return value if measured_at == step else None

    def require(self, name: str, *, validates: bool) -> None:
        """Refuses a name that nothing measures, as soon as that is known.

        Args:
            name: The metric.
            validates: Whether a validation is still to come.

        Raises:
            ParaflowError: What should have measured it has run, and did not.
        """
        of_validation = name.startswith("val_")
        to_come = not self._latest or (
            of_validation and validates and not any(n.startswith("val_") for n in self._latest)
        )
        if name not in self._latest and not to_come:
            raise ParaflowError(f"Nothing measures {name!r}; there is {', '.join(self._latest)}.")

    def __getitem__(self, key: str) -> list[float]:
        """The list of a metric."""
        if key not in self.history:
            raise KeyError(f"{key!r} was not measured; there is {', '.join(self.history) or 'nothing yet'}.")
        return self.history[key]

    def __contains__(self, key: object) -> bool:
        return key in self.history

    def __iter__(self) -> Iterator[str]:
        return iter(self.history)

    def __len__(self) -> int:
        return len(self.epoch)

    def state_dict(self, epochs: int) -> dict[str, Any]:
        """Returns what was measured of the complete epochs, as plain data; one that is cut short is measured again.

        Args:
            epochs: The number of epochs that are complete.
        """
        rows = sum(epoch < epochs for epoch in self.epoch)
        history = {key: values[:rows] for key, values in self.history.items()}
        return {"history": history, "epoch": self.epoch[:rows]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up what was saved."""
        self.history = {key: list(values) for key, values in state["history"].items()}
        self.epoch = list(state["epoch"])

    def table(self, title: str | None = None) -> Any:
        """Returns the history as a rich table, to be printed with ``rich.print``."""
        from rich.table import Table

        table = Table("epoch", *self.history, title=title)
        for row, epoch in enumerate(self.epoch):
            numbers = (values[row] for values in self.history.values())
            table.add_row(str(epoch + 1), *("–" if math.isnan(number) else f"{number:.4g}" for number in numbers))
        return table

    def plot(self, path: str | Path) -> Path:
        """Draws the curves, one panel a metric with its validation beside it, to a PNG or whatever the suffix says.

        Raises:
            ParaflowError: matplotlib is not installed, or there is nothing to draw.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ParaflowError("History.plot needs matplotlib: pip install 'paraflow[plot]'.") from error
        names = [key for key in self.history if not key.startswith("val_")]
        if not names:
            raise ParaflowError("There is no epoch to plot.")
        # A figure without pyplot: whatever backend the user has chosen stays as it is.
        figure = Figure(figsize=(4.6 * len(names), 3.6), layout="constrained")
        axes = figure.subplots(1, len(names), squeeze=False)
        epochs = [epoch + 1 for epoch in self.epoch]
        for axis, name in zip(axes[0], names, strict=True):
            axis.plot(epochs, self.history[name], marker="o", markersize=3, label="training")
            if f"val_{name}" in self.history:
                axis.plot(epochs, self.history[f"val_{name}"], marker="o", markersize=3, label="validation")
                axis.legend(frameon=False)
            axis.set(title=name, xlabel="epoch")
            axis.grid(alpha=0.3)
            axis.xaxis.get_major_locator().set_params(integer=True)
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=120)
        return target
