from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from paraflow.errors import PlanError
from paraflow.plan import Plan, merge_fields, read_fields
from paraflow.plugins import DataParallel, Plugin, Precision
from paraflow.resolve import Request, resolve

CPU = torch.device("cpu")


def test_a_plan_says_how_many_ranks_it_needs() -> None:
    plan = Plan(pp=2, dp=3, fsdp=2, cp=2, tp=4, ep=6)
    assert plan.world_size == 2 * 3 * 2 * 2 * 4
    assert plan.data_ranks == 6
    assert Plan().world_size == Plan().data_ranks == 1


def test_a_plan_is_frozen_and_replaced() -> None:
    plan = Plan(dp=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.dp = 3  # type: ignore[misc]
    assert plan.with_fields(dp=3, precision="bf16") == Plan(dp=3, precision="bf16")
    assert plan == Plan(dp=2)


def test_a_plan_prints_what_differs_from_one_device() -> None:
    assert str(Plan()) == "one device"
    assert str(Plan(dp=4, precision="bf16", clip_norm=1.0)) == "dp=4, precision=bf16, clip_norm=1.0"
    assert Plan(accumulate=2, compile=True).changed() == {"accumulate": 2, "compile": True}


@pytest.mark.parametrize(
    "make", [Plan.from_dict, lambda d: Plan().with_fields(**d), lambda d: merge_fields([("the flags", d)])]
)
@pytest.mark.parametrize(
    ("name", "hint"), [("precison", "precision"), ("accumulation", "accumulate"), ("clipnorm", "clip_norm")]
)
def test_an_unknown_field_is_refused_with_a_hint(make: Any, name: str, hint: str) -> None:
    with pytest.raises(PlanError, match=rf"no field '{name}'; did you mean '{hint}'\?.*dp, fsdp, tp"):
        make({name: 1})


def test_an_unknown_field_like_no_other_has_no_hint() -> None:
    with pytest.raises(PlanError, match=r"no field 'zzz'\. The fields are"):
        Plan.from_dict({"zzz": 1})


@pytest.mark.parametrize("name", ["dp", "fsdp", "tp", "pp", "ep", "cp", "accumulate", "apply_groups"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True, None])
def test_degrees_are_whole_numbers(name: str, value: object) -> None:
    with pytest.raises(PlanError, match=rf"{name} must be a whole number of at least 1, "):
        Plan.from_dict({name: value})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"zero": 4}, r"zero must be one of 1, 2, 3, not 4"),
        ({"activation_checkpointing": "some"}, r"must be one of 'full', .*, or a list of patterns .* not 'some'"),
        ({"activation_checkpointing": []}, r"activation_checkpointing must be .* not \(\)"),
        ({"memory_budget": "6 apples"}, r"memory_budget must be a number of bytes or a size such as '6GiB'.* not '6 a"),
        ({"memory_budget": 0}, r"memory_budget must be .* not 0"),
        ({"cpu_offload": "half"}, r"cpu_offload must be 'optimizer', 'params', a fraction .* not 'half'"),
        ({"cpu_offload": 1.5}, r"cpu_offload must be .* not 1\.5"),
        ({"cpu_offload": True}, r"cpu_offload must be .* not True"),
        ({"precision": "int8"}, r"precision must be one of 'fp32', 'bf16', 'fp16', not 'int8'"),
        ({"precision": ["bf16"]}, r"precision must be one of .* not"),
        ({"comm_hook": "fp8"}, r"comm_hook must be one of None, 'fp16', 'bf16', not 'fp8'"),
        ({"optimizer_implementation": "quick"}, r"one of 'default', 'fused', 'foreach', 'for-loop', not 'quick'"),
        ({"compile": 1}, r"compile must be True or False, not 1"),
        ({"compile": "yes"}, r"compile must be True or False, not 'yes'"),
        ({"clip_norm": 0}, r"clip_norm must be a number above 0.* not 0.*float\('inf'\)"),
        ({"clip_norm": -1.0}, r"clip_norm must be a number above 0"),
        ({"clip_norm": float("nan")}, r"clip_norm must be a number above 0"),
        ({"clip_norm": True}, r"clip_norm must be a number above 0"),
        ({"clip_norm": "1"}, r"clip_norm must be a number above 0"),
        ({"options": 3}, r"options must map a plugin's name to its arguments, not 3"),
        ({"options": {"precision": 3}}, r"options must map a plugin's name to its arguments"),
    ],
)
def test_wrong_values_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        Plan.from_dict(fields)


PLANS = [
    Plan(),
    Plan(dp=4, accumulate=2, precision="bf16", comm_hook="fp16", compile=True, clip_norm=0.5),
    Plan(clip_norm=float("inf"), optimizer_implementation="for-loop"),
    Plan(activation_checkpointing=("block", "head"), cpu_offload="optimizer", apply_groups=3),
    Plan(
        fsdp=2, zero=1, memory_budget="6GiB", activation_checkpointing="auto", cpu_offload=0.4, apply_groups="backward"
    ),
    Plan(precision="fp16", options={"precision": {"initial_scale": 1024.0}, "data_parallel": {"static_graph": True}}),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_yaml_round_trip(plan: Plan, tmp_path: Path) -> None:
    plan.to_yaml(tmp_path / "plan.yaml")
    assert Plan.from_yaml(tmp_path / "plan.yaml") == plan
    assert Plan.from_yaml(str(tmp_path / "plan.yaml")) == plan
    assert Plan.from_dict(plan.to_dict()) == plan


def test_yaml_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    Plan(dp=2, precision="bf16").to_yaml(path)
    assert path.read_text() == "dp: 2\nprecision: bf16\n"
    path.write_text("# by hand\naccumulate: 4\nclip_norm: 1.0\n")
    assert Plan.from_yaml(path) == Plan(accumulate=4, clip_norm=1.0)
    path.write_text("")
    assert Plan.from_yaml(path) == Plan()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"dp: [1", r"plan\.yaml' is not YAML"),
        (b"- dp\n- tp\n", r"plan\.yaml' must hold 'field: value' lines, not a list"),
        (b"dp\n", r"must hold 'field: value' lines, not a str"),
        (b"accumulat: 2\n", r"no field 'accumulat'; did you mean 'accumulate'"),
        (b"2: 2\n", r"no field 2"),
        (b"dp: two\n", r"dp must be a whole number of at least 1, not 'two'"),
        (b"dp:\n", r"dp must be a whole number of at least 1, not None"),
        (b"options: 3\n", r"options must map"),
        (b"\xff\xfe\x00\x9f", r"plan\.yaml'"),
    ],
)
@pytest.mark.parametrize("reads", [Plan.from_yaml, lambda path: Request(plan=path)])
def test_bad_yaml_is_refused(content: bytes, sentence: str, reads: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=sentence):
        reads(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.yaml' cannot be read: No such file"):
        read_fields(tmp_path / "none.yaml")


def test_merging_joins_what_is_said_in_several_places() -> None:
    said = [
        ("the flags", {"dp": 2, "options": {"data_parallel": {"static_graph": True}}}),
        ("the file", {"dp": 2, "precision": "fp16", "options": {"precision": {"initial_scale": 8.0}}}),
    ]
    assert merge_fields(said) == {
        "dp": 2,
        "precision": "fp16",
        "options": {"data_parallel": {"static_graph": True}, "precision": {"initial_scale": 8.0}},
    }


def test_contradictions_are_refused() -> None:
    with pytest.raises(PlanError, match=r"dp is 2 by the flags and 4 by the file\. Say it in one place"):
        merge_fields([("the flags", {"dp": 2}), ("the file", {"dp": 4})])
    options = [{"precision": {"initial_scale": scale}} for scale in (8.0, 16.0)]
    with pytest.raises(PlanError, match=r"precision.*the flags.*the file"):
        merge_fields([("the flags", {"options": options[0]}), ("the file", {"options": options[1]})])


def test_a_list_and_a_tuple_say_the_same() -> None:
    said: list[tuple[str, dict[str, Any]]] = [
        ("the flags", {"activation_checkpointing": ("block",)}),
        ("the file", {"activation_checkpointing": ["block"]}),
    ]
    assert Plan.from_dict(merge_fields(said)) == Plan(activation_checkpointing=("block",))


def test_flags_plugins_and_files_are_one_request(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("precision: bf16\n")
    plugins = [DataParallel(2)]
    assert Request(flags={"accumulate": 3}, plugins=plugins, plan=path).fields() == {
        "accumulate": 3,
        "dp": 2,
        "precision": "bf16",
    }
    with pytest.raises(PlanError, match=r"precision is 'fp16' by the Trainer's arguments and 'bf16' by the plan"):
        Request(flags={"precision": "fp16"}, plan=path)
    with pytest.raises(PlanError, match=r"dp is 4 by the Trainer's arguments and 2 by the plugin 'data_parallel'"):
        Request(flags={"dp": 4}, plugins=plugins)
    with pytest.raises(PlanError, match=r"precision is 'fp16' by the plugin 'precision' and 'bf16' by the plan"):
        Request(plugins=[Precision("fp16")], plan=Plan(precision="bf16"))
    with pytest.raises(PlanError, match=r"auto must be 'O1' or None, not 'O2'"):
        Request(auto="O2")


@pytest.mark.parametrize(
    ("world", "flags", "dp"), [(1, {}, 1), (4, {}, 4), (4, {"dp": 4}, 4), (3, {"accumulate": 2}, 3)]
)
def test_data_parallelism_fills_the_world(
    monkeypatch: pytest.MonkeyPatch, world: int, flags: dict[str, Any], dp: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    for auto in (None, "O1"):
        assert resolve(Request(flags=flags, auto=auto), CPU, 12).plan.dp == dp


def test_a_degree_that_does_not_fill_the_world_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    for auto in (None, "O1"):
        with pytest.raises(
            PlanError, match=r"\[degrees-fill-world\].*dp=3.*3 ranks.*the world has 4.*Write dp=4"
        ) as caught:
            resolve(Request(flags={"dp": 3}, auto=auto), CPU, 12)
        assert caught.value.rule == "degrees-fill-world"
    with pytest.raises(PlanError, match=r"batch of 3 cannot be divided over 4 data ranks"):
        resolve(Request(), CPU, 3)


class Shards(Plugin):
    """A strategy the package does not know, over two ranks."""

    name = "shards"

    @property
    def fields(self) -> dict[str, Any]:
        return {"fsdp": 2}


def test_data_parallelism_fills_what_other_degrees_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    for auto in (None, "O1"):
        plan = resolve(Request(plugins=[Shards()], auto=auto), CPU, 12).plan
        assert (plan.fsdp, plan.dp, plan.data_ranks) == (2, 3, 6)
    monkeypatch.setenv("WORLD_SIZE", "5")
    for auto in (None, "O1"):
        with pytest.raises(
            PlanError, match=r"\[degrees-divide-world\] One replica of the model takes 2 ranks.*world of 5"
        ):
            resolve(Request(plugins=[Shards()], auto=auto), CPU, 12)


def test_auto_fills_only_what_was_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    resolved = resolve(Request(auto="O1"), CPU, 8)
    chosen = {choice.field: choice.value for choice in resolved.choices}
    assert chosen == {"dp": 2, "precision": "fp32", "optimizer_implementation": "fused"}
    assert all(choice.reason for choice in resolved.choices)
    assert resolved.plan == Plan(dp=2, optimizer_implementation="fused")
    path = tmp_path / "plan.yaml"
    path.write_text("precision: bf16\noptimizer_implementation: default\n")
    for request in (
        Request(flags={"precision": "bf16", "optimizer_implementation": "default"}, auto="O1"),
        Request(plan=path, auto="O1"),
    ):
        resolved = resolve(request, CPU, 8)
        assert resolved.plan == Plan(dp=2, precision="bf16")
        assert [choice.field for choice in resolved.choices] == ["dp"]


def test_plugins_are_in_the_order_of_their_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = {"clip_norm": 1.0, "precision": "bf16", "accumulate": 2, "dp": 2}
    names = [plugin.name for plugin in resolve(Request(flags=flags), CPU, 8).plugins]
    assert names.index("precision") < names.index("data_parallel") < names.index("clipping")


def test_what_is_no_plugin_is_refused() -> None:
    for plugin, sentence in ((DataParallel, r"class DataParallel; give an instance"), ("fsdp", r"not 'fsdp'")):
        with pytest.raises(PlanError, match=sentence):
            resolve(Request(plugins=[plugin]), CPU, 8)  # type: ignore[list-item]
    with pytest.raises(PlanError, match=r"options for a plugin 'fdsp'; the plugins are"):
        resolve(Request(plan=Plan(options={"fdsp": {}})), CPU, 8)
    with pytest.raises(PlanError, match=r"plugin 'precision' does not take the options.*scale"):
        resolve(Request(plan=Plan(precision="fp16", options={"precision": {"scale": 2}})), CPU, 8)
