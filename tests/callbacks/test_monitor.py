"""Which of two values is the better, where only the name says it."""

from __future__ import annotations

import pytest

from paraflow.callbacks.monitor import Monitor


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("val_loss", "min"),
        ("loss", "min"),
        ("val_top5_error", None),
        ("perplexity", "min"),
        ("val_accuracy", "max"),
        ("val_auc", "max"),
        ("iou", "max"),
        ("val_macro_f1", "max"),
        ("surface_area", None),
        ("accelerate", None),
        ("hit_rate", "max"),
    ],
)
def test_names_tell_or_are_refused(name: str, mode: str | None) -> None:
    if mode is None:
        with pytest.raises(ValueError, match="write mode='max' or mode='min'"):
            Monitor.of(name, None)
        assert Monitor.of(name, "max").mode == "max"
    else:
        assert Monitor.of(name, None).mode == mode
