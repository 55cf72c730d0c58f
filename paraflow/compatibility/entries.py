"""The strategies and features of the table: what one writes for each, on four ranks or on one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paraflow.plan import DEGREES, Plan
from paraflow.plugins.base import Plugin
from paraflow.plugins.registry import plugins_of


@dataclass(frozen=True, eq=False)
class Entry:
    """A strategy or a feature.

    Attributes:
        name: What it is called in the table.
        fields: The plan's fields that ask for it.
        run: What kind of model or run it is about, where that is no field of a plan.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    run: str = "plain"

    @property
    def lays_out(self) -> bool:
        """Whether it says what each rank of a world is: two such strategies are two worlds, and no pair."""
        return any(name in (*DEGREES, "ep") for name in self.fields)

    @property
    def divides_layers(self) -> bool:
        """Whether ranks compute a layer together, or have layers of their own."""
        return not {"tp", "pp", "cp", "ep"}.isdisjoint(self.fields) or "split" in self.options

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of plugins among the fields."""
        options: Mapping[str, Any] = self.fields.get("options", {})
        return options

    @property
    def said(self) -> set[str]:
        """What it says: fields, and plugins that it gives options to."""
        return {name for name in self.fields if name != "options"} | {f"options of {name}" for name in self.options}

    @property
    def written(self) -> str:
        """The arguments of a Trainer that ask for it: options are those of a plugin."""
        made = {plugin.name: plugin for plugin in plugins_of(Plan.from_dict(self.fields))}
        asked = {name: _field_of(made[name], self.fields) for name in self.options}
        fields = [
            f"{name}={_plain(value)}" for name, value in self.fields.items() if name not in ("options", *asked.values())
        ]
        plugins = [
            _as_plugin(type(made[name]).__name__, self.fields.get(asked[name], True), options)
            for name, options in self.options.items()
        ]
        return ", ".join([*fields, *([f"plugins=[{', '.join(plugins)}]"] if plugins else [])])


def _field_of(plugin: Plugin, fields: Mapping[str, Any]) -> str:
    """The field that a plugin takes as its first argument; "" where it takes none."""
    return next((name for name in (plugin.name, *plugin.fields) if name in fields), "")


def _as_plugin(kind: str, value: Any, options: Mapping[str, Any]) -> str:
    first = [] if value is True else [_plain(value)]
    return f"{kind}({', '.join([*first, *(f'{option}={_plain(given)}' for option, given in options.items())])})"


def _plain(value: Any) -> str:
    return repr(list(value)) if isinstance(value, tuple) else repr(value)


BLOCKS = ("blocks.*",)

LAYOUTS: tuple[Entry, ...] = (
    Entry("one device"),
    Entry("dp 4", {"dp": 4}),
    Entry("fsdp 4, zero 1", {"fsdp": 4, "zero": 1}),
    Entry("fsdp 4, zero 2", {"fsdp": 4, "zero": 2}),
    Entry("fsdp 4, zero 3", {"fsdp": 4}),
    Entry("fsdp 4, reduced at the end", {"fsdp": 4, "options": {"fsdp": {"reduce": "last"}}}),
    Entry("dp 2 × fsdp 2", {"dp": 2, "fsdp": 2}),
    Entry(
        "fsdp 4, all that saves memory",
        {"fsdp": 4, "activation_checkpointing": "full", "cpu_offload": "optimizer", "apply_groups": 3},
    ),
    Entry(
        "dp 2 × fsdp 2, all that saves memory",
        {"dp": 2, "fsdp": 2, "activation_checkpointing": "selective", "cpu_offload": "params", "apply_groups": 3},
    ),
    Entry("tp 4", {"tp": 4}),
    Entry("tp 4, shares of the sequence", {"tp": 4, "options": {"tensor_parallel": {"sequence_parallel": True}}}),
    Entry("pp 4", {"pp": 4}),
    Entry(
        "pp 2, interleaved",
        {"pp": 2, "accumulate": 4, "options": {"pipeline": {"schedule": "interleaved", "chunks": 2}}},
    ),
    Entry("pp 2, no bubble", {"pp": 2, "accumulate": 4, "options": {"pipeline": {"schedule": "zbv", "chunks": 2}}}),
    Entry("dp 2 × tp 2", {"dp": 2, "tp": 2}),
    Entry("dp 2 × pp 2", {"dp": 2, "pp": 2}),
    Entry("fsdp 2 × tp 2", {"fsdp": 2, "tp": 2}),
    Entry("fsdp 2 × pp 2", {"fsdp": 2, "pp": 2}),
    Entry("fsdp 2 × pp 2, gathered anew", {"fsdp": 2, "pp": 2, "options": {"pipeline": {"reshard": True}}}),
    Entry("tp 2 × pp 2", {"tp": 2, "pp": 2}),
    Entry("dp 4, all but blocks split", {"dp": 4, "options": {"split": {"modules": ["[!b]*"]}}}),
    Entry("cp 4", {"cp": 4}),
    Entry("dp 4, ep 4", {"dp": 4, "ep": 4}),
)
"""How a model is laid out over ranks."""

MEMORY: tuple[Entry, ...] = (
    Entry("recompute full", {"activation_checkpointing": "full"}),
    Entry("recompute selective", {"activation_checkpointing": "selective"}),
    Entry("recompute auto", {"activation_checkpointing": "auto", "memory_budget": "1GiB"}),
    Entry("recompute by name", {"activation_checkpointing": BLOCKS}),
    Entry(
        "activations on the host",
        {"activation_checkpointing": "offload", "options": {"activation_checkpointing": {"offload_min_bytes": 0}}},
    ),
    Entry("optimizer on the host", {"cpu_offload": "optimizer"}),
    Entry("parameters on the host", {"cpu_offload": "params"}),
    Entry("0.4 of the bytes on the host", {"cpu_offload": 0.4}),
    Entry("blocks on the host", {"cpu_offload": BLOCKS}),
    Entry("apply in 3 groups", {"apply_groups": 3}),
    Entry("apply in backward", {"apply_groups": "backward"}),
)
"""What saves memory, in every layout."""

STRATEGIES: tuple[Entry, ...] = (*LAYOUTS, *MEMORY)
"""The columns of the table."""

FEATURES: tuple[Entry, ...] = (
    Entry("nothing else"),
    Entry("accumulation", {"accumulate": 2}),
    Entry("bf16", {"precision": "bf16"}),
    Entry("fp16", {"precision": "fp16", "options": {"precision": {"initial_scale": 1024.0}}}),
    Entry("gradients sent in bf16", {"comm_hook": "bf16"}),
    Entry("gradients sent in fp16", {"comm_hook": "fp16"}),
    Entry("clipping", {"clip_norm": 0.05}),
    Entry("fused optimizer", {"optimizer_implementation": "fused"}),
    Entry("foreach optimizer", {"optimizer_implementation": "foreach"}),
    Entry("for-loop optimizer", {"optimizer_implementation": "for-loop"}),
    Entry("torch.compile", {"compile": True, "options": {"compile": {"backend": "aot_eager"}}}),
    Entry("tied weights", run="tied"),
    Entry("frozen parameters", run="frozen"),
    Entry("dropout", run="dropout"),
    Entry("uneven last batch", run="uneven"),
    Entry("losses with counts", run="counted"),
    Entry("averaged weights (EMA)", run="ema"),
    Entry("evaluate and predict", run="evaluate"),
    Entry("resume from one device", run="resume"),
)
"""The rows of the table; strategies that are no layout are rows, too."""
