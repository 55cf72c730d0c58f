"""Random numbers under tensor parallelism: alike where ranks hold the same activations, different where they do not.

All ranks of a replica share a seed, so dropout on what they hold alike drops alike. Where each has activations of its
own (its heads, its inner features, its share of a sequence), a rank draws from a stream of its own. Its seed is made
from the state of the default generator, so that what puts the generator back (recomputation, a resumed run) puts the
streams back too; and the generator goes on by one number where anything was drawn. Where nothing was, a run draws what
one process would.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Any

import torch
from torch import nn

from paraflow.tensor_parallel.reading import is_readable, source_of

_DRAWS = re.compile(r"\b(\w*dropout\d?d?|bernoulli_?|rand\w*|scaled_dot_product_attention)\(")
_STRIDE = 0x9E3779B97F4A7C15  # the odd number next to 2^64 divided by the golden ratio: seeds far apart


class OwnStream:
    """Has what is random drawn from a stream of this rank's own, between `begin` and `end`.

    Args:
        place: This rank's place among those that share the activations.
        device: Where random numbers are drawn.

    Example:
        >>> stream = OwnStream(place=1, device=torch.device("cpu"))
        >>> torch.manual_seed(0); stream.begin(); own = torch.rand(2); stream.end(); after = torch.rand(2)
        <torch._C.Generator object at ...>
        >>> _ = torch.manual_seed(0); _ = OwnStream(0, torch.device("cpu")).begin(); bool((torch.rand(2) == own).any())
        False
    """

    def __init__(self, place: int, device: torch.device) -> None:
        self._place = place
        self._device = device
        self._outer: torch.Tensor | None = None
        self._begun: torch.Tensor | None = None
        self._in_backward = False

    def begin(self) -> None:
        """Goes over to the own stream; nothing happens where it has begun, or where nothing is computed for real."""
        in_backward = torch._C._current_graph_task_id() != -1
        if _is_fake() or (self._outer is not None and self._in_backward == in_backward):
            return
        generator = self._generator
        self._outer, self._in_backward = generator.get_state(), in_backward
        digest = blake2b(self._outer.numpy().tobytes(), digest_size=8).digest()
        generator.manual_seed((int.from_bytes(digest, "little") + self._place * _STRIDE) % 2**63)
        self._begun = generator.get_state()

    def end(self) -> None:
        """Goes back to the default stream, where it was left."""
        if self._outer is None or self._begun is None:
            return
        generator = self._generator
        drew = not torch.equal(generator.get_state(), self._begun)
        generator.set_state(self._outer)
        self._outer = self._begun = None
        if drew:  # the next stream is another one
            torch.empty((), dtype=torch.int64, device=self._device).random_()

    def reset(self) -> None:
        """Goes back to the default stream from a forward that was broken off.

        What runs a forward again in backward puts the generator back by itself, perhaps before its end.
        """
        if self._in_backward:
            self._outer = self._begun = None
        self.end()

    @property
    def _generator(self) -> torch.Generator:
        if self._device.type == "cuda":
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            return torch.cuda.default_generators[index]
        return torch.default_generator


class Drops:
    """Whether any dropout inside a module is active.

    Args:
        module: The module; its dropout layers are found, and its own attributes that are called so. Where code calls
            a function that drops, its rate is not known: it counts as active, which costs little where nothing is
            drawn.

    Example:
        >>> drops = Drops(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
        >>> bool(drops), bool(Drops(nn.Linear(2, 2)))
        (True, False)
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._rates = [
            (inner, name)
            for inner in module.modules()
            for name, value in vars(inner).items()
            if isinstance(value, (int, float)) and ((_is_dropout(inner) and name == "p") or _names_dropout(name))
        ]
        own = {type(inner) for inner in module.modules() if not type(inner).__module__.startswith("torch.")}
        self._calls = any(not is_readable(kind) or _DRAWS.search(source_of(kind)) for kind in own)

    def __bool__(self) -> bool:
        return self._module.training and (self._calls or any(getattr(inner, name) > 0 for inner, name in self._rates))


def own_stream_between(columns: nn.Module, rows: nn.Module, drops: Drops, stream: OwnStream) -> None:
    """Goes over to the own stream behind a column-split layer, and back in front of the row-split one."""

    def begin(layer: nn.Module, inputs: Any, output: Any) -> None:
        if drops:
            stream.begin()

    def end(layer: nn.Module, inputs: Any) -> None:
        stream.end()

    columns.register_forward_hook(begin)
    rows.register_forward_pre_hook(end)


def _is_dropout(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd)


def _names_dropout(name: str) -> bool:
    return "dropout" in name or name.endswith(("_pdrop", "_drop"))


def _is_fake() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
