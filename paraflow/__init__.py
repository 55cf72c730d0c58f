"""Paraflow: a Keras-style Trainer for PyTorch whose strategies compose.

Names are imported when they are first used, so that ``paraflow --help`` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paraflow import callbacks, checkpoint, data, loggers, models, plugins, rules
    from paraflow.callbacks import Callback
    from paraflow.deferred import deferred_init
    from paraflow.errors import CheckpointError, DataError, LaunchError, ModelError, ParaflowError, PlanError
    from paraflow.history import History
    from paraflow.launch import is_main, rank, spawn, world_size
    from paraflow.models import Model, configure
    from paraflow.plan import Plan
    from paraflow.scopes import auto_parallel, pipeline, replica, split, stage
    from paraflow.seeding import seed
    from paraflow.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "CheckpointError",
    "DataError",
    "History",
    "LaunchError",
    "Model",
    "ModelError",
    "ParaflowError",
    "Plan",
    "PlanError",
    "Trainer",
    "auto_parallel",
    "callbacks",
    "checkpoint",
    "configure",
    "data",
    "deferred_init",
    "is_main",
    "loggers",
    "models",
    "pipeline",
    "plugins",
    "rank",
    "replica",
    "rules",
    "seed",
    "spawn",
    "split",
    "stage",
    "world_size",
]

_HOMES = {
    "Callback": "callbacks",
    "CheckpointError": "errors",
    "DataError": "errors",
    "History": "history",
    "LaunchError": "errors",
    "Model": "models",
    "ModelError": "errors",
    "ParaflowError": "errors",
    "Plan": "plan",
    "PlanError": "errors",
    "Trainer": "trainer",
    "auto_parallel": "scopes",
    "configure": "models",
    "deferred_init": "deferred",
    "is_main": "launch",
    "pipeline": "scopes",
    "rank": "launch",
    "replica": "scopes",
    "seed": "seeding",
    "spawn": "launch",
    "split": "scopes",
    "stage": "scopes",
    "world_size": "launch",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'paraflow' has no attribute {name!r}")
    home = importlib.import_module(f"paraflow.{_HOMES.get(name, name)}")
    value = getattr(home, name) if name in _HOMES else home
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
