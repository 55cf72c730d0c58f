"""Random seeds."""

from __future__ import annotations

import os
import random

import numpy as np
import torch

_chosen = 0


def seed(value: int) -> None:
    """Seeds torch, numpy and Python, alike on every rank; call it before building a model.

    Under data parallelism all ranks start from rank 0's weights in any case. What differs by rank while training, such
    as dropout, is seeded by the Trainer.

    Example:
        >>> seed(0); a = torch.rand(2); seed(0); bool((a == torch.rand(2)).all())
        True
    """
    global _chosen
    _chosen = value
    reseed(value)


def chosen() -> int:
    """Returns the seed that `seed` was given last, alike on every rank, or 0."""
    return _chosen


def reseed(value: int) -> None:
    """Seeds torch, numpy and Python for what follows, which may differ by rank."""
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def make_deterministic() -> None:
    """Holds torch to deterministic algorithms, for the whole process."""
    # cuBLAS reads it when it starts; it must be there before the first matrix product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
