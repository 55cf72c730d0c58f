"""What the last stage has computed, given to all stages: the loop sees the same numbers on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paraflow.collectives import broadcast
from paraflow.data.batch import children
from paraflow.errors import ModelError
from paraflow.loss import StepOutput
from paraflow.mesh import Mesh
from paraflow.normaliser import stack_numbers, sum_dtype
from paraflow.pipelining.values import rebuilt, tensors_in

_BUCKET_BYTES = 25 * 2**20
_DIMENSIONS = 16
_TYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_OTHER_FORM = (
    "A step returned other things than when it was traced on a micro-batch of the same shapes: more or fewer tensors, "
    "or numbers and texts of its own. Only the last stage of the pipeline knows of it. Return the same structure "
    "whatever the values of a batch, and tensors in it where values differ."
)


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
            ModelError: A step's result is of another form than its trace, on whichever rank that is.
        """
        keys = [list(form.values) for form in expected]
        rows = [2 + len(names) for names in keys]
        kept = [(form.output, form.target) if keep_outputs else () for form in expected]
        given = None
        wrong = ""
        if outputs is not None:
            given = [(one.output, one.target) if keep_outputs else () for one in outputs]
            wrong = next(filter(None, map(_wrong_scalars, expected, outputs)), "")
        kept = self._shaped(kept, given, wrong)
        if outputs is not None:
            numbers = stack_numbers(
                [n for o, names in zip(outputs, keys, strict=True) for n in (o.loss, o.weight, *_of(o, names))],
                self.mesh.device,
            )
        else:
            numbers = torch.zeros(sum(rows), dtype=sum_dtype(self.mesh.device), device=self.mesh.device)
        dist.broadcast(numbers, self._source, group=self.mesh.group("pp"))
        shared = [_rebuilt(form, row) for form, row in zip(expected, torch.split(numbers, rows), strict=True)]
        if keep_outputs:
            self._give(kept)
            for mine, (output, target) in zip(shared, kept, strict=True):
                mine.output, mine.target = output, target
        return shared

    def tensors(self, expected: Any, value: Any = None) -> Any:
        """Returns what the last stage has: a collective.

        Args:
            expected: A structure of tensors like it, which may be written to; sizes and types may differ.
            value: What the last stage has; looked at there only.

        Raises:
            ModelError: It is of another form, on whichever rank that is.
        """
        value = self._shaped(expected, value if self.is_source else None)
        self._give(value)
        return value

    def _give(self, value: Any) -> None:
        found = tensors_in(value)
        if found:
            broadcast(found, self.mesh.group("pp"), _BUCKET_BYTES, source=self._source)

    def _shaped(self, expected: Any, value: Any, wrong: str = "") -> Any:
        """Returns the value where it is, and elsewhere what is expected in the shapes and types that the value has.

        They depend on the batch where a step picks positions by it, and only the last stage knows them. The host alone
        is asked, so that no rank waits for a device.
        """
        stands = tensors_in(expected)
        said = torch.zeros(1 + len(stands) * (2 + _DIMENSIONS), dtype=torch.int64)
        if self.is_source:
            wrong = wrong or ("" if _is_alike(expected, value) else _OTHER_FORM)
            if not wrong:
                said[:] = torch.tensor([1, *(n for tensor in tensors_in(value) for n in _described(tensor))])
        group = self.mesh.group("pp")
        dist.broadcast(said, self._source, group=group)
        if not said[0]:
            texts = [wrong]
            dist.broadcast_object_list(texts, self._source, group=group, device=torch.device("cpu"))
            raise ModelError(texts[0])
        if self.is_source:
            return value
        rows = iter(said[1:].view(-1, 2 + _DIMENSIONS).tolist())
        return rebuilt(expected, lambda stand: _like(stand, next(rows)))

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


def _wrong_scalars(form: StepOutput, output: StepOutput) -> str:
    expected, given = (form.counted, list(form.values)), (output.counted, list(output.values))
    if expected == given:
        return ""
    return (
        f"A step returned scalars {given[1]} {_with(given[0])} a weight, and {expected[1]} {_with(expected[0])} "
        "one when it was traced on a micro-batch of the same shapes. Other stages of the pipeline cannot know of "
        "it: return the same keys whatever the values of a batch."
    )


def _with(weight: bool) -> str:
    return "with" if weight else "without"


def _is_alike(expected: Any, value: Any) -> bool:
    """Whether a value differs in its tensors only from what is expected, and each of these has few dimensions."""
    there = tensors_in(value)
    if len(there) != len(tensors_in(expected)) or any(tensor.dim() > _DIMENSIONS for tensor in there):
        return False
    if isinstance(expected, torch.Tensor) or isinstance(value, torch.Tensor):
        return isinstance(expected, torch.Tensor) and isinstance(value, torch.Tensor)
    if type(expected) is not type(value):
        return False
    if isinstance(expected, Mapping) and list(expected) != list(value):
        return False
    if isinstance(expected, (Mapping, tuple, list)):
        pairs = zip(children(expected), children(value), strict=False)
        return len(expected) == len(value) and all(_is_alike(one, other) for one, other in pairs)
    return not isinstance(expected, (str, bool, int, float)) or expected == value or value != value


def _described(tensor: torch.Tensor) -> list[int]:
    return [_TYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *[0] * (_DIMENSIONS - tensor.dim())]


def _like(stand: torch.Tensor, described: Sequence[int]) -> torch.Tensor:
    """A tensor of the shape and type that were described, which the stand may be already."""
    dtype, shape = _TYPES[described[0]], torch.Size(described[2 : 2 + described[1]])
    if stand.shape == shape and stand.dtype == dtype:
        return stand
    return torch.empty(shape, dtype=dtype, device=stand.device)
