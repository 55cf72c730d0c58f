from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

from tests.pool import Pool

torch.set_num_threads(1)

# A shell that runs the tests in the background has them ignore signals, which their processes would inherit.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """`ranks(world_size, fn, *args, **kwargs)`: the results of `fn`, run as every rank of a world, in order of rank."""
    pool = Pool()
    yield pool
    pool.close()
