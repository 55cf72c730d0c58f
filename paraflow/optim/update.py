"""How an optimizer is applied: at once or in groups, to the model's parameters or to tensors that stand in for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from paraflow.errors import ModelError, PlanError
from paraflow.optim.held import Held, changed
from paraflow.optim.host_link import Fetched, HostLink
from paraflow.optim.kinds import has_step_hooks, is_watched
from paraflow.optim.shares import shares_of
from paraflow.optim.stand_ins import hold_the_models_own, stand_in
from paraflow.optim.stepping import Narrow, Step, as_one_step, bare_step
from paraflow.parts import is_spread

__all__ = ["Held", "Update"]


class Update:
    """Applies an optimizer to a model.

    Args:
        optimizer: The optimizer, over the model's parameters.
        parameters: The model's parameters by name; the optimizer may leave out some.

    Attributes:
        optimizer: The optimizer.
        held: What it holds, in the order of its groups.

    Raises:
        ModelError: The optimizer holds what is no parameter of the model.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self.optimizer = optimizer
        hold_the_models_own(optimizer)
        names = {id(parameter): name for name, parameter in parameters.items()}
        _require_known(optimizer, names)
        self.held = [
            Held(names[id(parameter)], parameter, parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        self._count = 1
        self._shares: list[list[Held]] | None = None
        self._direct = True
        self._apart = False
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
        self._apart = any(is_spread(held.parameter) and not held.is_itself for held in self.held)

    def _replace(self, held: Held, make: Callable[[Held], torch.Tensor]) -> torch.Tensor:
        before, after = held.tensor, make(held)
        if after is before:
            return before
        stand_in(self.optimizer, before, after, held.parameter)
        held.hold(after)
        return after

    def __call__(self) -> None:
        """Makes one step of the optimizer with the gradients that the model's parameters have.

        Raises:
            PlanError: A hook would see parts of parameters on the host.
        """
        if self._apart and is_watched(self.optimizer):
            self._show_whole()
        if self._begun is not None:
            self._finish()
        elif self._direct:
            self.optimizer.step()
        else:
            self._apply()

    def _show_whole(self) -> None:
        """Has somebody who has come to look on see tensors that know the whole."""
        if any(held.is_copy and is_spread(held.parameter) for held in self.held):
            raise PlanError(
                f"[offload-whole-parameters] {type(self.optimizer).__name__} has a hook or a step of its own, which "
                "would see this rank's shards on the host. Do it in a callback, or leave cpu_offload out.",
                rule="offload-whole-parameters",
            )
        self.hold(lambda held: held.parameter if is_spread(held.parameter) else held.tensor)

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


def _require_known(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    foreign = sum(id(tensor) not in names for group in optimizer.param_groups for tensor in group["params"])
    if foreign:
        raise ModelError(
            f"The {type(optimizer).__name__} holds {foreign} tensors that are no parameters of the model as it is now. "
            "Have configure_optimizers make it anew from self.parameters() each time it is called."
        )
