"""Parts that are several boxes, tensors that only some stages have, copies along any dimension: each written once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.checkpoint.reading import read, take
from paraflow.checkpoint.run import save, settle
from paraflow.checkpoint.writer import Writer
from paraflow.mesh import Mesh
from paraflow.parts import cut, local, part_for, whole
from paraflow.plan import Plan

pytestmark = pytest.mark.parity

SHAPES = [(12, 4), (7, 5), (24,), (13, 6)]


def mesh_of(**plan: int) -> Mesh:
    return Mesh(Plan(**plan), torch.device("cpu"))


def counted(*shape: int, start: float = 0) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + start


def save_here(state: dict[str, Any], mesh: Mesh, folder: str) -> None:
    writer = Writer()
    save(state, mesh, Path(folder), writer)
    assert settle(writer, mesh) is None


def layouts() -> Iterator[tuple[str, Any]]:
    """Ways in which two mesh dimensions divide a tensor, by what they are called."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    kinds = [Replicate(), Shard(0), Shard(1)]
    for outer in kinds:
        for inner in [*kinds, _StridedShard(0, split_factor=3), _StridedShard(1, split_factor=2)]:
            yield f"{outer} {inner}", (outer, inner)
    yield "in three parts", (_StridedShard(0, split_factor=3),)


def spread(value: torch.Tensor, mesh: Mesh, placements: Any) -> torch.Tensor | None:
    """A tensor laid out as torch itself would; None where torch cannot."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    devices = mesh.device_mesh("fsdp", "tp") if len(placements) == 2 else mesh.device_mesh("tp")
    if any(getattr(kind, "dim", 0) >= value.dim() for kind in placements):
        return None
    return distribute_tensor(value, devices, [Replicate()] * len(placements)).redistribute(placements=placements)


def fully_sharded(value: torch.Tensor, mesh: Mesh, parts: int) -> torch.Tensor:
    """A parameter split over ``tp``, perhaps as several in one, and then sharded over ``fsdp`` by torch."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    kind = Shard(0) if parts == 1 else _StridedShard(0, split_factor=parts)
    mine = torch.cat([piece.tensor_split([-(-len(piece) // 2)])[mesh.coordinate("tp")] for piece in value.chunk(parts)])
    layer = nn.Module()
    layer.weight = nn.Parameter(
        DTensor.from_local(mine, mesh.device_mesh("tp"), [kind], shape=value.shape, stride=value.stride())
    )
    fully_shard(layer, mesh=mesh.device_mesh("fsdp"))
    return layer.weight.detach()


def boxes_agree_with_torch(folder: str) -> list[str]:
    """Lays tensors out in every way, and compares what this rank has with what the boxes say; then by way of a disk."""
    mesh = mesh_of(fsdp=2, tp=2)
    state: dict[str, Any] = {}
    for shape in SHAPES:
        value = counted(*shape)
        state |= {f"{shape} {name}": spread(value, mesh, placements) for name, placements in layouts()}
        parts = [parts for parts in (1, 2, 3) if parts == 1 or shape[0] % (2 * parts) == 0]
        state |= {f"{shape} {n} parts, then fully sharded": fully_sharded(value, mesh, n) for n in parts}
    state = {name: part for name, part in state.items() if part is not None}
    save_here({"model": state}, mesh, folder)
    stored = take(Path(folder))["model"]
    wrong = [name for name, part in state.items() if not torch.equal(whole(part), counted(*part.shape))]
    wrong += [name for name, part in state.items() if not torch.equal(cut(counted(*part.shape), part), local(part))]
    return wrong + [n for n, part in state.items() if not torch.equal(local(part_for(stored[n], part)), local(part))]


def test_boxes_agree_with_what_torch_holds(ranks: Any, tmp_path: Path) -> None:
    for wrong in ranks(4, boxes_agree_with_torch, str(tmp_path / "a")):
        assert not wrong
    state = read(tmp_path / "a")["model"]
    assert len(state) > 50
    for name, value in state.items():
        assert torch.equal(value, counted(*value.shape)), name


X = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (64,), generator=torch.Generator().manual_seed(2))
SAVED, STEPS = 2, 4


class Net(nn.Module):
    """Layers to split and to cut between; the first and the last weight are tied, and a parameter is the root's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(8, 12)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.leave = nn.Linear(8, 12)
        self.leave.weight = self.enter.weight
        self.head, self.scale = nn.Linear(12, 3), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.enter(x))
        for block in self.blocks:
            hidden = block(hidden)
        hidden = torch.tanh(self.leave(hidden[:, :8]))
        logits: torch.Tensor = self.head(hidden) * self.scale
        return logits


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 20), nn.Linear(20, 12)
        self.register_buffer("shift", torch.linspace(0, 1, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x + self.shift))))
        return result


def trained(folder: str, steps: int, resume: str | None = None, **plan: Any) -> None:
    """Trains to a step, and saves."""
    net = pf.configure(
        Net(),
        optimizer="adamw",
        lr=1e-2,
        weight_decay=0.1,
        loss="cross_entropy",
        schedule="cosine",
        metrics=["accuracy"],
    )
    stop = pf.callbacks.LambdaCallback(on_step_end=lambda trainer, logs: trainer.stop() if trainer.step == steps else 0)
    best = pf.callbacks.EarlyStopping("loss", patience=99, restore_best=True)
    callbacks = [pf.callbacks.EMA(0.9, validate=False), best, stop, pf.callbacks.Checkpoint(folder, 1)]
    trainer = pf.Trainer(max_steps=STEPS, progress=False, callbacks=callbacks, clip_norm=1.0, seed=3, **plan)
    trainer.fit(net, (X, Y), batch_size=8, resume=resume)


PLANS: dict[int, list[dict[str, Any]]] = {
    2: [{"pp": 2}, {"tp": 2}],
    4: [
        {"pp": 2, "fsdp": 2},
        {"fsdp": 2, "tp": 2, "cpu_offload": "optimizer"},
        {"pp": 2, "tp": 2},
        {"pp": 2, "dp": 2, "accumulate": 2},
    ],
}


def named(plan: dict[str, Any]) -> str:
    return "-".join(f"{key}{value}" for key, value in plan.items())


def trained_under_each(home: str, plans: list[dict[str, Any]], start: str) -> None:
    for plan in plans:
        trained(f"{home}/begun-{named(plan)}", SAVED, **plan)
        trained(f"{home}/resumed-{named(plan)}", STEPS, start, **plan)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of one process: after some steps, and at the end."""
    folder = tmp_path_factory.mktemp("home")
    trained(str(folder / "one"), SAVED)
    trained(str(folder / "whole"), STEPS)
    return folder


def state_in(folder: Path) -> dict[str, Any]:
    return read(sorted(folder.glob("step-*"))[-1])


def differences(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Names what differs between two runs' states."""
    found = []
    for part in ("model", "optimizer", "schedule", "callbacks", "counters"):
        try:
            torch.testing.assert_close(comparable(mine[part]), comparable(theirs[part]), rtol=1e-4, atol=1e-6)
        except AssertionError as error:
            found.append(f"{part}: {error}")
    return found


def comparable(value: Any) -> Any:
    """Dicts and the parameters of a group in one order, and texts as numbers, which is what can be compared."""
    if isinstance(value, dict):
        pairs = ((key, value[key]) for key in sorted(value, key=str))
        return {key: comparable(sorted(child) if key == "params" else child) for key, child in pairs}
    if isinstance(value, (list, tuple)):
        return [comparable(child) for child in value]
    return crc32(str(value).encode()) if value is None or isinstance(value, str) else value


@pytest.mark.parametrize("size", PLANS)
def test_what_any_plan_saves_is_what_one_process_saves(ranks: Any, home: Path, size: int) -> None:
    ranks(size, trained_under_each, str(home), PLANS[size], str(home / "one"), timeout=120)
    wrong: dict[str, list[str]] = {}
    for name in map(named, PLANS[size]):
        wrong[f"saved {name}"] = differences(state_in(home / f"begun-{name}"), state_in(home / "one"))
        wrong[f"resumed {name}"] = differences(state_in(home / f"resumed-{name}"), state_in(home / "whole"))
        trained(str(home / f"alone-{name}"), STEPS, str(home / f"begun-{name}"))
        wrong[f"resumed alone {name}"] = differences(state_in(home / f"alone-{name}"), state_in(home / "whole"))
    assert {what: found for what, found in wrong.items() if found} == {}


def used_again(folder: str, plan: dict[str, Any]) -> dict[str, Any]:
    """A model that a plan has laid out is trained on by another Trainer, and takes up weights by name."""
    net = pf.configure(Net(), optimizer="sgd", lr=0.1, loss="cross_entropy")
    for epochs in (1, 2):
        trainer = pf.Trainer(max_epochs=epochs, progress=False, seed=3, **plan)
        trainer.fit(net, (X, Y), batch_size=16)
    trainer.save(f"{folder}/last")
    twice = trainer.engine.model_state()
    pf.checkpoint.load_model(net, f"{folder}/first")
    loaded = trainer.evaluate(net, (X, Y), batch_size=16)
    pf.checkpoint.load_model(net, f"{folder}/last")
    assert all(torch.equal(local(twice[name]), local(tensor)) for name, tensor in net.state_dict().items())
    return loaded


@pytest.mark.parametrize("plan", [{"pp": 2, "fsdp": 2}], ids=named)
def test_a_model_in_stages_is_trained_on_and_takes_up_weights(ranks: Any, tmp_path: Path, plan: dict[str, Any]) -> None:
    net = pf.configure(Net(), optimizer="sgd", lr=0.1, loss="cross_entropy")
    trainer = pf.Trainer(max_epochs=1, progress=False, seed=3)
    trainer.fit(net, (X, Y), batch_size=16)
    trainer.save(tmp_path / "first")
    expected = trainer.evaluate(net, (X, Y), batch_size=16)
    for found in ranks(4, used_again, str(tmp_path), plan):
        assert found == pytest.approx(expected, rel=1e-5)
    pf.Trainer(max_epochs=2, progress=False, seed=3).fit(net, (X, Y), batch_size=16)
    exported = pf.checkpoint.export(tmp_path / "last", tmp_path / "weights.safetensors")
    assert exported is not None
    other = Net()
    pf.checkpoint.load_model(other, tmp_path / "weights.safetensors")
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)
