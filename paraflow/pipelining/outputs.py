"""What the last stage has computed, given to all stages: the loop sees the same numbers on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paraflow.collectives import broadcast
from paraflow.errors import ModelError
from paraflow.loss import StepOutput
from paraflow.mesh import Mesh
from paraflow.normaliser import stack_numbers, sum_dtype
from paraflow.pipelining.values import tensors_in

_BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Sharing:
    """Gives all ranks along ``pp`` what the one with the last stage has.

    Attributes:
        mesh: The ranks.
        place: The place along ``pp`` of the last stage.
    """

    mesh: Mesh
    place: int

    @property
    def is_source(self) -> bool:
        """Whether this rank has the last stage."""
        return self.mesh.coordinate("pp") == self.place

    def step_outputs(
        self, expected: Sequence[StepOutput], outputs: Sequence[StepOutput] | None, *, keep_outputs: bool
    ) -> list[StepOutput]:
        """Returns what each micro-batch gave: a collective along ``pp``.

        Numbers go in one message, float64; what metrics compare goes with them only where it is kept.

        Args:
            expected: The form of what each micro-batch gives, from its trace; its tensors may be written to.
            outputs: What each gave, graphs already released; None on a rank without the last stage.
            keep_outputs: Whether outputs and targets are kept for metrics.

        Raises:
            ModelError: A step's result is of another form than its trace.
        """
        keys = [list(form.values) for form in expected]
        rows = [2 + len(names) for names in keys]
        if outputs is not None:
            for form, output in zip(expected, outputs, strict=True):
                _require_form(form, output)
            numbers = stack_numbers(
                [n for o, names in zip(outputs, keys, strict=True) for n in (o.loss, o.weight, *_of(o, names))],
                self.mesh.device,
            )
        else:
            numbers = torch.zeros(sum(rows), dtype=sum_dtype(self.mesh.device), device=self.mesh.device)
        dist.broadcast(numbers, self._source, group=self.mesh.group("pp"))
        shared = [_rebuilt(form, row) for form, row in zip(expected, torch.split(numbers, rows), strict=True)]
        if keep_outputs:
            held = expected if outputs is None else outputs
            self.tensors([(one.output, one.target) for one in held])
            for mine, one in zip(shared, held, strict=True):
                mine.output, mine.target = one.output, one.target
        return shared

    def tensors(self, value: Any) -> Any:
        """Returns what the last stage has, in place of a structure of tensors that are like its own: a collective."""
        found = tensors_in(value)
        if found:
            broadcast(found, self.mesh.group("pp"), _BUCKET_BYTES, source=self._source)
        return value

    @property
    def _source(self) -> int:
        return self.mesh.peer("pp", self.place)


def _of(output: StepOutput, names: Sequence[str]) -> list[torch.Tensor]:
    return [output.values[name] for name in names]


def _rebuilt(form: StepOutput, row: torch.Tensor) -> StepOutput:
    """A micro-batch's output from its numbers; the samples that a loss is over every rank knows."""
    loss, weight, *values = row.unbind()
    return StepOutput(
        loss.to(form.loss.dtype),
        weight if form.counted else form.weight,
        form.counted,
        values={name: value.to(old.dtype) for (name, old), value in zip(form.values.items(), values, strict=True)},
    )


def _require_form(form: StepOutput, output: StepOutput) -> None:
    expected, given = (form.counted, list(form.values)), (output.counted, list(output.values))
    if expected != given:
        raise ModelError(
            f"A step returned scalars {given[1]} {_with(given[0])} a weight, and {expected[1]} {_with(expected[0])} "
            "one when it was traced on a micro-batch of the same shapes. Other stages of the pipeline cannot know of "
            "it: return the same keys whatever the values of a batch."
        )


def _with(weight: bool) -> str:
    return "with" if weight else "without"
