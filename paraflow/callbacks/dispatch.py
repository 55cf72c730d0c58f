"""Calls callbacks at events; found out once who listens to what."""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from paraflow.callbacks.base import HOOKS, Callback
from paraflow.checkpoint.stored import in_memory
from paraflow.interval import Interval
from paraflow.step import StepHooks
from paraflow.trigger import Agree, Trigger

if TYPE_CHECKING:
    from paraflow.trainer import Trainer

Method = Callable[["Trainer", dict[str, Any]], None]
_IN_STEP = (
    "micro_batch_begin",
    "micro_batch_end",
    "before_backward",
    "after_backward",
    "before_optimizer_step",
    "after_optimizer_step",
)
# By event: whether all that belongs to the steps so far is done when it comes.
_SETTLES = {"on_step_begin": False, "on_epoch_end": True, "on_checkpoint": True}


class Dispatcher:
    """The callbacks of a trainer, by event.

    Args:
        trainer: What they are given.
        callbacks: In the order in which they are called.
        silent: The kinds of callbacks that are never called.

    Attributes:
        callbacks: All of them.
        between_steps: Whether no step has begun of which something is still to come: only then can a run be saved.
    """

    def __init__(self, trainer: Trainer, callbacks: Sequence[Callback], silent: tuple[type, ...] = ()) -> None:
        for callback in callbacks:
            _require_callback(callback)
        for callback in callbacks:
            if _listens(callback, "on_step_end"):
                Interval.parse(callback.every)  # refused here, not when the run begins
        self.callbacks = list(callbacks)
        self.between_steps = True
        self._silent = silent
        self._trainer = trainer
        self._methods: dict[str, tuple[Method, ...]] = {hook: self._listening(hook) for hook in HOOKS}
        self._step_end: list[tuple[Trigger, Method]] = []

    def _listening(self, hook: str) -> tuple[Method, ...]:
        calling = [callback for callback in self.callbacks if not isinstance(callback, self._silent)]
        return tuple(getattr(callback, hook) for callback in calling if _listens(callback, hook))

    def signature(self) -> int:
        """Returns a number that is the same where the same callbacks listen to the same events."""
        listening = [(hook, getattr(method, "__qualname__", "")) for hook in HOOKS for method in self._methods[hook]]
        return zlib.crc32(repr([listening, [str(c.every) for c in self.callbacks]]).encode())

    def _ask_soon(self) -> None:
        """Has clocks looked at with the next step: time has passed that was no step's."""
        for trigger, _ in self._step_end:
            trigger.ask_soon()

    def start(self, step: int, agree: Agree | None) -> None:
        """Makes ready for steps; intervals of time begin now."""
        self.between_steps = True
        self._step_end = []
        for callback in self.callbacks:
            if _listens(callback, "on_step_end") and not isinstance(callback, self._silent):
                trigger = Trigger(Interval.parse(callback.every), agree)
                trigger.start(step)
                self._step_end.append((trigger, callback.on_step_end))

    def fire(self, hook: str, logs: dict[str, Any] | None = None) -> None:
        """Calls everybody who listens to an event."""
        if hook in _SETTLES:
            self.between_steps = _SETTLES[hook]
        if hook == "on_validation_end":
            self._ask_soon()
        for method in self._methods[hook]:
            method(self._trainer, {} if logs is None else logs)

    def due(self, step: int) -> list[Method]:
        """Returns whose `on_step_end` is due with a step."""
        return [method for trigger, method in self._step_end if trigger.at_step(step)]

    def step_hooks(self) -> StepHooks:
        """Returns what the engine calls while it runs a step."""
        listening = {name: tuple(map(self._bind, self._methods[f"on_{name}"])) for name in _IN_STEP}
        return StepHooks(**listening, bytes_held=lambda: sum(callback.bytes_held for callback in self.callbacks))

    def _bind(self, method: Method) -> Callable[[], None]:
        return partial(method, self._trainer, {})

    def state_dict(self) -> dict[str, Any]:
        """Returns the callbacks' state, by class and place among those of the class."""
        return {key: callback.state_dict() for key, callback in self._keyed()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Gives each callback its state; one that is new to the run begins without."""
        for key, callback in self._keyed():
            if key in state:
                callback.load_state_dict(state[key] if callback.loads_from_disk else in_memory(state[key]))

    def _keyed(self) -> list[tuple[str, Callback]]:
        seen: dict[str, int] = {}
        keyed = []
        for callback in self.callbacks:
            name = type(callback).__name__
            seen[name] = seen.get(name, 0) + 1
            keyed.append((f"{name}-{seen[name]}", callback))
        return keyed


def _listens(callback: Callback, hook: str) -> bool:
    """Whether a callback has an event's method of its own, in its class or on itself."""
    method = getattr(callback, hook)
    return getattr(method, "__func__", method) is not getattr(Callback, hook)


def _require_callback(callback: object) -> None:
    if isinstance(callback, Callback):
        _refuse_misspelt(callback)
        return
    made = f"; write {callback.__name__}(...)" if isinstance(callback, type) else ""
    raise TypeError(f"callbacks must hold paraflow.Callback objects, not {callback!r}{made}.")


def _refuse_misspelt(callback: Callback) -> None:
    """An event whose name is nearly right would never be called, and nobody would know."""
    for name in vars(type(callback)):
        close = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.85)
        if name.startswith("on_") and name not in HOOKS and close:
            raise TypeError(
                f"{type(callback).__name__} has a method {name!r}, which is no event; did you mean {close[0]!r}?"
            )
