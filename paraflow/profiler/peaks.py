"""What devices can do at most: dense floating-point operations a second, from their makers' data sheets."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from paraflow.mesh import Mesh

_TERA = 1e12
_PRECISIONS = ("fp32", "tf32", "fp16", "bf16")

# Dense, without sparsity, sums in fp32; 0 where the device has no units for a format. In the order in which they are
# tried: a form (PCIe, NVL) comes before the model it is a form of.
_PEAKS: tuple[tuple[str, tuple[float, float, float, float]], ...] = (
    (r"GB200", (80, 1250, 2500, 2500)),
    (r"B200", (75, 1125, 2250, 2250)),
    (r"GH200( \d+GB)?", (67, 494.7, 989.4, 989.4)),
    (r"H200 NVL", (60, 417.5, 835.5, 835.5)),
    (r"H200", (67, 494.7, 989.4, 989.4)),
    (r"H100 NVL", (60, 417.5, 835.5, 835.5)),
    (r"H100 PCIe", (51, 378, 756, 756)),
    (r"H100( SXM5)?( \d+GB HBM\d)?", (67, 494.7, 989.4, 989.4)),
    (r"A100( PG\d+ \d+| SXM4?| PCIe)?( \d+GB)?( PCIe)?", (19.5, 156, 312, 312)),
    (r"L40S", (91.6, 183, 362.05, 362.05)),
    (r"L4", (30.3, 60, 121, 121)),
    (r"T4", (8.1, 0, 65, 0)),
    (r"V100 PCIe( \d+GB)?", (14, 0, 112, 0)),
    (r"V100( SXM\d)?( \d+GB)?( LS)?", (15.7, 0, 125, 0)),
    (r"RTX 4090", (82.6, 82.6, 165.2, 165.2)),
    (r"RTX 3090", (35.6, 35.6, 71, 71)),
    (r"MI300X( OAM)?", (163.4, 653.7, 1307.4, 1307.4)),
)
_MAKER = re.compile(r"^((NVIDIA|AMD|Tesla|GeForce|Instinct|Graphics|Device) )+", re.IGNORECASE)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Returns a device's dense peak.

    Args:
        device_name: As torch gives it, such as ``"NVIDIA A100-SXM4-80GB"``. The whole name must fit: a laptop's chip or
            a part of a device (MIG) that shares a model's number has another peak.
        precision: What matrix products are made in: ``"fp32"``, ``"tf32"``, ``"fp16"`` or ``"bf16"``.

    Returns:
        Floating-point operations a second, or None where they are not known here.

    Example:
        >>> peak_flops("NVIDIA A100-SXM4-80GB", "bf16"), peak_flops("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16")
        (312000000000000.0, None)
    """
    name = _MAKER.sub("", re.sub(r"[-_\s]+", " ", device_name.strip()))
    for pattern, peaks in _PEAKS:
        if re.fullmatch(pattern, name, re.IGNORECASE):
            return dict(zip(_PRECISIONS, peaks, strict=True)).get(precision, 0) * _TERA or None
    return None


def all_peaks(mesh: Mesh, of_this_device: float | None = None) -> float:
    """Returns what the devices of all ranks can do in a second at the plan's precision, or 0 if one's is not known.

    It is a collective. For fp32, torch's settings say whether matrix products are made in TF32.

    Args:
        mesh: The ranks.
        of_this_device: What this rank's device can do, instead of what the table says.
    """
    mine = of_this_device or _peak_here(mesh) or 0.0
    peaks = torch.cat(mesh.all_gather(torch.tensor([mine], dtype=torch.float64)))
    return float(peaks.sum()) if bool(peaks.all()) else 0.0


def _peak_here(mesh: Mesh) -> float | None:
    if mesh.device.type != "cuda":
        return None
    tf32 = mesh.plan.precision == "fp32" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return peak_flops(torch.cuda.get_device_name(mesh.device), "tf32" if tf32 else mesh.plan.precision)
