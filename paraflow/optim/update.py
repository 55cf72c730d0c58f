"""How an optimizer is applied: at once or in groups, to the model's parameters or to tensors that stand in for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paraflow.optim.held import Held, changed
from paraflow.optim.host_link import Fetched, HostLink
from paraflow.optim.shares import shares_of
from paraflow.optim.stepping import Narrow, Step, as_one_step, bare_step, has_step_hooks
from paraflow.parts import as_part, is_spread, local

__all__ = ["Held", "Update"]

_STANDS_FOR = "_paraflow_stands_for"


class Update:
    """Applies an optimizer to a model.

    Args:
        optimizer: The optimizer, over the model's parameters.
        parameters: The model's trained parameters by name.

    Attributes:
        optimizer: The optimizer.
        held: What it holds, in the order of its groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self.optimizer = optimizer
        _hold_the_models_own(optimizer)
        names = {id(parameter): name for name, parameter in parameters.items()}
        self.held = [
            Held(names[id(parameter)], parameter, parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        self._count = 1
        self._shares: list[list[Held]] | None = None
        self._direct = True
        self._link = HostLink()
        self._begun: Narrow | None = None
        self._applied: set[int] = set()
        self._lock = threading.Lock()

    @property
    def by_tensor(self) -> dict[int, Held]:
        """What is held, by the id of the tensor that the optimizer has."""
        return {id(held.tensor): held for held in self.held}

    @property
    def shares(self) -> list[list[Held]]:
        """What is held, in the groups that are applied one after another."""
        if self._shares is None:
            self._shares = shares_of(self.held, self._count)
        return self._shares

    def hold(self, make: Callable[[Held], torch.Tensor]) -> None:
        """Gives the optimizer other tensors to hold; state it has already goes with them.

        Args:
            make: Returns what is held from now on, or ``held.tensor`` to leave it.
        """
        found = self.by_tensor
        for group in self.optimizer.param_groups:
            group["params"] = [self._replace(found[id(tensor)], make) for tensor in group["params"]]
        self._arrange()

    def divide(self, count: int) -> None:
        """Has the optimizer applied in groups, one after another, to the same result.

        A group is given its gradients, stepped on, and its weights are taken back before the next, so that what an
        optimizer allocates for a step, and what is copied to the host for it, is that of one group (of two on a CUDA
        device, where the next group's gradients are copied meanwhile). Where a hook looks on before or after the step,
        all gradients and weights are there for it, as they are in one step.

        Args:
            count: The groups; there are fewer where there are fewer parameters.
        """
        self._count = count
        self._arrange()

    def _arrange(self) -> None:
        self._shares = None
        self._direct = self._count == 1 and all(held.is_itself for held in self.held)

    def _replace(self, held: Held, make: Callable[[Held], torch.Tensor]) -> torch.Tensor:
        before, after = held.tensor, make(held)
        if after is before:
            return before
        _move_state(self.optimizer, before, after)
        held.hold(after)
        if not held.is_itself:
            setattr(after, _STANDS_FOR, held.parameter)
        return after

    def __call__(self) -> None:
        """Makes one step of the optimizer with the gradients that the model's parameters have."""
        if self._begun is not None:
            self._finish()
        elif self._direct:
            self.optimizer.step()
        else:
            self._apply()

    def _apply(self) -> None:
        self._make_ready(self.held)
        if len(self.shares) > 1 and not has_step_hooks(self.optimizer):
            as_one_step(self.optimizer, self._in_turn)
            return
        everything = self._link.fetch(self.held)
        everything.give()
        if len(self.shares) == 1:
            self.optimizer.step()
        else:
            as_one_step(self.optimizer, lambda step: self._over(self.shares, Narrow(self.optimizer), step))
        everything.take()

    def _make_ready(self, held: Sequence[Held]) -> None:
        for one in changed([one for one in held if one.is_copy]):
            one.take_up()
        self._link.begin(held)

    def _in_turn(self, step: Step) -> None:
        """Steps over one group after another, the next one's gradients being on their way."""
        narrow = Narrow(self.optimizer)
        ahead: Fetched | None = self._link.fetch(self.shares[0])
        for index, share in enumerate(self.shares):
            fetched, ahead = ahead or self._link.fetch(share), None
            if fetched.arrived is not None and index + 1 < len(self.shares):
                ahead = self._link.fetch(self.shares[index + 1])
            fetched.give()
            self._over([share], narrow, step)
            fetched.take()

    def _over(self, shares: Sequence[Sequence[Held]], narrow: Narrow, step: Step) -> None:
        for share in shares:
            with narrow.to([held.tensor for held in share]):
                step()

    def apply_now(self, held: Held) -> None:
        """Makes the part of a step that is one parameter's, and frees its gradient.

        The step is whole with the call of the update itself, which applies what has not been applied before.
        """
        with self._lock:  # backward may run on a thread for each device
            if self._begun is None:
                self._begun = Narrow(self.optimizer)
            if id(held) in self._applied:
                raise RuntimeError(
                    f"The parameter {held.name!r} was given a gradient twice in one backward, as reentrant activation "
                    "checkpointing does, and had been updated with the first. Use use_reentrant=False, or leave "
                    "apply_groups='backward' out."
                )
            self._applied.add(id(held))
            self._one(held, self._begun)

    def _one(self, held: Held, narrow: Narrow) -> None:
        self._make_ready([held])
        fetched = self._link.fetch([held])
        fetched.give()
        with narrow.to([held.tensor]):
            bare_step(self.optimizer)()
        fetched.take()
        held.parameter.grad = None

    def _finish(self) -> None:
        narrow, self._begun = self._begun, None
        left = [held for held in self.held if id(held) not in self._applied]
        self._applied.clear()
        assert narrow is not None
        self._make_ready(left)
        fetched = self._link.fetch(left)
        fetched.give()
        as_one_step(self.optimizer, lambda step: self._over([left] if left else [], narrow, step))
        fetched.take()

    def forget(self) -> None:
        """Drops what is known of a step that was begun and never made whole."""
        self._begun = None
        self._applied.clear()


def _hold_the_models_own(optimizer: torch.optim.Optimizer) -> None:
    """Has an optimizer that stands in for parameters since an earlier run hold the parameters themselves again."""
    for group in optimizer.param_groups:
        for place, tensor in enumerate(group["params"]):
            parameter = getattr(tensor, _STANDS_FOR, None)
            if parameter is not None:
                _move_state(optimizer, tensor, parameter)
                group["params"][place] = parameter


def _move_state(optimizer: torch.optim.Optimizer, before: torch.Tensor, after: torch.Tensor) -> None:
    """Gives an optimizer's state of one tensor to another: what is as large as it, with its device and dtype."""
    if before not in optimizer.state:
        return
    state: dict[str, Any] = optimizer.state.pop(before)
    optimizer.state[after] = {key: _moved(value, before, after) for key, value in state.items()}


def _moved(value: Any, before: torch.Tensor, after: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0 or value.shape != before.shape:
        return value.to(after.device) if value.device == before.device else value
    part = local(value).to(after.device, after.dtype) if value.is_floating_point() else local(value).to(after.device)
    return as_part(part, after) if is_spread(after) else part
