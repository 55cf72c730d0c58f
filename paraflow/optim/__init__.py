"""Optimizers and learning-rate schedules, by name or by hand."""

from __future__ import annotations

from paraflow.optim.factory import build_optimizer, optimizer_names
from paraflow.optim.schedules import Schedule, build_schedule, schedule_names

__all__ = ["Schedule", "build_optimizer", "build_schedule", "optimizer_names", "schedule_names"]
