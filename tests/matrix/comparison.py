"""Whether a training of the matrix is that of one process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from paraflow.compatibility import Pair
from tests.matrix.models import CASES
from tests.matrix.references import SAVED_AT, draws_of_ranks, of_draws, reference
from tests.matrix.training import STEPS, Job, Outcome, train, whole

EXACT = {"rtol": 1e-5, "atol": 1e-6}

BOUNDS: dict[tuple[str, str], float] = {
    ("precision", "bf16"): 5e-2,
    ("precision", "fp16"): 1e-2,
    ("comm_hook", "bf16"): 3e-2,
    ("comm_hook", "fp16"): 3e-3,
}
"""How far rounding to 16 bits may lead: a share of the way that all parameters have come, and ten times less for losses
and norms. Adam divides each gradient by its size, so that a rounding of a small one is as good as one of a large."""

ONE_SAMPLE = 1 / 19  # of the smallest epoch: what an accuracy changes by where two classes are next to equal


def assert_trained_alike(pair: Pair, outcome: Outcome) -> None:
    """Compares losses, gradient norms, metrics, parameters and optimizer state with those of one process."""
    assert_activations_spared(pair, outcome)
    expected = expected_of(pair, outcome)
    first = SAVED_AT if CASES[pair.run].resumes else 0
    bound = bound_of(pair)
    close = EXACT if bound is None else {"rtol": bound / 10, "atol": 0.0}
    assert_close("losses", outcome.losses, expected.losses[first:], **close)
    if outcome.norms:
        assert_close("gradient norms", outcome.norms, expected.norms[first:], **close)
    for name in expected.metrics:
        slack = close if bound is None or "accuracy" not in name else {"rtol": 0.0, "atol": ONE_SAMPLE}
        assert_close(name, outcome.metrics[name], expected.metrics[name], **slack)
    assert_states_alike(pair, outcome.state, expected.state)


def assert_activations_spared(pair: Pair, outcome: Outcome) -> None:
    """Something was run again in backward, or copied to the host, where the plan says so; and nothing elsewhere."""
    if "compile" in pair.fields:
        return  # what a compiled block does cannot be counted from outside
    kind = pair.fields.get("activation_checkpointing")
    stages = pair.fields.get("pp", 1)  # each block is run by one of them
    once = CASES[pair.run].blocks * pair.fields.get("accumulate", 1) * pair.ranks // stages
    again, copies = outcome.spared["blocks"] - once, outcome.spared["copies"]
    assert (again > 0, copies > 0) == (kind not in (None, "offload"), kind == "offload"), (again, copies)


def assert_loads_alike(pair: Pair, outcome: Outcome, folder: str) -> None:
    """Loads the checkpoint in one process without a process group, compares it, and trains one step more."""
    loaded = whole([train(Job({"clip_norm": clip_norm_of(pair)}, pair.run, source=folder, steps=STEPS + 1))])
    saved = {name: part for name, part in outcome.state.items() if name != "predictions"}
    assert_close("what was saved", loaded.begun, saved, rtol=0, atol=0)
    if CASES[pair.run].random and pair.ranks > 1:
        return  # another number of ranks draws other numbers
    expected = reference(pair.run, clip_norm_of(pair), STEPS + 1)
    if bound_of(pair) is None:
        assert_close("loss of the next step", loaded.losses, expected.losses[-1:], **EXACT)
        assert_close("metrics of the next epoch", loaded.metrics, expected.metrics, **EXACT)
    assert_states_alike(pair, loaded.state, expected.state)


def assert_states_alike(pair: Pair, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Compares parameters and optimizer state: each number in fp32, the way that they have come below."""
    bound = bound_of(pair)
    if bound is None:
        assert_close("state", mine, theirs, **EXACT)
        return
    begin = CASES[pair.run].model().state_dict()
    way = {name: value - begin[name] for name, value in theirs["parameters"].items()}
    mine_way = {name: value - begin[name] for name, value in mine["parameters"].items()}
    _assert_apart("parameters", mine_way, way, bound)
    averages, mine_averages = (
        {name: values["exp_avg"] for name, values in state["optimizer"].items()} for state in (theirs, mine)
    )
    _assert_apart("the optimizer's averages", mine_averages, averages, bound)


def _assert_apart(what: str, mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], bound: float) -> None:
    assert mine.keys() == theirs.keys()
    share = _length({name: mine[name] - theirs[name] for name in theirs}) / _length(theirs)
    assert share <= bound, f"{what} are {share:.2g} of their way apart, and the bound is {bound}"


def expected_of(pair: Pair, outcome: Outcome) -> Outcome:
    """What one process computes; with what the ranks have drawn, where there are several."""
    if CASES[pair.run].random and pair.ranks > 1:
        return of_draws(pair.run, draws_of_ranks(pair.verdict.facts.plan, outcome.drawn))
    return reference(pair.run, clip_norm_of(pair))


def clip_norm_of(pair: Pair) -> float:
    """The bound on the gradient norm; without one the norm is measured."""
    return float(pair.fields.get("clip_norm", math.inf))


def bound_of(pair: Pair) -> float | None:
    """How far apart numbers may be; None in fp32."""
    found = [bound for (name, value), bound in BOUNDS.items() if pair.fields.get(name) == value]
    sends = pair.ranks > 1 or "precision" in pair.fields
    return max(found) if found and sends else None


def assert_close(what: str, mine: Any, theirs: Any, *, rtol: float, atol: float) -> None:
    """Compares numbers and tensors in lists and mappings; says of what."""
    if isinstance(theirs, Mapping):
        assert mine.keys() == theirs.keys(), f"{what}: {sorted(mine)} for {sorted(theirs)}"
        for name in theirs:
            assert_close(f"{what}, {name}", mine[name], theirs[name], rtol=rtol, atol=atol)
        return
    torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol, msg=lambda m: f"{what}: {m}")


def _length(tensors: Mapping[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((tensor.double() ** 2).sum()) for tensor in tensors.values()))
