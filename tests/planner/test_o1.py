"""What `auto="O1"` fills in, and why."""

from __future__ import annotations

import pytest

from paraflow.planner import Footprint, Machine, choose, choose_accumulation

GIB = 1024**3


def machine(device: str = "cuda", bf16: bool = True, world_size: int = 8) -> Machine:
    return Machine(world_size=world_size, device=device, bf16=bf16, fused_optimizers=device in ("cpu", "cuda"))


@pytest.mark.parametrize(
    ("device", "bf16", "precision", "optimizer"),
    [("cuda", True, "bf16", "fused"), ("cuda", False, "fp16", "fused"), ("cpu", False, "fp32", "fused")]
    + [("mps", False, "fp32", "default")],
)
def test_precision_and_optimizer_follow_the_device(device: str, bf16: bool, precision: str, optimizer: str) -> None:
    chosen = {choice.field: choice.value for choice in choose(machine(device, bf16), {})}
    assert chosen == {"dp": 8, "precision": precision, "optimizer_implementation": optimizer}


def test_what_was_said_is_left_alone() -> None:
    assert [choice.field for choice in choose(machine(), {"dp": 2, "precision": "fp32"})] == [
        "optimizer_implementation"
    ]


def test_data_parallelism_takes_what_other_degrees_leave() -> None:
    assert choose(machine(), {"tp": 2, "pp": 2})[0].value == 2
    assert choose(machine(world_size=1), {})[0].value == 1


def test_every_choice_has_a_reason() -> None:
    assert all(len(choice.reason) > 10 for choice in choose(machine(), {}))


@pytest.mark.parametrize(
    ("activations", "share", "steps"),
    [
        (1024**2, 64, 1),  # 64 MiB of 6.4 GiB
        (100 * 1024**2, 64, 1),  # 65 samples fit
        (100 * 1024**2, 66, 2),
        (GIB, 64, 11),  # 6 fit: 64 / 6
        (10 * GIB, 64, 64),  # not even one fits by the estimate: one at a time is the best there is
    ],
)
def test_micro_batches_fit_in_four_fifths_of_free_memory(activations: int, share: int, steps: int) -> None:
    choice = choose_accumulation(Footprint(parameters=0, activations=activations, free=8 * GIB), share)
    assert choice.value == steps


def test_the_model_itself_takes_room() -> None:
    """A hundred million parameters with gradient and Adam's moments in fp32 are 1.6 GB."""
    small = choose_accumulation(Footprint(parameters=0, activations=GIB // 4, free=4 * GIB), share=12)
    large = choose_accumulation(Footprint(parameters=10**8, activations=GIB // 4, free=4 * GIB), share=12)
    assert (small.value, large.value) == (1, 2)
    assert "6 of 12 samples" in large.reason
