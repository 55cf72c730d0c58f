"""The cut: within the budget, the fastest there is, and a sentence where there is none."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from paraflow.planner.recomputation import (
    BlockProfile,
    Costs,
    Operation,
    Profile,
    Treatment,
    choose,
    model_state_bytes,
)
from paraflow.planner.treatments import Option, options

FREE = Costs(block=0.0, operation=0.0, bytes=0)


def random_block(draw: random.Random, name: str) -> BlockProfile:
    kept = draw.randrange(10, 100)
    calls = tuple(
        Operation(f"aten.op{draw.randrange(2)}.default", place, draw.random(), draw.randrange(1, 30), draw.randrange(2))
        for place in range(2)
    )
    seconds = sum(call.seconds for call in calls)
    return BlockProfile(
        name,
        kept=kept,
        input=draw.randrange(1, 10),
        whole=kept + draw.randrange(5, 40),
        seconds=seconds,
        again=seconds,
        operations=calls,
    )


def random_profile(draw: random.Random, blocks: int) -> Profile:
    parts = [BlockProfile("", kept=draw.randrange(10), whole=draw.randrange(10, 20))]
    for place in range(blocks):
        parts.append(random_block(draw, str(place)))
        if draw.random() < 0.3:
            parts.append(BlockProfile("", kept=draw.randrange(30), whole=draw.randrange(30, 60)))
    return Profile(tuple(parts), sum(part.seconds for part in parts))


def peak_of(chosen: tuple[Option, ...]) -> int:
    """By its definition: what the parts before hold, and what one needs at once."""
    peaks = []
    for place, option in enumerate(chosen):
        peaks.append(sum(before.held for before in chosen[:place]) + max(option.whole, option.held))
    return max(peaks)


@pytest.mark.parametrize("seed", range(25))
def test_nothing_within_the_budget_is_faster(seed: int) -> None:
    draw = random.Random(seed)
    profile = random_profile(draw, blocks=draw.randrange(1, 7))
    ways = [options(part, FREE) for part in profile.parts]
    every = [(peak_of(chosen), sum(o.added for o in chosen)) for chosen in itertools.product(*ways)]
    smallest, largest = min(peak for peak, _ in every), max(peak for peak, _ in every)
    for budget in (smallest - 1, smallest, *(draw.randint(smallest, largest) for _ in range(4))):
        cut = choose(profile, budget, costs=FREE)
        assert cut.smallest == smallest
        assert (cut.unmet is None) == (budget >= smallest)
        if cut.unmet is None:
            assert cut.peak <= budget
            assert math.isclose(cut.added, min(added for peak, added in every if peak <= budget), abs_tol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_more_memory_is_never_slower(seed: int) -> None:
    profile = random_profile(random.Random(seed), blocks=20)
    least = choose(profile, 1).smallest
    most = choose(profile, 10**9)
    added = [choose(profile, least + step * (most.peak - least) // 12).added for step in range(13)]
    assert added == sorted(added, reverse=True)
    assert most.added == added[-1] == 0
    assert {treatment.kind for treatment in most.treatments.values()} == {"keep"}


@pytest.mark.parametrize("count", [4, 9, 25])
def test_keeping_every_root_nth_block_is_never_better(count: int) -> None:
    profile = random_profile(random.Random(count), count)
    root, places = math.isqrt(count), itertools.count()
    ruled = []
    for part in profile.parts:
        kept = not part.is_block or next(places) % root == 0
        if kept:
            ruled.append(Option(Treatment("keep"), part.kept, part.whole, 0.0))
        else:
            ruled.append(Option(Treatment("recompute"), part.input, part.whole, part.again))
    cut = choose(profile, peak_of(tuple(ruled)), costs=FREE)
    assert cut.unmet is None
    assert cut.added <= sum(option.added for option in ruled) + 1e-9


def test_two_hundred_blocks_with_ten_ways_each_stay_exact_enough() -> None:
    """Where ways are merged, what is lost is little, and never the budget."""
    draw = random.Random(0)
    blocks = tuple(random_block(draw, str(place)) for place in range(200))
    profile = Profile(blocks, sum(block.seconds for block in blocks))
    least, most = choose(profile, 1).smallest, choose(profile, 10**9).peak
    budget = (least + most) // 2
    cut = choose(profile, budget, costs=FREE)
    assert cut.unmet is None
    assert cut.peak <= budget
    assert cut.added <= _greedy(blocks, budget)


def _greedy(blocks: tuple[BlockProfile, ...], budget: int) -> float:
    """A rule of thumb that meets the budget: whole blocks recomputed, the cheapest for a byte first."""
    room = max(block.whole for block in blocks)
    held, added = sum(block.kept for block in blocks), 0.0
    for block in sorted(blocks, key=lambda block: block.again / max(1, block.kept - block.input)):
        if held + room <= budget:
            break
        held, added = held - block.kept + block.input, added + block.again
    return added


def test_a_budget_that_cannot_be_met_says_by_how_much_and_what_would() -> None:
    block = BlockProfile("0", kept=4 * 2**20, input=2**20, whole=4 * 2**20, seconds=1.0, again=1.0)
    profile = Profile((block,), 1.0)
    unmet = choose(profile, 2 * 2**20 + 500, costs=FREE, model_state=500).unmet
    assert unmet == (
        "The budget of 2.0 MiB cannot be met: where each block holds the least, the model's state takes 500 B and the "
        "activations of a micro-batch take 4.0 MiB, which is 2.0 MiB too much. Write memory_budget=4194804 or more."
    )
    assert choose(profile, 4194804, costs=FREE, model_state=500).unmet is None


def test_the_peak_may_be_that_of_the_optimizer() -> None:
    profile = Profile((BlockProfile("0", kept=100, input=10, whole=100, seconds=1.0, again=1.0),), 1.0)
    cut = choose(profile, 700, costs=FREE, model_state=500, applying=650)
    assert (cut.peak, cut.smallest) == (650, 650)
    assert cut.unmet is None
    assert choose(profile, 649, costs=FREE, model_state=500, applying=650).unmet == (
        "The budget of 649 B cannot be met: applying the optimizer takes 650 B with the model's state, which is 1 B "
        "too much. Write memory_budget=650 or more."
    )


def test_the_choice_is_a_table() -> None:
    blocks = tuple(
        BlockProfile(f"blocks.{place}", kept=2**20, input=2**10, whole=2**20, seconds=0.01, again=0.01)
        for place in range(3)
    )
    table = choose(Profile(blocks, 0.03), 2 * 2**20 + 2**10, costs=FREE).table()
    assert [line.split("  ")[0] for line in table] == [
        "block",
        "blocks.0",
        "blocks.1 to blocks.2 (2)",
        "total",
        "predicted peak 2.0 MiB of 2.0 MiB, step time +11.1%",
    ]
    assert table[1].split() == ["blocks.0", "recompute", "1023.0", "KiB", "10.00", "ms"]


def test_offload_where_the_link_is_fast_and_recompute_where_it_is_not() -> None:
    blocks = tuple(
        BlockProfile(str(place), kept=100, input=10, whole=100, seconds=1.0, again=1.0) for place in range(3)
    )
    profile = Profile(blocks, 3.0)
    for link, kind in ((1000.0, "offload"), (10.0, "recompute"), (None, "recompute")):
        cut = choose(profile, 220, costs=Costs(bytes=0, link=link))
        assert kind in {treatment.kind for treatment in cut.treatments.values()}
        assert cut.peak <= 220


def test_a_block_that_changes_its_input_is_not_run_again() -> None:
    block = BlockProfile("0", kept=100, input=10, whole=100, seconds=1.0, again=1.0, repeatable=False)
    assert [option.treatment.kind for option in options(block, Costs())] == ["keep"]


def test_what_is_kept_of_operations_is_there_until_the_end_of_the_blocks_backward() -> None:
    calls = tuple(
        Operation(f"aten.{name}.default", 0, seconds, 20, there=there)
        for name, seconds, there in (("first", 1.0, 95), ("second", 3.0, 100))
    )
    block = BlockProfile("0", kept=90, input=10, whole=100, seconds=4.0, again=4.0, operations=calls)
    ways = {option.treatment.operations: option for option in options(block, FREE)}
    assert ways[(("aten.second.default", 0),)].whole == 120
    assert ways[()].whole == 100


def test_ranks_can_agree_on_the_figures() -> None:
    profile = random_profile(random.Random(1), 3)
    doubled = profile.with_numbers([2 * figure for figure in profile.numbers()])
    assert doubled.kept == 2 * profile.kept
    assert doubled.blocks[0].operations[0].name == profile.blocks[0].operations[0].name
    with pytest.raises(ValueError, match="another model"):
        profile.with_numbers([1.0])


def test_model_state_is_sixteen_bytes_a_parameter_for_adam() -> None:
    assert model_state_bytes(10) == 160
    assert model_state_bytes(10, trainable=4) == 40 + 16 + 32
    assert model_state_bytes(10, optimizer=7) == 87
    assert model_state_bytes(10, width=2, slots=3) == 20 + 20 + 120
