from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.pool import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """`ranks(world_size, fn, *args, **kwargs)`: the results of `fn`, run as every rank of a world, in order of rank."""
    pool = Pool()
    yield pool
    pool.close()
