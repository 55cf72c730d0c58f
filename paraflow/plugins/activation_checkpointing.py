"""Activation checkpointing: blocks keep less for backward, and compute it again or fetch it from the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paraflow.errors import PlanError
from paraflow.outline import outline_of
from paraflow.plan import Plan
from paraflow.plan_memory import RECOMPUTED
from paraflow.plugins.base import Phase, Plugin
from paraflow.plugins.precision import DTYPES
from paraflow.recompute import Caches, TreatedBlocks, TreatedSteps, matching_blocks, repeated_blocks, within_units
from paraflow.rules import Rule

if TYPE_CHECKING:
    from paraflow.data.batch import Batch
    from paraflow.engine import Engine

_SMALLEST_OFFLOADED = 2**16

_MOST = 0.8
"""A block with more than this share of the parameters is most of the model."""


class ActivationCheckpointing(Plugin):
    """Blocks of the model keep less for backward than they need, with the same gradients bit by bit.

    Parameters keep their names, and between steps the model is as the user made it. Results of collectives and of what
    chooses (top-k, sort, sampling) are kept and never computed twice; random numbers are the same the second time, and
    buffers and attributes are not updated twice, whenever in training that begins. What cannot be made right raises a
    ModelError. Caches of transformers' models are switched off while a step is trained.

    Args:
        what: ``"full"`` recomputes each block from its input; ``"selective"`` keeps the results of its matrix products,
            convolutions and attention; ``"offload"`` copies what backward needs to the host and fetches it one block
            ahead; ``"auto"`` measures each block on the first batch and chooses the cheapest that fits in
            ``memory_budget``, or the device. Patterns of module names say what is recomputed as a whole.
        blocks: Patterns of the names of the modules that are treated; the blocks that the model repeats if None.
        offload_min_bytes: The smallest tensor that is copied to the host.

    Attributes:
        treated: The blocks, and what is called in the place of their forwards.

    Example:
        >>> ActivationCheckpointing("selective", blocks=["decoder.layers.*"]).describe()
        'selective recomputation in decoder.layers.*: matrix products, convolutions and attention are kept'
    """

    name = "activation_checkpointing"
    phase = Phase.PREPARE
    rules = (
        Rule(
            "recompute-compile",
            lambda f: f.plan.compile and f.plan.activation_checkpointing in ("offload", "auto"),
            "activation_checkpointing={f.plan.activation_checkpointing!r} acts between the operators of a block, and "
            "torch.compile fuses them.",
            "Leave compile out, or write 'full' or 'selective', which torch.compile knows how to do.",
        ),
        Rule(
            "budget-needs-auto",
            lambda f: f.plan.memory_budget is not None and f.plan.activation_checkpointing != "auto",
            "memory_budget={f.plan.memory_budget!r} is what activation_checkpointing='auto' keeps to, and "
            "{f.plan.activation_checkpointing!r} leaves nothing to choose.",
            "Write activation_checkpointing='auto', or leave memory_budget out.",
        ),
        Rule(
            "auto-recompute-runner",
            lambda f: f.plan.activation_checkpointing == "auto" and bool(f.runners),
            "activation_checkpointing='auto' measures a model whose micro-batches run one after another, and "
            "{f.runners} runs them otherwise.",
            "Write 'full' or 'selective'.",
        ),
    )

    def __init__(
        self,
        what: str | Sequence[str] = "full",
        *,
        blocks: Sequence[str] | None = None,
        offload_min_bytes: int = _SMALLEST_OFFLOADED,
    ) -> None:
        self.what = what if isinstance(what, str) else tuple(what)
        if not isinstance(self.what, str) and blocks is not None:
            raise PlanError(
                f"ActivationCheckpointing was given patterns twice: {list(self.what)} and blocks={list(blocks)}. Write "
                "one of them."
            )
        if isinstance(self.what, str) and self.what not in RECOMPUTED:
            raise PlanError(f"ActivationCheckpointing takes one of {RECOMPUTED} or patterns, not {what!r}.")
        self._patterns = None if blocks is None and isinstance(self.what, str) else tuple(blocks or self.what)
        self._min_bytes = offload_min_bytes
        self.treated = TreatedBlocks()
        self._steps: nn.Module | None = None

    @property
    def fields(self) -> Mapping[str, Any]:
        """What is recomputed."""
        return {"activation_checkpointing": self.what}

    def transform(self, module: nn.Module, engine: Engine) -> nn.Module:
        """Runs the steps with the blocks treated."""
        self._steps = module
        self.treated = TreatedBlocks()
        blocks = self._blocks(engine.module)
        kind = self.what if isinstance(self.what, str) else "full"
        if engine.plan.compile:
            self.treated.treat_compiled(blocks, kind)
        elif kind != "auto":
            self.treated.treat_all(blocks, kind, self._min_bytes)
        return TreatedSteps(module, self.treated, Caches(engine.module))

    def _blocks(self, module: nn.Module) -> dict[str, nn.Module]:
        found = repeated_blocks(module) if self._patterns is None else matching_blocks(module, self._patterns)
        if found:
            outline = outline_of(module)
            return within_units(module, found, () if outline is None else outline.units)
        there = [name for name, child in module.named_modules() if name and next(child.children(), None) is not None]
        names = there or [name for name, _ in module.named_children()]
        asked = "has no blocks" if self._patterns is None else f"has no module that matches {list(self._patterns)}"
        what = f"activation_checkpointing: {type(module).__name__} {asked}. "
        if not names:
            raise PlanError(
                f"{what}It has no modules inside it to run again one by one. Divide its forward among submodules, or "
                "leave activation_checkpointing out."
            )
        raise PlanError(
            f"{what}Its modules are {', '.join(names[:12])}{' and more' if len(names) > 12 else ''}. Name those "
            f"that are to be recomputed, as in activation_checkpointing=[{names[0]!r}]."
        )

    def calibrate(self, engine: Engine, batch: Batch) -> None:
        """For ``"auto"``: measures the blocks on the first micro-batch, and chooses."""
        if self.what != "auto":
            if self.what != "selective":
                _warn_of_one_block(engine, self._blocks(engine.module))
            return
        from paraflow.recompute.calibration import choose_treatments

        assert self._steps is not None
        steps, blocks = self._steps, self._blocks(engine.module)
        with Caches(engine.module):  # a block is run several times
            cut = choose_treatments(
                engine, blocks, lambda data: steps("training_step", data), lambda: _autocast(engine), batch
            )
        self.treated.treat(blocks, cut.treatments, self._min_bytes)
        for line in cut.table():
            engine.say(line)

    def describe(self) -> str:
        """Returns one line for the printed plan."""
        where = "the blocks it repeats" if self._patterns is None else ", ".join(self._patterns)
        return {
            "selective": f"selective recomputation in {where}: matrix products, convolutions and attention are kept",
            "offload": f"activations of {where} wait on the host between forward and backward",
            "auto": f"recomputation in {where}, chosen on the first batch to meet the memory budget",
        }.get(self.what if isinstance(self.what, str) else "", f"activations of {where} are recomputed in backward")


def _warn_of_one_block(engine: Engine, blocks: Mapping[str, nn.Module]) -> None:
    """Says so where one block is most of the model: in its backward all that it needs is there at once."""
    whole = sum(parameter.numel() for parameter in engine.module.parameters())
    for name, block in blocks.items():
        share = sum(parameter.numel() for parameter in block.parameters()) / max(whole, 1)
        if share > _MOST:
            parts = next(block.children(), None) is not None
            engine.say(
                f"activation_checkpointing: the block {name!r} holds {share:.0%} of the model. All its activations are "
                "there at once in backward, so that the peak of memory stays about what it was. "
                + (f"Name smaller modules, as in activation_checkpointing=[{name + '.*'!r}]." if parts else "")
            )


def _autocast(engine: Engine) -> AbstractContextManager[Any]:
    if engine.plan.precision == "fp32":
        return nullcontext()
    return torch.autocast(engine.mesh.device.type, dtype=DTYPES[engine.plan.precision])


def from_plan(plan: Plan, options: Mapping[str, Any]) -> ActivationCheckpointing | None:
    """Returns the plugin that a plan asks for, or None."""
    what = plan.activation_checkpointing
    return None if what is None else ActivationCheckpointing(what, **options)
