"""A backward in two halves: first the gradients that other stages wait for, later those of the parameters.

The nodes of a stage's graph that lead to what it received are its trunk. Gradients of what was received run down the
trunk alone. Where a trunk node also leads to parameters, the gradient that arrives there is kept, and the second half
goes on from it, into that branch alone.

A parameter that several trunk nodes lead to (used twice, or by way of a bias that several layers add), or that the
stage's output depends on beside the trunk, gets its gradient in the first half, so that nothing is computed twice.
`torch.distributed.pipelining` leaves the gradient of the latter out, and cannot begin at an output that is a view.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

_Gradients = tuple[Tensor | None, ...]


class SplitBackward:
    """The two halves of one backward.

    Args:
        roots: Where backward begins.
        inputs: The leaves whose gradients are wanted first; at least one.

    Example:
        >>> x, weight = torch.ones(1, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
        >>> loss = (x @ weight).sum()
        >>> halves = SplitBackward([torch.autograd.graph.get_gradient_edge(loss)], [x])
        >>> halves.of_inputs([torch.ones(())])
        >>> x.grad, weight.grad
        (tensor([[2., 2.]]), None)
        >>> halves.of_weights()
        >>> weight.grad
        tensor([[1., 1.],
                [1., 1.]])
    """

    def __init__(self, roots: Sequence[GradientEdge], inputs: Sequence[Tensor]) -> None:
        self._roots = tuple(roots)
        self._inputs = tuple(inputs)
        self._branches, self._first = _divide([root.node for root in roots], [_node_of(leaf) for leaf in inputs])
        self._arrived: dict[Node, _Gradients] = {}

    def of_inputs(self, gradients: Sequence[Tensor]) -> None:
        """Adds to `grad` of the inputs, and of what cannot wait.

        Args:
            gradients: Those of the roots.
        """
        handles = [node.register_prehook(self._keeping(node)) for node in self._branches]
        try:
            torch.autograd.backward(self._roots, gradients, retain_graph=True, inputs=[*self._inputs, *self._first])
        finally:
            for handle in handles:
                handle.remove()
            self._roots = ()

    def _keeping(self, node: Node) -> Callable[[_Gradients], None]:
        def keep(gradients: _Gradients) -> None:
            self._arrived[node] = gradients

        return keep

    def of_weights(self) -> None:
        """Adds to `grad` of the parameters that were left, and lets go of the graph."""
        while self._branches:
            node, leaves = self._branches.popitem()
            gradients = self._arrived.pop(node, ())
            seeds = [(GradientEdge(node, place), g) for place, g in enumerate(gradients) if g is not None]
            if not seeds:
                continue
            # Hooks on the tensor that the node made have acted on what was kept; they must not act on it again.
            handle = node.register_prehook(lambda _, kept=gradients: kept)
            try:
                torch.autograd.backward([edge for edge, _ in seeds], [g for _, g in seeds], inputs=leaves)
            finally:
                handle.remove()


def _divide(roots: Sequence[Node], ends: Sequence[Node]) -> tuple[dict[Node, list[Tensor]], list[Tensor]]:
    """Returns the leaves that one trunk node alone leads to, by that node, and the other leaves beside the trunk."""
    trunk = _leading_to(ends, _parents(roots))
    beside = [(None, root) for root in roots if root not in trunk]
    forks = [(node, child) for node in trunk for child in _children(node) if child not in trunk]
    led_by: dict[Node, set[Node | None]] = defaultdict(set)
    for node, child in [*beside, *forks]:
        for leaf in _leaves_below(child):
            led_by[leaf].add(node)
    branches: dict[Node, list[Tensor]] = defaultdict(list)
    first: list[Tensor] = []
    for leaf, nodes in led_by.items():
        node = next(iter(nodes))
        (first if len(nodes) > 1 or node is None else branches[node]).append(_tensor_of(leaf))
    return dict(branches), first


def _children(node: Node) -> Iterator[Node]:
    return (child for child, _ in node.next_functions if child is not None)


def _parents(roots: Sequence[Node]) -> dict[Node, list[Node]]:
    """Every node of a graph, with those that lead to it."""
    parents: dict[Node, list[Node]] = {root: [] for root in roots}
    waiting = list(parents)
    while waiting:
        node = waiting.pop()
        for child in _children(node):
            if child not in parents:
                parents[child] = []
                waiting.append(child)
            parents[child].append(node)
    return parents


def _leading_to(ends: Sequence[Node], parents: dict[Node, list[Node]]) -> dict[Node, None]:
    found = dict.fromkeys(end for end in ends if end in parents)
    waiting = list(found)
    while waiting:
        for parent in parents[waiting.pop()]:
            if parent not in found:
                found[parent] = None
                waiting.append(parent)
    return found


def _leaves_below(node: Node) -> list[Node]:
    seen, waiting, leaves = {node}, [node], []
    while waiting:
        here = waiting.pop()
        if hasattr(here, "variable"):
            leaves.append(here)
        for child in _children(here):
            if child not in seen:
                seen.add(child)
                waiting.append(child)
    return leaves


def _node_of(leaf: Tensor) -> Node:
    return torch.autograd.graph.get_gradient_edge(leaf).node


def _tensor_of(leaf: Node) -> Tensor:
    tensor: Tensor = leaf.variable  # type: ignore[attr-defined]  # of an AccumulateGrad
    return tensor
