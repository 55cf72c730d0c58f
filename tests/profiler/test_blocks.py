"""What blocks keep is counted as torch keeps it, and nothing is left of the counting."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paraflow.models import CausalLM, CausalLMConfig
from paraflow.planner.blocks import Profile
from paraflow.planner.recomputation import choose
from paraflow.profiler import activation_bytes
from paraflow.profiler.blocks import measure
from paraflow.profiler.estimates import Speed, estimate
from paraflow.recompute import TreatedBlocks
from tests.allocations import peak_of

SPEED = Speed(flops=1e10, bytes=1e10)


class Stage(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.activation(self.norm(self.convolution(x))), 2)


def perceptron() -> tuple[nn.Module, dict[str, nn.Module], Callable[[], Any]]:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5)) for _ in range(3)]
    model = nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 2))
    x = torch.randn(16, 4)
    return model, {str(place): model[place] for place in (1, 2, 3)}, lambda: model(x).square().mean()


def convolutions() -> tuple[nn.Module, dict[str, nn.Module], Callable[[], Any]]:
    model = nn.Sequential(Stage(3, 8), Stage(8, 8), Stage(8, 16), nn.Flatten(), nn.Linear(16 * 2 * 2, 10))
    x, y = torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,))
    return model, {str(place): model[place] for place in range(3)}, lambda: F.cross_entropy(model(x), y)


def language_model() -> tuple[nn.Module, dict[str, nn.Module], Callable[[], Any]]:
    # Learned positions: rotary ones remember their table between real forwards, and make it anew in others.
    config = CausalLMConfig(vocab_size=64, layers=3, hidden=32, heads=4, context=16, dropout=0.1, positions="learned")
    model, tokens = CausalLM(config), torch.randint(0, 64, (2, 17))
    blocks = {f"blocks.{place}": block for place, block in enumerate(model.blocks)}
    return model, blocks, lambda: model.training_step(tokens)["loss"]


MODELS = [perceptron, convolutions, language_model]


@pytest.mark.parametrize("make", MODELS)
def test_the_parts_add_up_to_what_the_model_keeps(make: Any) -> None:
    model, blocks, run = make()
    profile = measure(model, blocks, run)
    assert profile.kept == activation_bytes(model, lambda _: run(), None)
    assert [block.name for block in profile.blocks] == list(blocks)
    for block in profile.blocks:
        assert 0 < block.input < block.kept <= block.whole
        assert 0 < block.again <= block.seconds * 1.000001
        assert any(op.keepable for op in block.operations)


@pytest.mark.parametrize("make", MODELS)
def test_an_estimate_has_the_bytes_of_a_measurement(make: Any) -> None:
    model, blocks, run = make()
    measured, estimated = measure(model, blocks, run), estimate(model, blocks, run, SPEED)
    assert [_bytes(profile) for profile in (estimated, measured)] == [_bytes(measured)] * 2
    assert all(block.seconds > 0 for block in estimated.blocks)


def _bytes(profile: Profile) -> list[Any]:
    parts = [part for part in profile.parts if part.kept or part.is_block]
    return [
        (part.name, part.kept, part.input, part.whole, part.shared)
        + tuple((op.name, op.occurrence, op.bytes, op.extra, op.keepable) for op in part.operations)
        for part in parts
    ]


def test_a_model_on_the_meta_device_is_estimated() -> None:
    with torch.device("meta"):
        model, blocks, _ = language_model()
    tokens = torch.randint(0, 64, (2, 17))
    on_meta = estimate(model, blocks, lambda: model.training_step(tokens)["loss"], SPEED)  # type: ignore[operator]
    real, its_blocks, run = language_model()
    assert _bytes(on_meta) == _bytes(measure(real, its_blocks, run))
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("look", [measure, lambda *given: estimate(*given, SPEED)])
def test_nothing_is_left_of_it(look: Any) -> None:
    model, blocks, run = convolutions()
    model.eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    torch.testing.assert_close(look(model, blocks, run).kept > 0, True)
    assert not model.training
    assert not any("forward" in vars(block) for block in blocks.values())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_forward_of_the_blocks_own_is_put_back_after_an_error() -> None:
    block = nn.Linear(2, 2)
    own = block.forward = lambda x: x / 0  # type: ignore[method-assign]
    model = nn.Sequential(block)

    def run() -> Tensor:
        model(torch.ones(1, 2))
        raise RuntimeError("the model's own")

    with pytest.raises(RuntimeError, match="the model's own"):
        measure(model, {"0": block}, run)
    assert block.forward is own


def test_a_block_that_is_called_twice_counts_twice() -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    other = nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    both = nn.ModuleList([block, other])
    once = measure(both, {"0": block}, lambda: other(block(x)).sum()).blocks[0]
    twice = measure(both, {"0": block}, lambda: other(block(block(x))).sum()).blocks[0]
    assert (once.calls, twice.calls) == (1, 2)
    assert twice.kept == 2 * once.kept
    assert [op.name for op in twice.operations] == [op.name for op in once.operations]


class Skip(nn.Module):
    """What goes in at one end comes out at the other as well."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        return torch.cat((first, self.third(self.second(first))), 1).sum()


def test_gradients_that_wait_for_a_skip_connection_count() -> None:
    model, x = Skip(), torch.randn(16, 8)
    blocks = {"first": model.first, "second": model.second, "third": model.third}
    found = {block.name: block for block in measure(model, blocks, lambda: model(x)).blocks}
    # Its own are as large as those of the first; that of the whole that was joined waits beside them.
    assert found["second"].whole == found["third"].whole
    assert found["second"].whole - found["first"].whole == 2 * 16 * 8 * 4


def test_what_is_written_later_is_not_kept_and_what_writes_its_input_is_not_run_again() -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul(2).tanh()

    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1).sigmoid()

    model = nn.Sequential(nn.Linear(4, 4), Halves(), Writes())
    found = measure(model, {"1": model[1], "2": model[2]}, lambda: model(torch.randn(2, 4)).sum()).blocks
    tanh = next(op for op in found[0].operations if "tanh" in op.name)
    assert not tanh.keepable
    assert found[0].repeatable
    assert not found[1].repeatable


def test_outputs_outside_the_blocks_can_be_written_to() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def run() -> Tensor:
        x = model[0](torch.randn(2, 4))
        x += 1
        return model[1](x).sum()  # type: ignore[no-any-return]

    assert measure(model, {"0": model[0]}, run).outside > 0


def test_predictions_that_are_returned_are_there_in_backward() -> None:
    model, blocks, run = perceptron()
    x = torch.randn(16, 4)

    def with_output() -> dict[str, Tensor]:
        output = model(x)
        return {"loss": output.square().mean(), "output": output.exp()}

    more = measure(model, blocks, with_output)
    assert more.kept >= measure(model, blocks, run).kept + 16 * 2 * 4


def test_topk_is_kept_in_any_case() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            weights, _ = self.gate(x).topk(2)
            return x * weights.softmax(-1).sum(-1, keepdim=True)

    model = nn.Sequential(nn.Linear(8, 8), Router())
    (block,) = measure(model, {"1": model[1]}, lambda: model(torch.randn(16, 8)).sum()).blocks
    assert block.input == 16 * 8 * 4 + 16 * 2 * (4 + 8)
    assert all("topk" not in op.name for op in block.operations)


def test_under_autocast_the_same_calls_are_seen_every_time() -> None:
    model, blocks, run = perceptron()
    profile = measure(model, blocks, run, torch.autocast("cpu", torch.bfloat16))
    casts = [sum("_to_copy" in op.name for op in block.operations) for block in profile.blocks]
    assert casts[0] == casts[1] == casts[2] >= 2  # of the weight and of the bias, or of the input


def test_a_choice_from_a_measurement_meets_its_budget() -> None:
    """As the allocator counts what a step takes beside parameters and gradients."""
    config = CausalLMConfig(vocab_size=64, layers=4, hidden=64, heads=4, context=64, positions="learned")
    model, tokens = CausalLM(config), torch.randint(0, 64, (4, 65))
    blocks = {f"blocks.{place}": block for place, block in enumerate(model.blocks)}

    def run() -> Tensor:
        return model.training_step(tokens)["loss"]

    run().backward()
    profile = measure(model, blocks, run)
    most = choose(profile, 10**12)
    for share in (0.0, 0.5, 1.0):
        cut = choose(profile, int(most.smallest + share * (most.peak - most.smallest)))
        assert cut.unmet is None
        assert any(treatment.kind != "keep" for treatment in cut.treatments.values()) is (share < 1)
        treated = TreatedBlocks()
        treated.treat(blocks, cut.treatments, min_bytes=0)
        with treated:
            for _ in range(3):  # what is recomputed learns in its first forwards
                run().backward()
            assert 0.8 * cut.peak <= peak_of(lambda: run().backward()) <= 1.05 * cut.budget


def test_gradients_that_are_not_there_yet_are_left_to_the_caller() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(1, 8)
    there, made = (
        measure(model, {"1": model[1]}, lambda: model(x).sum(), gradients_there=given) for given in (True, False)
    )
    assert made.kept == there.kept
    assert there.blocks[0].whole - made.blocks[0].whole == (8 * 8 + 8) * 4
