"""The model that benchmarks/memory.py trains, by Paraflow and by a plain ``fully_shard`` script."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from allocations import GRADIENTS, OPTIMIZER, PARAMETERS, Followed, Known, Recorder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import paraflow as pf

RANKS = 4
LEARNING_RATE = 1e-4
FOLLOWED = 1
"""The step that is followed, from 0: the first makes the optimizer's state."""


@dataclass(frozen=True)
class Shape:
    """What is trained.

    Attributes:
        vocab: Tokens.
        hidden: Features.
        layers: Blocks.
        tokens: Of a sequence.
    """

    vocab: int = 10240
    hidden: int = 768
    layers: int = 13
    tokens: int = 16

    def model(self) -> Any:
        """Returns the model, with AdamW: a copy, since so many random numbers take seconds."""
        return copy.deepcopy(self._original())

    @cache  # noqa: B019  # there are two shapes
    def _original(self) -> Any:
        pf.seed(0)
        config = pf.models.CausalLMConfig(
            vocab_size=self.vocab,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.hidden // 64,
            context=self.tokens,
        )
        return pf.configure(pf.models.CausalLM(config), optimizer="adamw", lr=LEARNING_RATE)

    def data(self, samples: int) -> torch.Tensor:
        """Returns sequences: int64 [samples, tokens + 1]."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, self.vocab, (samples, self.tokens + 1), generator=generator)


SHAPE, SMALL = Shape(), Shape(vocab=1024, hidden=128, layers=4)


class Follower(pf.Callback):
    """Follows one step of a fit.

    Args:
        offloaded: What the plan keeps on the host: nothing, ``"optimizer"`` or ``"params"``.
    """

    def __init__(self, offloaded: str | None = None) -> None:
        self._offloaded = offloaded
        self._recorder: Recorder | None = None
        self.followed: Followed | None = None

    def on_step_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        """Begins to follow, where it is the step's turn."""
        if trainer.step != FOLLOWED:
            return
        engine = trainer.engine
        on_host, params_on_host = self._offloaded is not None, self._offloaded == "params"
        copies = [held.tensor for held in engine.update.held if held.is_copy]
        self._recorder = Recorder(
            [
                Known(PARAMETERS, list(engine.module.parameters()), params_on_host),
                Known(PARAMETERS, copies, on_host),
                Known(OPTIMIZER, _state(engine.optimizer), on_host),
                Known(GRADIENTS, engine.gradients(), params_on_host),
            ],
            host_optimizer=on_host,
        )
        self._recorder.begin(engine.module)

    def on_before_backward(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        """Marks it."""
        if self._recorder is not None:
            self._recorder.backward()

    def on_before_optimizer_step(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        """Marks it."""
        if self._recorder is not None:
            self._recorder.update(Known(GRADIENTS, trainer.engine.gradients(), self._offloaded == "params"))

    def on_after_optimizer_step(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        """Marks it."""
        if self._recorder is not None:
            self._recorder.updated()

    def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        """Ends."""
        if self._recorder is not None:
            self.followed = self._recorder.end()
            self._recorder = None


def follow(shape: Shape, batch_size: int, offloaded: str | None = None, **plan: Any) -> Followed:
    """Trains two steps by Paraflow under a plan, and returns what the second allocated on this rank."""
    follower = Follower(offloaded)
    fit(shape, batch_size, FOLLOWED + 1, [follower], **plan)
    assert follower.followed is not None
    return follower.followed


def fit(shape: Shape, batch_size: int, steps: int, callbacks: Sequence[pf.Callback], **plan: Any) -> None:
    """Trains by Paraflow."""
    trainer = pf.Trainer(max_steps=steps, progress=False, device="cpu", callbacks=callbacks, **plan)
    trainer.fit(shape.model(), shape.data(batch_size * steps), batch_size=batch_size)


class Plain:
    """The script that a careful person writes with torch alone: a unit for each block, and the rest.

    Args:
        shape: The model.
        batch_size: Samples of a step over all ranks.
        zero: What is kept sharded: 3 everything; 2 parameters are gathered from forward to the end of backward; 1 also
            gradients are whole until the last micro-batch.
        micro_batches: Micro-batches of a step.
    """

    def __init__(self, shape: Shape, batch_size: int, zero: int, micro_batches: int = 1) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = shape.model()
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=zero == 3)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=False)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        rows = shape.data(batch_size).chunk(dist.get_world_size())[dist.get_rank()]
        self._micro_batches = rows.chunk(micro_batches)
        self._zero = zero

    def step(self, recorder: Recorder | None = None) -> None:
        """Makes one step, and marks its moments where it is followed."""
        self._optimizer.zero_grad()
        for index, tokens in enumerate(self._micro_batches):
            last = index == len(self._micro_batches) - 1
            if len(self._micro_batches) > 1:
                self.model.set_requires_gradient_sync(last or self._zero > 1)
                self.model.set_reshard_after_backward(last or self._zero == 3)
            logits = self.model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            if recorder is not None:
                recorder.backward()
            (loss / len(self._micro_batches)).backward()
            # Else the outputs live on into the next forward, beside its own.
            del logits, loss
        if recorder is not None:
            recorder.update(Known(GRADIENTS, self._gradients()))
        self._optimizer.step()
        if recorder is not None:
            recorder.updated()

    def follow(self) -> Followed:
        """Makes two steps, and returns what the second allocated on this rank."""
        self.step()
        recorder = Recorder(
            [
                Known(PARAMETERS, list(self.model.parameters())),
                Known(OPTIMIZER, _state(self._optimizer)),
                Known(GRADIENTS, self._gradients()),
            ]
        )
        recorder.begin(self.model)
        self.step(recorder)
        return recorder.end()

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]


class Turns(pf.Callback):
    """Lets a fit and another loop take turns, a step each; every clock is read when all ranks are there.

    Args:
        make_step: Makes the other loop's step.
    """

    def __init__(self, make_step: Callable[[], Callable[[], None]]) -> None:
        self._make_step = make_step
        self._step: Callable[[], None] | None = None
        self._began: float | None = None
        self._plain = 0.0
        self.pairs: list[tuple[float, float]] = []

    def on_step_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        """Ends a step of the fit, makes one of the other loop, and begins the next."""
        now = _meet()
        if self._began is not None:
            self.pairs.append((self._plain, now - self._began))
        self._step = self._step or self._make_step()
        began = _meet()
        self._step()
        self._began = _meet()
        self._plain = self._began - began


def take_turns(shape: Shape, batch_size: int, turns: int) -> list[tuple[float, float]]:
    """Returns the seconds of a plain step and of Paraflow's that followed it, turn by turn."""
    clock = Turns(lambda: Plain(shape, batch_size, 3).step)
    warm_up = 2
    fit(shape, batch_size, warm_up + turns + 1, [clock], fsdp=RANKS)
    return clock.pairs[warm_up:]


def sizes(model: nn.Module) -> tuple[int, int, int]:
    """Returns the number of parameters, those of the largest unit, and those of the largest parameter."""
    from paraflow.plugins.units import find_units, rest_of

    units = find_units(model)
    largest = max(unit.bytes for unit in [*units, rest_of(model, units)])
    counts = [parameter.numel() for parameter in model.parameters()]
    return sum(counts), largest // 4, max(counts)


def _meet() -> float:
    dist.barrier()
    return time.perf_counter()


def _state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, torch.Tensor)]
