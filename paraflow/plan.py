"""The plan: the frozen description of how a run is laid out over devices.

Flags, plugins, a YAML file and ``auto`` all become one `Plan`; nothing that runs reads anything else.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from paraflow.errors import PlanError
from paraflow.plan_memory import require_memory_fields

Precision = Literal["fp32", "bf16", "fp16"]
OptimizerImplementation = Literal["default", "fused", "foreach", "for-loop"]

DEGREES: tuple[str, ...] = ("pp", "dp", "fsdp", "cp", "tp")
"""The mesh dimensions, outer to inner. Their degrees multiply to the world size; ``ep`` re-folds dp, fsdp and cp."""

DATA_DEGREES: tuple[str, ...] = ("dp", "fsdp")
"""The dimensions along which ranks see different samples."""

_CHOICES: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "bf16", "fp16"),
    "comm_hook": (None, "fp16", "bf16"),
    "optimizer_implementation": ("default", "fused", "foreach", "for-loop"),
    "zero": (1, 2, 3),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one run is laid out. Every value is decided; a plan is never changed, only replaced.

    Attributes:
        dp: Degree of data parallelism: replicas of the model.
        fsdp: Degree of sharded data parallelism.
        tp: Degree of tensor parallelism.
        pp: Degree of pipeline parallelism: stages.
        ep: Degree of expert parallelism; re-folds dp, fsdp and cp and adds no ranks.
        cp: Degree of context (sequence) parallelism.
        accumulate: Micro-batches a rank runs, one after another, for one optimizer step.
        precision: What matrix products are computed in; parameters and optimizer state stay fp32.
        comm_hook: What gradients are communicated in, or None for their own dtype.
        zero: What ``fsdp`` shards: 1 the optimizer's state, 2 gradients too, 3 parameters too.
        activation_checkpointing: What is recomputed in backward instead of kept: ``"full"`` (repeated blocks),
            ``"selective"`` (what is cheap in them), ``"offload"`` (nothing; it waits on the host), ``"auto"`` (what
            meets the memory budget in the least time), or patterns of module names.
        memory_budget: Bytes that one rank may use, such as ``"6GiB"``; None is what its device has.
        cpu_offload: What lives on the host instead of the device, and is applied there: ``"optimizer"`` (its state and
            master weights), ``"params"`` (weights too), a fraction of the bytes, or patterns of module names.
        apply_groups: Groups in which the optimizer is applied, one after another; ``"backward"`` applies each parameter
            as soon as it has its gradient.
        compile: Whether the model goes through `torch.compile`.
        clip_norm: Bound on the global gradient norm; ``inf`` measures and never clips.
        optimizer_implementation: Which of torch's implementations of the optimizer is used.
        options: Further arguments of plugins, by plugin name.

    Example:
        >>> plan = Plan(dp=4, accumulate=2, precision="bf16")
        >>> plan.world_size, plan.data_ranks
        (4, 4)
        >>> Plan.from_dict({"precison": "bf16"})
        Traceback (most recent call last):
        paraflow.errors.PlanError: A plan has no field 'precison'; did you mean 'precision'? The fields are: dp, ...
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    accumulate: int = 1
    precision: Precision = "fp32"
    comm_hook: Literal["fp16", "bf16"] | None = None
    zero: Literal[1, 2, 3] = 3
    activation_checkpointing: str | tuple[str, ...] | None = None
    memory_budget: str | int | None = None
    cpu_offload: str | float | tuple[str, ...] | None = None
    apply_groups: int | Literal["backward"] = 1
    compile: bool = False
    clip_norm: float | None = None
    optimizer_implementation: OptimizerImplementation = "default"
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (*DEGREES, "ep", "accumulate"):
            _require_positive_int(name, getattr(self, name))
        for name, choices in _CHOICES.items():
            _require_choice(name, getattr(self, name), choices)
        if not isinstance(self.compile, bool):
            raise PlanError(f"compile must be True or False, not {self.compile!r}.")
        if self.clip_norm is not None and not (_is_number(self.clip_norm) and self.clip_norm > 0):
            raise PlanError(
                f"clip_norm must be a number above 0, or None for no clipping, not {self.clip_norm!r}. "
                "To measure the norm and never clip, write clip_norm=float('inf')."
            )
        require_memory_fields(self)
        _require_options(self.options)

    @property
    def world_size(self) -> int:
        """The number of ranks the plan needs: the product of its degrees."""
        return math.prod(getattr(self, name) for name in DEGREES)

    @property
    def offloads_parameters(self) -> bool:
        """Whether some of the parameters live on the host, not only the optimizer's state."""
        return self.cpu_offload not in (None, "optimizer")

    @property
    def data_ranks(self) -> int:
        """The number of ranks (or groups of ranks) that see different samples."""
        return math.prod(getattr(self, name) for name in DATA_DEGREES)

    def with_fields(self, **changes: Any) -> Plan:
        """Returns a plan that differs in the given fields.

        Raises:
            PlanError: A field does not exist, or its value is not of its kind.
        """
        _require_known_fields(changes)
        return replace(self, **changes)

    def changed(self) -> dict[str, Any]:
        """Returns the fields that differ from a plan for one device, in order of declaration."""
        plain = Plan()
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """Builds a plan from names and values.

        Raises:
            PlanError: A name is no field of a plan, or a value is not of its kind.
        """
        _require_known_fields(values)
        lists_as_tuples: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**lists_as_tuples)

    def to_dict(self) -> dict[str, Any]:
        """Returns every field as plain data that JSON and YAML can hold."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["options"] = {name: dict(arguments) for name, arguments in self.options.items()}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_yaml(cls, path: str | Path) -> Plan:
        """Reads a plan from a YAML file.

        Raises:
            PlanError: The file is missing, is no mapping, or names an unknown field.
        """
        return cls.from_dict(read_fields(path))

    def to_yaml(self, path: str | Path) -> None:
        """Writes the fields that differ from one device to a YAML file."""
        import yaml

        changed = {name: value for name, value in self.to_dict().items() if name in self.changed()}
        Path(path).write_text(yaml.safe_dump(changed, sort_keys=False), encoding="utf-8")

    def __str__(self) -> str:
        """One line: the fields that differ from one device."""
        changed = {k: v for k, v in self.changed().items() if k != "options"}
        return ", ".join(f"{name}={value}" for name, value in changed.items()) or "one device"


PLAN_FIELDS: tuple[str, ...] = tuple(f.name for f in fields(Plan))
"""The names of a plan's fields."""


def read_fields(path: str | Path) -> dict[str, Any]:
    """Reads the fields that a YAML plan names, and only those.

    Raises:
        PlanError: The file cannot be read, or does not hold a mapping of known fields.
    """
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"The plan {str(path)!r} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"The plan {str(path)!r} is not text in UTF-8: {error}.") from error
    except yaml.YAMLError as error:
        raise PlanError(f"The plan {str(path)!r} is not YAML: {error}.") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise PlanError(f"The plan {str(path)!r} must hold 'field: value' lines, not a {type(values).__name__}.")
    _require_known_fields(values)
    return values


def merge_fields(sources: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Joins what several places say of one plan.

    Args:
        sources: Pairs of where it is said (for the error) and the fields said there.

    Returns:
        Every field that was said anywhere.

    Raises:
        PlanError: Two places say different things of one field.

    Example:
        >>> merge_fields([("the flags", {"dp": 2}), ("the file", {"precision": "bf16"})])
        {'dp': 2, 'precision': 'bf16'}
    """
    merged: dict[tuple[str, ...], Any] = {}
    said_by: dict[tuple[str, ...], str] = {}
    for place, values in sources:
        _require_known_fields(values)
        for name, value in values.items():
            for part, said in _parts(name, value):
                _put(merged, part, said, said_by, place)
    return _whole(merged)


def _parts(name: str, value: Any) -> list[tuple[tuple[str, ...], Any]]:
    """What is said once: a field, or one plugin's options."""
    if name != "options":
        return [((name,), tuple(value) if isinstance(value, list) else value)]
    _require_options(value)
    return [((name, plugin), options) for plugin, options in value.items()]


def _put(
    merged: dict[tuple[str, ...], Any],
    part: tuple[str, ...],
    value: Any,
    said_by: dict[tuple[str, ...], str],
    place: str,
) -> None:
    if part in merged and merged[part] != value:
        name = " of ".join(part)
        raise PlanError(f"{name} is {merged[part]!r} by {said_by[part]} and {value!r} by {place}. Say it in one place.")
    merged[part] = value
    said_by[part] = place


def _whole(merged: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    options = {part[1]: value for part, value in merged.items() if len(part) > 1}
    fields_said = {part[0]: value for part, value in merged.items() if len(part) == 1}
    return {**fields_said, "options": options} if options else fields_said


def _require_known_fields(names: Iterable[str]) -> None:
    for name in names:
        if name in PLAN_FIELDS:
            continue
        close = difflib.get_close_matches(str(name), PLAN_FIELDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise PlanError(f"A plan has no field {name!r}{hint} The fields are: {', '.join(PLAN_FIELDS)}.")


def _require_options(options: object) -> None:
    if not isinstance(options, Mapping) or not all(isinstance(value, Mapping) for value in options.values()):
        raise PlanError(f"options must map a plugin's name to its arguments, not {options!r}.")


def _require_positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name} must be a whole number of at least 1, not {value!r}.")


def _require_choice(name: str, value: object, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise PlanError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
