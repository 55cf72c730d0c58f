"""What ranks run: collectives inside a recomputed block, counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_reduce, all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from paraflow.parts import whole
from tests.recompute.models import Stack
from tests.recompute.test_treatments import treated


class Talking(nn.Module):
    """Collectives of every kind that a block may use, one of which begins with the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inside = nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: Any) -> Any:
        group = dist.group.WORLD
        x = self.inside(self.linear(x).sin()).sin()
        gathered = torch.empty(2 * x.shape[0], 8)
        dist.all_gather_into_tensor(gathered, x.detach())
        x = x * gathered.mean()
        self.calls += 1
        if self.calls > 1:
            late = x.detach().mean(0)
            dist.all_reduce(late)
            x = x + late * x.cos()
        x = x + with_gradients.all_reduce(x.cos())
        x = x + torch.stack(with_gradients.all_gather(x.sin())).sum(0)
        x = x + all_gather_tensor_autograd(x.cos(), 0, group).view(2, -1, 8).sum(0)
        x = x + all_to_all_single_autograd(x.sin(), None, None, group)
        with torch.no_grad():
            scale = all_reduce(x.square().mean(), "sum", group)
            largest = x.abs().max()
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            swapped = torch.empty_like(x)
            dist.all_to_all_single(swapped, x.contiguous())
        return (x * scale + swapped * x).cos() / largest


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What FSDP gathers and reduces is flat.
        self.calls[str(func)] += not (torch.is_tensor(args[0]) and args[0].dim() == 1) if args else 1
        return func(*args, **(kwargs or {}))


def talk(kind: str) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Gradients of two steps, and how often each collective was called in the second."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Stack(Talking(), Talking())
    for block in model.blocks:
        fully_shard(block.inside, mesh=init_device_mesh("cpu", (2,)))  # over the group that the block uses
    blocks = treated(model, kind)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        counted = Counted()
        model.zero_grad()
        with counted, blocks:
            loss = model(torch.randn(4, 6))
        with counted:
            loss.backward()
    calls = {name: count for name, count in counted.calls.items() if "c10d" in name and "wait" not in name}
    return [whole(p.grad) for p in model.parameters()], calls
