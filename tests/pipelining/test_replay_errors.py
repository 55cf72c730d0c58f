"""What a pipeline cannot replay, said with the line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paraflow.errors import ModelError
from paraflow.pipelining.replay import Replay
from tests.pipelining.one_process import forward
from tests.pipelining.test_replay import Glue

STAGES = [["first"], ["second"], ["third"]]


def _if(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    if y.sum() > 0:
        y = y * 2
    return m.third(y)


def _item(m: Any, x: Tensor) -> Tensor:
    y = m.second(m.first(x))
    m.logged = y.mean().item()
    return m.third(y)


def _list(m: Any, x: Tensor) -> Tensor:
    return m.third(torch.tensor(m.first(x).tolist()))


def _numpy(m: Any, x: Tensor) -> Tensor:
    return m.third(torch.from_numpy(m.first(x).detach().numpy()))


def _chosen(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    return m.third(y[y[:, 0] > 0])


def _text(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    m.name = f"{y.mean():.3f}"
    return m.third(y)


@pytest.mark.parametrize(
    ("between", "call", "line"),
    [
        (_if, "__bool__", "if y.sum() > 0:"),
        (_item, "item", "m.logged = y.mean().item()"),
        (_list, "tolist", "return m.third(torch.tensor(m.first(x).tolist()))"),
        (_numpy, "numpy", "return m.third(torch.from_numpy(m.first(x).detach().numpy()))"),
        (_chosen, "__getitem__", "return m.third(y[y[:, 0] > 0])"),
        (_text, "__format__", 'm.name = f"{y.mean():.3f}"'),
    ],
)
def test_code_that_looks_at_values_between_layers(between: Any, call: str, line: str) -> None:
    model = Glue(between)
    with pytest.raises(ModelError) as caught:
        Replay(model, STAGES).trace(lambda: model(torch.ones(3, 4)))
    assert str(caught.value).startswith(f"{call}() reads the values of a tensor that is not on every stage")
    assert f"test_replay_errors.py:{between.__code__.co_firstlineno}"[:-2] in str(caught.value)
    assert line in str(caught.value)
    assert "torch.where" in str(caught.value)


def test_units_that_are_called_in_another_order() -> None:
    model = Glue(lambda m, x: m.third(m.first(m.second(x))))
    with pytest.raises(ModelError, match=r"'first' belongs to stage 0 .* called after 'second' of stage 1, at .*List"):
        Replay(model, STAGES).trace(lambda: model(torch.ones(3, 4)))
    again = Glue(lambda m, x: m.first(m.second(m.first(x))))
    with pytest.raises(ModelError, match="'first' belongs to stage 0"):
        Replay(again, STAGES).trace(lambda: again(torch.ones(3, 4)))


def test_a_call_that_torch_functions_do_not_see() -> None:
    def between(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        with torch._C.DisableTorchFunction():
            return m.third(y * 2)

    model = Glue(between)
    with pytest.raises(ModelError, match=r"aten\.mul\.Tensor .* cannot be seen, at test_replay_errors\.py"):
        Replay(model, STAGES).trace(lambda: model(torch.ones(3, 4)))


def test_two_views_of_which_one_is_written_in_a_later_stage() -> None:
    def between(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        part = y[:, 0]
        z = m.second(y + 0)
        part += 1
        return m.third(z) + y

    model = Glue(between)
    with pytest.raises(ModelError, match=r"Stage 1 .* writes in place into .*x\.clone"):
        Replay(model, STAGES).trace(lambda: model(torch.ones(3, 4)))


def test_a_weight_that_is_not_here() -> None:
    model = Glue(lambda m, x: F.linear(m.second(m.first(x)), m.first.weight))
    with pytest.raises(ModelError, match=r"'first.weight' is a weight of another stage .* stage 1 .* outside"):
        forward(model, STAGES, lambda m: m(torch.ones(3, 4)))


def test_a_step_that_takes_another_way_than_when_it_was_traced() -> None:
    x = torch.ones(3, 4)
    ways = {
        "more": lambda m, x: m.third(m.second(m.first(x) * 2)),
        "fewer": lambda m, x: m.third(m.first(x)),
    }
    model = Glue(lambda m, x: m.third(m.second(m.first(x))))
    replay = Replay(model, STAGES)
    traffic = replay.trace(lambda: model(x))
    model.between = ways["more"]
    with pytest.raises(ModelError, match=r"The step calls 'mul', at .*where it came to 'second' when it was traced"):
        replay.run(0, lambda: model(x), [], traffic)
    model.between = ways["fewer"]
    with pytest.raises(ModelError, match="where it came to 'second'"):
        replay.run(2, lambda: model(x), [torch.ones(3, 4)], traffic)


def test_a_buffer_between_layers_that_depends_on_them() -> None:
    def in_place(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        m.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return m.third(y)

    def anew(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        m.mean = m.mean * 0.9 + y.mean(0) * 0.1
        return m.third(y)

    for between in (in_place, anew):
        model = Glue(between)
        model.register_buffer("mean", torch.zeros(4))
        with pytest.raises(ModelError, match="The buffer 'mean' is given values that depend on layers"):
            Replay(model, STAGES).trace(lambda model=model: model(torch.ones(3, 4)))
        assert torch.equal(model.mean, torch.zeros(4))


def test_a_layer_that_cannot_be_copied() -> None:
    class Locked(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("no copies")

    with pytest.raises(ModelError, match=r"cannot be copied by copy\.deepcopy.*no copies"):
        Replay(nn.Sequential(Locked(4, 4), nn.Linear(4, 4)), [["0"], ["1"]])


def test_an_absent_tensor_that_is_kept_beyond_the_step() -> None:
    kept: list[Tensor] = []
    model = Glue(lambda m, x: (kept.append(m.first(x)), m.third(x))[1])
    x = torch.ones(3, 4)
    replay = Replay(model, STAGES)
    traffic = replay.trace(lambda: model(x))
    replay.run(2, lambda: model(x), [], traffic)
    assert kept[-1].shape == (3, 4)
    assert "Absent(shape=(3, 4)" in repr(kept[-1])
    with pytest.raises(ModelError, match="is used after the step that made it"):
        kept[-1].sum()


def test_outputs_that_hooks_collect() -> None:
    collected: list[Tensor] = []
    model = Glue(lambda m, x: (m.third(m.second(m.first(x))), *collected))
    for layer in (model.first, model.third):
        layer.register_forward_hook(lambda module, args, output: collected.append(output))
    x = torch.ones(3, 4)
    replay = Replay(model, STAGES)
    traffic = replay.trace(lambda: model(x))
    with pytest.raises(ModelError, match=r"returned 2 tensors, and 1 when it was traced.*forward hooks that collect"):
        replay.run(2, lambda: model(x), [torch.ones(3, 4)], traffic)
