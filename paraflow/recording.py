"""What was done to tensors that have no memory, so that it can be done when their values are needed.

The idea is that of torchdistx's deferred initialisation: a graph of operations, of which a tensor's own part is run
alone. Here the graph is between storages, so that views, `nn.Parameter` and tied weights need no care: what shares
memory shares a cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from mmap import mmap
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

_ATTRIBUTE = "_paraflow_cell"  # on the storage's own object, which lives as long as the storage does
_HOST = torch.device("cpu")
_order = count()


@dataclass(eq=False, slots=True)
class Cell:
    """The memory that a storage would have.

    Attributes:
        nbytes: How much.
        head: What was written to it last, or None where it is not initialised.
    """

    nbytes: int
    head: Node | None = None


def _pages(nbytes: int) -> torch.UntypedStorage:
    """Memory that goes back to the system when freed: the heap would keep a hole that the next does not fit in."""
    if not nbytes:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    return torch.frombuffer(mmap(-1, nbytes), dtype=torch.uint8).untyped_storage()


Memory = dict[Cell, torch.UntypedStorage]


@dataclass(frozen=True, eq=False, slots=True)
class View:
    """A tensor in a cell."""

    cell: Cell
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self, memory: Memory) -> torch.Tensor:
        """Returns the tensor where its cell has memory; one that nothing was written to yet is given some."""
        if self.cell not in memory:
            memory[self.cell] = _pages(self.cell.nbytes)
        empty = torch.empty(0, dtype=self.dtype, device=_HOST)
        return empty.set_(memory[self.cell], self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class RandomState:
    """A generator as it was before an operation drew from it."""

    generator: torch.Generator
    state: torch.Tensor

    @classmethod
    def of(cls, generator: torch.Generator) -> RandomState:
        """Returns the state a generator is in."""
        return cls(generator, generator.get_state())

    @contextmanager
    def again(self) -> Iterator[None]:
        """Has the generator draw what it drew then, and afterwards go on from where it is now."""
        now = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            yield
        finally:
            self.generator.set_state(now)


@dataclass(eq=False, slots=True)
class Node:
    """An operation that is still to be run.

    Attributes:
        function: The operator.
        args: Its arguments, with a `View` in the place of each tensor that has no memory.
        kwargs: Those by name.
        needs: What has to be run before.
        made: For each tensor it returns, in what cell it is kept; None for one that shares an argument's memory.
        random: The state of the generator that it draws from.
        order: Its place among all operations.
    """

    function: Any
    args: Any
    kwargs: Any
    needs: tuple[Node, ...]
    made: list[View | None] = field(default_factory=list)
    random: RandomState | None = None
    order: int = field(default_factory=lambda: next(_order))

    def run(self, memory: Memory) -> None:
        """Runs the operation on memory."""
        args, kwargs = with_memory((self.args, self.kwargs), memory)
        if self.random is None:
            result = self.function(*args, **kwargs)
        else:
            with self.random.again():
                result = self.function(*args, **kwargs)
        for view, made in zip(self.made, tensors_in(result), strict=False):
            if view is not None:
                _keep(made, view, memory)


def _keep(made: torch.Tensor, view: View, memory: Memory) -> None:
    storage = made.untyped_storage()
    same = (storage.nbytes(), made.stride(), made.storage_offset()) == (view.cell.nbytes, view.stride, view.offset)
    if same and all(storage.data_ptr() != other.data_ptr() for other in memory.values()):
        memory[view.cell] = storage
    else:
        view.tensor(memory).copy_(made)


def cell_of(tensor: torch.Tensor) -> Cell | None:
    """Returns the cell of a tensor that has no memory but a record of what was done to it, or None."""
    return getattr(tensor.untyped_storage(), _ATTRIBUTE, None) if tensor.is_meta else None


def give_cell(tensor: torch.Tensor) -> View:
    """Starts the record of a tensor on the meta device."""
    storage = tensor.untyped_storage()
    setattr(storage, _ATTRIBUTE, Cell(storage.nbytes()))
    return view_of(tensor)


def view_of(tensor: torch.Tensor) -> View:
    """Returns where a tensor that has a cell lies in it."""
    cell = cell_of(tensor)
    assert cell is not None
    return View(cell, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Returns the tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def heads_in(tree: Any) -> tuple[Node, ...]:
    """Returns what has to be run for the views in nested lists, tuples and dicts, as things are now."""
    heads = {id(leaf.cell): leaf.cell.head for leaf in tree_leaves(tree) if isinstance(leaf, View)}
    return tuple(head for head in heads.values() if head is not None)


def with_memory(tree: Any, memory: Memory) -> Any:
    """Returns nested lists, tuples and dicts with a tensor in the place of each view."""
    return tree_map_only(View, lambda view: view.tensor(memory), tree)


def evaluate(tree: Any) -> Any:
    """Returns nested lists, tuples and dicts with the value, on the host, in the place of each view."""
    memory: Memory = {}
    with torch.no_grad():
        for node in _in_order(heads_in(tree)):
            node.run(memory)
        return with_memory(tree, memory)


def random_states(view: View) -> Iterator[torch.Tensor]:
    """Yields the states of the generators that a view's values are drawn from, in order."""
    for node in _in_order(heads_in(view)):
        if node.random is not None:
            yield node.random.state


def _in_order(heads: Iterable[Node]) -> list[Node]:
    needed: dict[int, Node] = {}
    waiting = list(heads)
    while waiting:
        node = waiting.pop()
        if node.order not in needed:
            needed[node.order] = node
            waiting.extend(node.needs)
    return [needed[order] for order in sorted(needed)]
