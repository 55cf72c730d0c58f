"""What one rank sees of its software: versions, devices, backends, and the environment variables that matter."""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PACKAGES = ("paraflow", "torch", "numpy", "torchmetrics", "safetensors")
_PREFIXES = ("MASTER_", "NCCL_", "GLOO_", "TORCH_", "TORCHELASTIC_", "OMP_", "MKL_", "CUDA_VISIBLE_", "SLURM_PROCID")
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def software_facts() -> dict[str, Any]:
    """The facts of this process's software: numbers, texts, lists and dicts only; None is "not there"."""
    return {
        "versions": versions(),
        "devices": devices(),
        "backends": {name: getattr(dist, f"is_{name}_available")() for name in ("gloo", "nccl", "mpi", "ucc")},
        "environment": environment(),
        "threads": torch.get_num_threads(),
        "nvidia_driver": nvidia_driver(),
        "unrelated_apex": has_unrelated_apex(),
    }


def versions() -> dict[str, str | None]:
    """The versions of Python, of the packages, and of the CUDA and NCCL that torch was built with."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    found["torch"] = torch.__version__  # says which build it is
    found["cuda"] = torch.version.cuda
    found["nccl"] = None
    if torch.cuda.is_available() and dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def devices() -> list[dict[str, Any]]:
    """The accelerators that this process sees: name, bytes of memory in all and free, and whether bf16 is native."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        with torch.cuda.device(index):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        found.append({"name": properties.name, "memory": total, "free": free, "bf16": bf16})
    if not found and torch.backends.mps.is_available():
        found.append({"name": "Apple MPS", "memory": torch.mps.recommended_max_memory(), "free": None, "bf16": True})
    return found


def environment() -> dict[str, str]:
    """The environment variables that change what a run does, by name."""
    return {name: value for name, value in sorted(os.environ.items()) if name in _NAMES or name.startswith(_PREFIXES)}


def nvidia_driver() -> bool:
    """Whether this host has an NVIDIA driver, seen without torch."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def has_unrelated_apex() -> bool:
    """Whether the package `apex` is the one of PyPI, which is not NVIDIA's and has no `apex.amp`."""
    try:
        files = metadata.distribution("apex").files
    except metadata.PackageNotFoundError:
        return False
    return files is not None and not any(file.parts[:2] == ("apex", "amp") for file in files)
