"""Models on the meta device get their values rank by rank, part by part, and start as one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import paraflow as pf
from paraflow.births import births_of, give_weights
from paraflow.checkpoint.pretrained import open_weights
from paraflow.parts import local, whole
from paraflow.placing import place

HOST = torch.device("cpu")
MEGABYTE = 2**20


class Net(nn.Module):
    """Tied weights that divide by no number of ranks, and a buffer that is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, 64, padding_idx=3)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 101)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.linspace(0, 1, 64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x) + self.positions
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(self.norm(x))


class Layers(nn.Sequential):
    """Layers that are built in the order in which they are registered."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Conv1d(3, 4, 3), nn.LSTM(8, 8), nn.Linear(7, 5))


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def test_layers_on_meta_start_as_if_built_on_the_host() -> None:
    pf.seed(5)
    wanted = Layers().state_dict()
    pf.seed(5)
    module = on_meta(Layers)
    torch.rand(7)  # what is drawn meanwhile plays no part
    before = torch.get_rng_state()
    place(module, births_of(module), HOST)
    assert torch.equal(torch.get_rng_state(), before)
    for name, value in module.state_dict().items():
        assert torch.equal(value, wanted[name]), name


def test_layers_on_meta_are_right_in_any_order() -> None:
    pf.seed(5)
    wanted = Layers().state_dict()
    births = births_of(on_meta(Layers))
    for name in reversed(list(births)):
        assert torch.equal(births[name].part((...,)), wanted[name]), name


class Own(nn.Module):
    """A layer with a parameter and a buffer of its own."""

    def __init__(self, change: Callable[[Own], Any] = lambda own: None) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        change(self)


class WithBuffers(Own):
    def reset_buffers(self) -> None:
        self.angles.copy_(torch.arange(4.0))


class Forgetful(Own):
    def reset_parameters(self) -> None:
        pass


class Initialising(Own):
    def _init_weights(self, module: nn.Module) -> None: ...


def _tied() -> nn.Module:
    module = nn.Sequential(nn.Embedding(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    return module


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (Own, "angles is on the meta device, and its values are not known: Own has no reset_parameters or reset_buff"),
        (Forgetful, "angles is on the meta device, and Forgetful.reset_parameters does not set it"),
        (Initialising, "Initialising has _init_weights, which does nothing to weights on the meta device"),
        (lambda: WithBuffers(lambda own: nn.init.zeros_(own.layer.weight)), "layer.weight was changed on the meta dev"),
        (lambda: nn.MultiheadAttention(4, 2), "in_proj_weight is on the meta device, and its values are not known"),
        (_tied, "0.weight and 1.weight are one weight of two kinds of layer"),
    ],
)
def test_values_that_cannot_be_known_are_refused(make: Callable[[], nn.Module], sentence: str) -> None:
    module = on_meta(make)
    with pytest.raises(pf.ModelError, match=sentence) as raised:
        place(module, births_of(module), HOST)
    assert "pf.deferred_init()" in str(raised.value)


def test_a_layer_may_set_its_buffers() -> None:
    module = on_meta(WithBuffers)
    give_weights(module, {"layer.weight": torch.ones(3, 3), "layer.bias": torch.ones(3)})
    place(module, births_of(module), HOST)
    assert module.layer.weight.sum() == 9
    assert module.angles.tolist() == [0, 1, 2, 3]


def test_a_model_with_values_is_left_as_it_is() -> None:
    module = Net()
    parameters = [(id(p), p.data_ptr()) for p in module.parameters()]
    assert births_of(module) == {}
    place(module, {}, HOST)
    assert [(id(p), p.data_ptr()) for p in module.parameters()] == parameters


def sharded(module: nn.Module, **options: Any) -> nn.Module:
    """The module laid out over all ranks, with values."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    births = births_of(module)
    for layer in getattr(module, "layers", module):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(module, mesh=mesh, **options)
    place(module, births, HOST)
    return module


def _start_and_train_one_step(folder: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy

    pf.seed(4)
    wanted = Net()
    x = torch.arange(60).view(4, 15)
    for options in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        pf.seed(4)
        with pf.deferred_init():
            module = Net()
        ids = [id(p) for p in module.parameters()]
        sharded(module, **options)
        rows = -(-101 // dist.get_world_size()) + 1
        assert all(p.untyped_storage().nbytes() <= rows * 64 * 4 for p in map(local, module.parameters()))
        _assert_equal(module, wanted)
        assert module.head.weight is module.embedding.weight
        assert len(ids) == len(list(module.parameters()))
        module(x).logsumexp(-1).mean().backward()
        reference = Net()
        reference.load_state_dict(wanted.state_dict())
        reference(x).logsumexp(-1).mean().backward()
        for parameter, other in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(parameter.grad), other.grad)
    with pf.deferred_init():
        module = Net()
    give_weights(module, open_weights(folder))
    sharded(module)
    _assert_equal(module, weights := open_weights(folder))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    give_weights(module, weights)  # into parts that have memory
    _assert_equal(module, weights)


def _assert_equal(module: nn.Module, wanted: Any) -> None:
    values = dict(wanted.named_parameters()) if isinstance(wanted, nn.Module) else wanted
    for name, parameter in module.named_parameters():
        assert torch.equal(whole(parameter), values[name][...]), name


@pytest.mark.parametrize("world_size", [2, 4])
def test_parts_are_those_of_the_model_of_one_process(ranks: Any, world_size: int, tmp_path: Path) -> None:
    weights = {name: value for name, value in Net().state_dict().items() if name != "head.weight"}
    save_file(weights, tmp_path / "model.safetensors")
    ranks(world_size, _start_and_train_one_step, tmp_path)


def _first_parameters(make: str) -> dict[str, torch.Tensor]:
    pf.seed(6)
    module = {"meta": lambda: on_meta(lambda: nn.Sequential(nn.Linear(65, 64), nn.BatchNorm1d(64), nn.Linear(64, 7)))}[
        make
    ]()
    sharded(module)
    return {name: whole(value).clone() for name, value in module.state_dict().items()}


def test_a_model_on_meta_starts_alike_on_any_number_of_ranks(ranks: Any) -> None:
    pf.seed(6)
    wanted = nn.Sequential(nn.Linear(65, 64), nn.BatchNorm1d(64), nn.Linear(64, 7)).state_dict()
    for world_size in (1, 2, 4):
        for values in ranks(world_size, _first_parameters, "meta"):
            assert all(torch.equal(values[name], value) for name, value in wanted.items())


def _trained(build: str, **plan: Any) -> dict[str, torch.Tensor]:
    pf.seed(1)
    if build == "now":
        module: nn.Module = Net()
    else:
        with pf.deferred_init():
            module = Net()
    pf.configure(module, optimizer="adamw", lr=1e-2, loss="cross_entropy")
    x = torch.randint(0, 101, (21, 5), generator=torch.Generator().manual_seed(0))
    trainer = pf.Trainer(max_epochs=1, progress=False, **plan)
    trainer.fit(module, (x[:, 0], x[:, 1]), batch_size=8)
    return {name: whole(value).detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(("world_size", "plan"), [(1, {}), (2, {"dp": 2}), (4, {"fsdp": 4})])
def test_the_trainer_trains_what_was_built_without_memory(ranks: Any, world_size: int, plan: dict[str, Any]) -> None:
    wanted = _trained("now")
    for values in ranks(world_size, _trained, "later", **plan):
        for name, value in wanted.items():
            torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-6)


def _peak(kind: str, folder: Path) -> tuple[int, int]:
    """How many bytes of memory it took at most to build and lay out a model, and how large the model is."""
    pf.seed(0)
    sharded(nn.Sequential(nn.Linear(4, 4)))  # imports what is imported when it is first used
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _memory("VmHWM")
    if kind == "meta":
        module = on_meta(_large)
    else:
        with pf.deferred_init():
            module = _large()
    if kind == "stored":
        give_weights(module, open_weights(folder))
    sharded(module)
    return _memory("VmHWM") - before, sum(p.numel() * 4 for p in module.parameters())


def _large() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12)))


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


@pytest.mark.parametrize("kind", ["deferred", "meta", "stored"])
def test_no_rank_ever_holds_the_whole_model(ranks: Any, kind: str, tmp_path: Path) -> None:
    if kind == "stored":
        save_file(_large().state_dict(), tmp_path / "model.safetensors")
    for peak, size in ranks(4, _peak, kind, tmp_path):
        assert size > 190 * MEGABYTE
        part = size / 4 * (2 if kind == "stored" else 1)  # what is read of a file counts as well
        assert peak < part + 3 * 16 * MEGABYTE + 20 * MEGABYTE  # and three layers of 16 MiB, and what torch needs
