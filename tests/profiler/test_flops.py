"""Operations are those of a count by hand, counting leaves the results alone, and peaks are of the right device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from paraflow.profiler.flops import FlopCounter, _spread_over
from paraflow.profiler.peaks import peak_flops


def count(step: Any) -> FlopCounter:
    with FlopCounter() as counter:
        loss = step()
        counter.in_backward = True
        loss.backward()
    return counter


def test_a_linear_network_by_hand() -> None:
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    x = torch.randn(7, 10)
    forward = 7 * 2 * (10 * 20 + 20 * 5)
    backward = 2 * forward - 7 * 2 * 10 * 20  # nobody asks for the gradient of the input
    assert count(lambda: net(x).sum()).model == forward + backward
    x.requires_grad_()
    assert count(lambda: net(x).sum()).model == 3 * forward


def test_a_convolution_by_hand() -> None:
    net = nn.Conv2d(3, 8, kernel_size=3, padding=1)
    forward = 2 * (2 * 8 * 6 * 6) * (3 * 3 * 3)
    assert count(lambda: net(torch.randn(2, 3, 6, 6)).sum()).model == 2 * forward


def test_attention_by_hand() -> None:
    q = torch.randn(2, 3, 8, 4, requires_grad=True)
    forward = 2 * 3 * 2 * (2 * 8 * 8 * 4)  # scores, and the mean of the values
    # Backward makes the scores again, and then two products for each of the two.
    assert count(lambda: functional.scaled_dot_product_attention(q, q, q).sum()).model == forward * 3.5


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_is_told_apart(reentrant: bool) -> None:
    net = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 5), nn.Tanh())
    x = torch.randn(7, 10, requires_grad=True)
    counter = count(lambda: checkpoint(net, x, use_reentrant=reentrant).sum())
    forward = 7 * 2 * (10 * 20 + 20 * 5)
    assert counter.model == 3 * forward
    assert counter.recomputed == forward


def test_counting_changes_nothing_and_ends() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)), torch.randn(3, 4)

    def step() -> list[torch.Tensor]:
        net.zero_grad()
        torch.manual_seed(1)
        net(x).sum().backward()
        return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]

    plain = step()
    with FlopCounter() as counter:
        counted = step()
    assert all(torch.equal(one, other) for one, other in zip(plain, counted, strict=True))
    before = counter.model
    step()
    counter.close()
    assert counter.model == before > 0


def test_it_ends_with_an_error() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"), FlopCounter() as counter:
        nn.Linear(3, 3)(torch.zeros(2, 4))
    nn.Linear(3, 3)(torch.zeros(2, 3))
    assert counter.model == 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


def test_a_compiled_module_is_counted_and_is_compiled_afterwards() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    net = Net()
    net.compile(backend=backend)
    assert count(lambda: net(torch.randn(7, 10)).sum()).model == 2 * 7 * 2 * 10 * 20
    assert not graphs
    net(torch.randn(7, 10))
    assert len(graphs) == 1


def _distributed_product() -> tuple[float, float]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    weight, x = torch.randn(10, 20), torch.randn(7, 10)
    columns, whole = distribute_tensor(weight, mesh, [Shard(1)]), distribute_tensor(x, mesh, [Replicate()])
    with FlopCounter() as counter:
        product = whole @ columns
    return counter.model, float((product.full_tensor() - x @ weight).abs().max())


def test_of_an_operation_on_distributed_tensors_a_rank_counts_its_part(ranks: Any) -> None:
    for operations, difference in ranks(2, _distributed_product):
        assert operations == 7 * 2 * 10 * 20 / 2
        assert difference < 1e-5
    assert _spread_over((torch.zeros(2), 3)) == 1


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-PCIE-40GB", "tf32", 156),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA L4", "bf16", 121),
        ("Tesla T4", "fp16", 65),
        ("Tesla T4", "bf16", None),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 3090", "fp32", 35.6),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA L40", "bf16", None),
        ("NVIDIA T400", "fp16", None),
        ("", "fp16", None),
    ],
)
def test_a_device_is_known_by_its_whole_name(name: str, precision: str, tera: float | None) -> None:
    assert peak_flops(name, precision) == (None if tera is None else pytest.approx(tera * 1e12))
