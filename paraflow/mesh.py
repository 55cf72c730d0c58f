"""The only owner of process groups and device meshes.

A `Mesh` lays the plan's degrees over the ranks there are, outer to inner as `paraflow.plan.DEGREES` says, and offers
the few collectives that the loop and the plugins need, named by mesh dimension.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from paraflow.errors import DataError, PlanError
from paraflow.folding import forget_groups, group_once, halves_of
from paraflow.launch.ending import wait_for_gloo_threads
from paraflow.launch.environment import local_rank, rank, world_size
from paraflow.plan import DATA_DEGREES, DEGREES, Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Reduction = Literal["sum", "max", "min"]
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def choose_device(device: str | torch.device = "auto") -> torch.device:
    """Returns the device this rank computes on.

    Args:
        device: A torch device, or ``"auto"``: the accelerator of this rank where there is one, else the CPU.

    Raises:
        PlanError: The device does not exist on this machine, or there are fewer devices than local ranks.
    """
    name = str(device)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and world_size() == 1 and torch.backends.mps.is_available():
            name = "mps"
    try:
        chosen = torch.device(name)
    except RuntimeError as error:
        raise PlanError(f"device={name!r} is no torch device; write 'auto', 'cpu', 'cuda' or 'cuda:0'.") from error
    if chosen.type != "cuda":
        return chosen
    if not torch.cuda.is_available():
        raise PlanError("device='cuda' was asked for, and torch sees no CUDA device here; write device='auto'.")
    index = local_rank() if chosen.index is None or world_size() > 1 else chosen.index
    if index >= torch.cuda.device_count():
        raise PlanError(
            f"Rank {rank()} wants CUDA device {index}, and this host has {torch.cuda.device_count()}. "
            f"Start at most {torch.cuda.device_count()} processes on it."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


class Mesh:
    """The ranks of a run, laid out by a plan.

    Attributes:
        plan: The plan that is laid out.
        device: The device of this rank.
        rank: This process's place in the world.
        world_size: The number of processes.
        data_rank: This process's place among the ranks that see different samples.
        data_ranks: How many of those there are.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan = plan
        self.device = device
        self.rank = rank()
        self.world_size = world_size()
        self.data_ranks = plan.data_ranks
        self._devices: DeviceMesh | None = None
        if self.world_size > 1 or _shards(plan):
            _start_process_group(device, self.world_size)
            self._require_one_plan()
            self._devices = _device_mesh(plan, device)
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._folds: dict[str, DeviceMesh] = {}
        self.data_rank = self._place(DATA_DEGREES)

    def __repr__(self) -> str:
        degrees = " × ".join(f"{name} {self.degree(name)}" for name in DEGREES if self.degree(name) > 1)
        return f"Mesh({degrees or 'one rank'}, rank {self.rank} of {self.world_size}, {self.device})"

    def _require_one_plan(self) -> None:
        """Ranks that lay out different plans would wait for each other in groups that some of them never make."""
        plans = self.gather_texts(json.dumps(self.plan.to_dict(), sort_keys=True, default=_kind))
        other = next((rank for rank, plan in enumerate(plans) if plan != plans[0]), None)
        if other is not None:
            first, second = _differences(json.loads(plans[0]), json.loads(plans[other]))
            raise PlanError(
                f"The ranks were given different plans: rank 0 has {first}, and rank {other} has {second}. Give every "
                "rank the same arguments, and build the same model on it. What auto, or auto_parallel(), chooses for "
                "each rank's own device may differ between machines: write it out there."
            )

    def degree(self, dim: str) -> int:
        """Returns the number of ranks along a mesh dimension."""
        return self._folds[dim].size() if dim in self._folds else int(getattr(self.plan, dim))

    def coordinate(self, dim: str) -> int:
        """Returns this rank's place along a mesh dimension."""
        return self._folds[dim].get_local_rank() if dim in self._folds else self._place((dim,))

    def fold(self, dim: str, inner: int) -> None:
        """Cuts the ranks along a dimension into groups of neighbours; every rank of the world must ask for the same.

        There are two dimensions more then: of ``dp``, ``dp_inner`` (a group) and ``dp_outer`` (the same place in each).
        """
        if f"{dim}_inner" not in self._folds:
            sizes = {name: self.degree(name) for name in DEGREES}
            self._folds.update(halves_of(sizes, dim, inner, self.device.type))
            self._groups.update({(half,): mesh.get_group() for half, mesh in self._folds.items()})

    def device_mesh(self, *dims: str) -> DeviceMesh:
        """Returns torch's device mesh over the given dimensions.

        Each must have more than one rank, but ``fsdp`` may have one where the plan keeps parameters on the host.

        Raises:
            PlanError: One of them has no mesh.
        """
        if len(dims) == 1 and dims[0] in self._folds:
            return self._folds[dims[0]]
        known = () if self._devices is None else self._devices.mesh_dim_names or ()
        if self._devices is None or not set(dims) <= set(known):
            raise PlanError(f"There is no device mesh over {dims} in {self!r}.")
        return self._devices[dims]

    def group(self, *dims: str) -> dist.ProcessGroup:
        """Returns the process group of the ranks that differ from this one in the given dimensions only.

        Raises:
            PlanError: None of the dimensions has more than one rank.
        """
        if dims in self._groups:
            return self._groups[dims]
        wide = tuple(dim for dim in DEGREES if dim in dims and self.degree(dim) > 1)
        if not wide or self._devices is None:
            raise PlanError(f"No group of ranks spans {dims or '()'} in {self!r}.")
        if wide not in self._groups:
            self._groups[wide] = self._make_group(wide)
        return self._groups[wide]

    def _make_group(self, wide: tuple[str, ...]) -> dist.ProcessGroup:
        assert self._devices is not None
        if all(dim in wide or self.degree(dim) == 1 for dim in DEGREES):
            return dist.distributed_c10d._get_default_group()
        if len(wide) == 1:
            return self._devices.get_group(wide[0])
        return self._devices[wide]._flatten("_".join(wide)).get_group()

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The process group of the ranks that see different samples."""
        return self.group(*DATA_DEGREES)

    def peer(self, dim: str, place: int) -> int:
        """Returns the rank, in the world, that differs from this one in a mesh dimension only."""
        stride = math.prod(self.degree(inner) for inner in DEGREES[DEGREES.index(dim) + 1 :])
        return self.rank + (place - self.coordinate(dim)) * stride

    def group_of_places(self, dim: str, places: Sequence[int]) -> dist.ProcessGroup | None:
        """Returns a process group of some of the ranks along a dimension; every rank of the world asks for the same.

        It is made once in a process: later runs have the same.

        Returns:
            The group, or None on a rank that is not in one.
        """
        mine: dist.ProcessGroup | None = None
        for ranks in self._lines(dim):
            group = group_once(dim, tuple(ranks[place] for place in sorted(places)))
            mine = group if self.rank in {ranks[place] for place in places} else mine
        return mine

    def _lines(self, dim: str) -> list[list[int]]:
        """The ranks of the world in lines along a dimension."""
        stride = math.prod(self.degree(inner) for inner in DEGREES[DEGREES.index(dim) + 1 :])
        firsts = [rank for rank in range(self.world_size) if rank // stride % self.degree(dim) == 0]
        return [[first + place * stride for place in range(self.degree(dim))] for first in firsts]

    def all_reduce(
        self, tensor: torch.Tensor, dims: Sequence[str] = DATA_DEGREES, op: Reduction = "sum"
    ) -> torch.Tensor:
        """Reduces a tensor in place over the given dimensions, and returns it; one rank has nothing to do."""
        work = self.start_all_reduce(tensor, dims, op)
        if work is not None:
            work.wait()
        return tensor

    def start_all_reduce(
        self, tensor: torch.Tensor, dims: Sequence[str] = DATA_DEGREES, op: Reduction = "sum"
    ) -> dist.Work | None:
        """Starts a reduction in place; the result is there after ``wait`` on what is returned."""
        if all(self.degree(dim) == 1 for dim in dims):
            return None
        work: dist.Work = dist.all_reduce(tensor, _REDUCTIONS[op], group=self.group(*dims), async_op=True)
        return work

    def gather_rows(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Joins every data rank's rows, in order of rank.

        Args:
            rows: This rank's tensor of shape [counts[data_rank], ...].
            counts: The number of rows of each data rank.

        Returns:
            A tensor of shape [sum(counts), ...], the same on every rank.
        """
        if self.data_ranks == 1:
            return rows
        self._require_same_rows(rows)
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        gathered = _all_gather(padded, self.data_group)
        return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])

    def _require_same_rows(self, rows: torch.Tensor) -> None:
        shape = torch.zeros(8, dtype=torch.int64)
        shape[: rows.dim() - 1] = torch.tensor(rows.shape[1:], dtype=torch.int64)
        shapes = _all_gather(shape, self.data_group)
        if any(not torch.equal(shape, other) for other in shapes):
            rest = {tuple(n for n in other.tolist() if n) for other in shapes}
            raise DataError(
                f"Rows of different shapes cannot be joined: the ranks have rows of {sorted(rest)}. Pad outputs to one "
                "length, or return one number or vector of a fixed size a sample."
            )

    def gather_numbers(self, number: int) -> list[int]:
        """Returns every data rank's number, in order of rank."""
        if self.data_ranks == 1:
            return [number]
        return [int(n) for n in _all_gather(torch.tensor([number], dtype=torch.int64), self.data_group)]

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns every rank's tensor, in order of rank over the whole world; shapes must agree."""
        if self.world_size == 1:
            return [tensor]
        return _all_gather(tensor, dist.distributed_c10d._get_default_group())

    def gather_texts(self, text: str, dims: Sequence[str] = ()) -> list[str]:
        """Returns every rank's text, in order of rank: of the world, or of those along some dimensions."""
        group = self.group(*dims) if dims else None
        mine = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        lengths = [int(n) for n in self._gathered(torch.tensor([len(text.encode())]), group)]
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        padded[: mine.numel()] = mine
        parts = self._gathered(padded, group)
        return [bytes(part[:n].tolist()).decode() for part, n in zip(parts, lengths, strict=True)]

    def _gathered(self, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
        return self.all_gather(tensor) if group is None else _all_gather(tensor, group)

    def broadcast(self, value: float) -> float:
        """Returns rank 0's number on every rank."""
        if self.world_size == 1:
            return value
        box = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(box, src=0)
        return float(box.item())

    def broadcast_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gives every rank rank 0's tensor, in place, and returns it; shapes must agree."""
        if self.world_size > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    @property
    def agree(self) -> Callable[[float], float] | None:
        """What gives rank 0's number to every rank, or None where there is one process."""
        return self.broadcast if self.world_size > 1 else None

    def wait_at_most(self, seconds: float) -> None:
        """Sets how long a collective waits for other ranks; torch's own is 10 minutes with NCCL, and 30 with gloo."""
        if self.world_size == 1:
            return
        groups = {dist.distributed_c10d._get_default_group(), *self._groups.values()}
        for group in groups:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def store(self, name: str) -> Any:
        """Returns a key-value store of all ranks, over a connection of its own, so that any thread may wait on it.

        Raises:
            PlanError: There is one process only.
        """
        if self.world_size == 1:
            raise PlanError("A world of one process has no store.")
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported, but not in its __all__

        store: Any = dist.distributed_c10d._get_default_store()
        return PrefixStore(name, store.clone())

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.world_size > 1:
            dist.barrier()

    def agrees(self, number: int) -> bool:
        """Whether every data rank has the same number; the answer is the same on all of them."""
        return len(set(self.gather_numbers(number))) == 1

    def any(self, flag: bool) -> bool:
        """Whether any rank of the world says yes."""
        if self.world_size == 1:
            return flag
        return bool(max(int(said) for said in self.all_gather(torch.tensor([int(flag)]))))

    def _place(self, dims: Sequence[str]) -> int:
        """This rank's row-major place within the given dimensions."""
        place, remaining = 0, self.rank
        coordinates: dict[str, int] = {}
        for dim in reversed(DEGREES):
            remaining, coordinates[dim] = divmod(remaining, self.degree(dim))
        for dim in dims:
            place = place * self.degree(dim) + coordinates[dim]
        return place


def _kind(value: object) -> str:
    """What stands for a value in the comparison of plans that is no plain data, and need not look alike everywhere."""
    return type(value).__qualname__


def _differences(first: dict[str, Any], second: dict[str, Any]) -> tuple[str, str]:
    """What two plans say differently, each in words."""
    names = [name for name in first if first[name] != second.get(name)]
    said = [", ".join(f"{name}={plan.get(name)!r}" for name in names) for plan in (first, second)]
    return said[0], said[1]


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def _device_mesh(plan: Plan, device: torch.device) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    wide = [dim for dim in DEGREES if getattr(plan, dim) > 1 or (dim == "fsdp" and _shards(plan))]
    return init_device_mesh(device.type, tuple(getattr(plan, dim) for dim in wide), mesh_dim_names=tuple(wide))


def _shards(plan: Plan) -> bool:
    """Whether there are sharded tensors, perhaps over one rank: then even one process has a group and a mesh."""
    return plan.fsdp > 1 or plan.offloads_parameters


def _store_of_one() -> Any:
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported, but not in its __all__

    return HashStore()


def _start_process_group(device: torch.device, processes: int) -> None:
    if dist.is_initialized():
        atexit.unregister(wait_for_gloo_threads)
        atexit.register(wait_for_gloo_threads)  # the group is the user's to destroy; its threads can abort too
        return
    options: dict[str, Any] = {} if processes > 1 else {"store": _store_of_one(), "rank": 0, "world_size": 1}
    if device.type == "cuda":
        options["device_id"] = device
    # Torch's flight recorder tells a rank that waits from one that is waited for (paraflow.watch).
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", **options)
    # A gloo run that leaves without destroying its group can abort at exit.
    atexit.register(shutdown)


def shutdown() -> None:
    """Destroys the process group, if this process has one, and waits until its threads hold no tensor any more."""
    forget_groups()
    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        # It remembers meshes by their shape: in a world that is started anew, they would be those of this one.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    wait_for_gloo_threads()
    atexit.unregister(shutdown)
