"""Ranks that are about to run different collectives stop, with both places named; those that run the same go on."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import all_reduce as all_reduce_by_another_name

import paraflow as pf
from paraflow.debug import CollectiveCheck
from paraflow.mesh import Mesh
from tests.debug.helpers import held, site_in, world

site = partial(site_in, __file__)


def outcome(program: Callable[[Mesh, CollectiveCheck], None], patience: float = 30.0) -> tuple[str, float]:
    """Runs a program under the check; returns what was raised, and for how many seconds it ran."""
    mesh = world()
    dist.barrier()
    begun, said = time.monotonic(), "nothing"
    with CollectiveCheck(mesh, step=lambda: 5, patience=patience) as check:
        try:
            program(mesh, check)
        except pf.ParaflowError as error:
            said = str(error)
    seconds = time.monotonic() - begun
    dist.barrier()  # all ranks are still alive, and in order
    return said, seconds


def sentences(ranks: Any, size: int, program: Callable[[Mesh, CollectiveCheck], None], **options: Any) -> set[str]:
    return {said for said, _ in ranks(size, outcome, program, **options)}


# --- programs with a mistake


def barrier_on_one(mesh: Mesh, check: CollectiveCheck) -> None:
    if mesh.rank == 0:
        dist.barrier()  # line: barrier on one
    check.announce("backward of micro-batch 0")  # line: backward


def two_orders(mesh: Mesh, check: CollectiveCheck) -> None:
    if mesh.rank == 0:
        dist.all_reduce(torch.ones(10))  # line: first reduce
        dist.broadcast(torch.ones(3), src=1)
    else:
        dist.broadcast(torch.ones(3), src=1)  # line: first broadcast
        dist.all_reduce(torch.ones(10))


def two_shapes(mesh: Mesh, check: CollectiveCheck) -> None:
    dist.all_reduce(torch.ones(2, 3 + mesh.rank))  # line: shapes


def two_dtypes(mesh: Mesh, check: CollectiveCheck) -> None:
    all_reduce_by_another_name(torch.ones(2, dtype=torch.float32 if mesh.rank else torch.bfloat16))  # line: dtypes


def two_sources(mesh: Mesh, check: CollectiveCheck) -> None:
    dist.broadcast_object_list([mesh.rank], src=mesh.rank)  # line: sources


def two_reductions(mesh: Mesh, check: CollectiveCheck) -> None:
    dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX if mesh.rank else dist.ReduceOp.SUM)  # line: reductions


def two_groups(mesh: Mesh, check: CollectiveCheck) -> None:
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=group if mesh.rank else None)  # line: groups


def one_leaves(mesh: Mesh, check: CollectiveCheck) -> None:
    for _ in range(2 + (mesh.rank == 0)):
        dist.all_reduce(torch.ones(1))  # line: loop


def one_is_silent(mesh: Mesh, check: CollectiveCheck) -> None:
    dist.barrier()  # line: before silence
    if mesh.rank == 0:
        time.sleep(1.5)
    dist.all_gather_object([None, None], "object")  # line: silence


def one_of_three(mesh: Mesh, check: CollectiveCheck) -> None:
    if mesh.rank == 1:
        time.sleep(0.1)
        dist.barrier()  # line: one of three
    dist.all_reduce(torch.ones(4))  # line: two of three


def two_of_three_wait(mesh: Mesh, check: CollectiveCheck) -> None:
    pair = dist.new_group([1, 2])
    if mesh.rank:
        dist.all_reduce(torch.ones(1), group=pair)  # line: pair
    if mesh.rank == 1:
        return
    dist.barrier()  # line: third


def swapped(mesh: Mesh, check: CollectiveCheck) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if mesh.rank == 0:
            dist.all_reduce(torch.ones(1))  # line: swapped first
            dist.all_reduce(torch.zeros(1))
        else:
            dist.all_reduce(torch.zeros(1))  # line: swapped second
            dist.all_reduce(torch.ones(1))
    if caught:
        raise pf.ParaflowError(str(caught[0].message))


@pytest.mark.parametrize(
    ("program", "first", "second"),
    [
        (
            barrier_on_one,
            ("is about to run barrier()", "barrier on one"),
            ('has come to "backward of micro-batch 0"', "backward"),
        ),
        (
            two_orders,
            ("is about to run all_reduce(float32[10])", "first reduce"),
            ("is about to run broadcast(float32[3], from rank 1)", "first broadcast"),
        ),
        (
            two_shapes,
            ("is about to run all_reduce(float32[2, 3])", "shapes"),
            ("is about to run all_reduce(float32[2, 4])", "shapes"),
        ),
        (
            two_dtypes,
            ("is about to run all_reduce(bfloat16[2])", "dtypes"),
            ("is about to run all_reduce(float32[2])", "dtypes"),
        ),
        (
            two_sources,
            ("is about to run broadcast_object_list(from rank 0, 1 objects)", "sources"),
            ("is about to run broadcast_object_list(from rank 1, 1 objects)", "sources"),
        ),
        (
            two_reductions,
            ("is about to run all_reduce(float32[1])", "reductions"),
            ("is about to run all_reduce(float32[1], max)", "reductions"),
        ),
    ],
)
def test_both_places_are_named_on_both_ranks(
    ranks: Any, program: Any, first: tuple[str, str], second: tuple[str, str]
) -> None:
    results = ranks(2, outcome, program)
    (said,) = {said for said, _ in results}
    name = program.__name__
    assert said.startswith(
        f"Step 5: rank 0 {first[0]} at {site(first[1], name)}, and rank 1 {second[0]} at {site(second[1], name)}. "
    )
    assert "Every rank must run the same collectives in the same order" in said
    assert max(seconds for _, seconds in results) < 20, "the ranks waited for their patience to end"


def test_the_same_ranks_in_two_groups_are_told_apart(ranks: Any) -> None:
    (said,) = sentences(ranks, 2, two_groups)
    assert f"rank 0 is about to run all_reduce(float32[1]) at {site('groups', 'two_groups')}" in said
    assert "rank 1 is about to run all_reduce(float32[1]) in group " in said
    assert " of ranks 0, 1 at " in said


def test_a_rank_that_leaves_is_named_with_its_last_collective(ranks: Any) -> None:
    staying, leaving = ranks(2, left_or_stayed)
    line = site("loop", "one_leaves")
    assert leaving == "nothing"
    assert staying.startswith(
        f"Step 5: rank 0 is about to run all_reduce(float32[1]) at {line}, and rank 1 has left the run; "
        f"before that it ran all_reduce(float32[1]) at {line} in step 5. Every rank must"
    )


def left_or_stayed() -> str:
    mesh = world()
    said = "nothing"
    with CollectiveCheck(mesh, step=lambda: 5) as check:
        try:
            one_leaves(mesh, check)
        except pf.ParaflowError as error:
            said = str(error)
    dist.barrier()
    return said


def test_a_rank_that_raises_is_named_with_its_error(ranks: Any) -> None:
    waiting, raising = ranks(2, raised_or_waited)
    assert raising == "label 7 of 4 classes"
    assert waiting == (
        f"Step 2: rank 0 is about to run barrier() at {site('waits', 'raised_or_waited')}, and rank 1 has left the run "
        "because of ValueError: label 7 of 4 classes; no collective of its own came before."
    )


def raised_or_waited() -> str:
    mesh = world()
    try:
        with CollectiveCheck(mesh, step=lambda: 2):
            if mesh.rank == 1:
                raise ValueError("label 7 of 4 classes")
            dist.barrier()  # line: waits
    except (ValueError, pf.ParaflowError) as error:
        return str(error)
    return "nothing"


def test_a_silent_rank_is_named_and_a_late_one_told_the_same(ranks: Any) -> None:
    (said,) = sentences(ranks, 2, one_is_silent, patience=0.5)
    assert said.startswith(
        f"Step 5: rank 1 is about to run all_gather_object() at {site('silence', 'one_is_silent')}, and rank 0 has "
        f"said nothing for 1 s; before that it ran barrier() at {site('before silence', 'one_is_silent')} in step 5. "
        "A rank that says nothing has ended, stands still, or is slow"
    )


def test_ranks_are_grouped_by_what_they_run(ranks: Any) -> None:
    (said,) = sentences(ranks, 3, one_of_three)
    assert said.startswith(
        f"Step 5: ranks 0 and 2 are about to run all_reduce(float32[4]) at {site('two of three', 'one_of_three')}, "
        f"and rank 1 is about to run barrier() at {site('one of three', 'one_of_three')}. "
    )


def test_groups_of_some_ranks_are_in_an_order_of_their_own(ranks: Any) -> None:
    first, second, third = ranks(3, outcome, two_of_three_wait, patience=0.5)
    assert second[0] == "nothing"
    assert first[0] == third[0]
    assert f"ranks 0 and 2 are about to run barrier() at {site('third', 'two_of_three_wait')}" in first[0]
    assert "ran all_reduce(float32[1]) in group " in first[0]
    assert f"of ranks 1, 2 at {site('pair', 'two_of_three_wait')} in step 5" in first[0]


def test_the_same_collective_from_two_lines_is_warned_of(ranks: Any) -> None:
    judge, other = ranks(2, outcome, swapped)
    assert other[0] == "nothing"
    assert judge[0].startswith(
        f"Step 5: all_reduce(float32[1]) is run by rank 0 at {site('swapped first', 'swapped')}, and rank 1 at "
        f"{site('swapped second', 'swapped')}. "
    )


def legitimate(mesh: Mesh, check: CollectiveCheck) -> None:
    """Calls that differ as they may: in lines, in shapes of as many elements, in what only the root gives."""
    if mesh.rank == 0:
        dist.broadcast(torch.ones(4), 0)
        dist.barrier()
    else:
        dist.broadcast(torch.empty(2, 2), src=0)
        dist.barrier(async_op=False)
    lists = [torch.empty(2), torch.empty(2)]
    dist.gather(torch.ones(2), lists if mesh.rank == 1 else None, dst=1)
    dist.scatter(torch.empty(2), lists if mesh.rank == 0 else None, group_src=0)
    dist.all_reduce(torch.ones([1] if mesh.rank else []), async_op=True).wait()
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, "long" * mesh.rank)
    dist.gather_object(mesh.rank, objects if mesh.rank == 0 else None, dst=0)
    # Rank 0 keeps one and sends one; rank 1 sends two, and keeps one.
    received = torch.empty(3 if mesh.rank == 0 else 2)
    sent = torch.ones(2 if mesh.rank == 0 else 3)
    dist.all_to_all_single(received, sent, [1, 2] if mesh.rank == 0 else None, [1, 1] if mesh.rank == 0 else [2, 1])
    own = dist.new_group([mesh.rank], use_local_synchronization=True)
    for _ in range(mesh.rank):
        dist.all_reduce(torch.ones(1), group=own)
    if mesh.rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
    check.announce("the end")


def test_what_may_differ_does(ranks: Any) -> None:
    assert sentences(ranks, 2, legitimate, patience=10.0) == {"nothing"}


def again_after_an_error(mesh: Mesh, check: CollectiveCheck) -> None:
    try:
        two_shapes(mesh, check)
    except pf.ParaflowError:
        dist.all_reduce(torch.ones(1))
        with CollectiveCheck(mesh, step=lambda: 6) as inner:
            inner.announce("inner")
            dist.barrier()
        raise


def test_ranks_are_in_order_after_an_error(ranks: Any) -> None:
    (said,) = sentences(ranks, 2, again_after_an_error, patience=10.0)
    assert "all_reduce(float32[2, 3])" in said


def steps_apart() -> str:
    mesh = world()
    try:
        with CollectiveCheck(mesh, step=lambda: 3 + mesh.rank):
            dist.barrier()  # line: steps
    except pf.ParaflowError as error:
        return str(error)
    return "nothing"


def test_different_steps_are_told(ranks: Any) -> None:
    (said,) = set(ranks(2, steps_apart))
    line = site("steps", "steps_apart")
    assert said.startswith(
        f"The ranks are at different steps: rank 0 is about to run barrier() at {line} in step 3, and rank 1 is about "
        f"to run barrier() at {line} in step 4. "
    )


def compiled() -> str:
    """torch.compile would make a collective a functional one, which is not seen."""
    mesh = world()
    before = held()

    def reduce(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)  # line: compiled
        return y + 1

    run = torch.compile(reduce, backend="eager")
    said = "nothing"
    with CollectiveCheck(mesh, step=lambda: 0, patience=20.0) as check:
        assert run(torch.ones(1)).item() == 5
        try:
            if mesh.rank == 0:
                check.announce("elsewhere")
            run(torch.ones(1))
        except pf.ParaflowError as error:
            said = str(error)
    assert held() == before
    assert run(torch.ones(1)).item() == 5
    return said


def test_compiled_functions_are_seen(ranks: Any) -> None:
    (said,) = set(ranks(2, compiled))
    assert f", and rank 1 is about to run all_reduce(float32[1]) at {site('compiled', 'reduce')}. " in said


def test_one_process_has_nothing_to_compare() -> None:
    before = held()
    with CollectiveCheck(Mesh(pf.Plan(), torch.device("cpu")), step=lambda: 0) as check:
        assert held() == before
        check.announce("anything")


def test_it_is_not_imported_without_being_asked_for() -> None:
    code = "import sys, paraflow as pf; pf.Trainer(); print([m for m in sys.modules if m.startswith('paraflow.debug')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
