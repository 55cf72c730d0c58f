"""Finds what can be split by its shapes: attention, feed-forward layers, the vocabulary. Nothing here needs ranks.

Only what is known to stay right is found: layers of the names that models use, whose sizes fit together, in modules
that read their number of heads off shapes or from attributes that can be set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paraflow.tensor_parallel.reading import is_readable, mentions, source_of

SMALLEST_VOCABULARY = 1_000
"""Rows of an embedding, or classes of an output layer, from which on splitting them is worth a message."""

_ATTENTION = (
    ("query", "key", "value", "out"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("self.query", "self.key", "self.value", "output.dense"),
    ("attention.query", "attention.key", "attention.value", "output.dense"),
    ("q_lin", "k_lin", "v_lin", "out_lin"),
    ("wq", "wk", "wv", "wo"),
    ("q", "k", "v", "o"),
)
_FEED_FORWARD = (
    (("gate", "up"), "down"),
    (("up",), "down"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("c_fc",), "c_proj"),
    (("fc1",), "fc2"),
    (("lin1",), "lin2"),
    (("linear1",), "linear2"),
    (("intermediate.dense",), "output.dense"),
    (("w1", "w3"), "w2"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
)
_HEAD_SIZES = ("head_dim", "attention_head_size", "dim_per_head", "key_value_proj_dim")
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_COUNTS_ALL_HEADS = re.compile(
    r"config\.(num_attention_heads|num_key_value_heads|hidden_size|n_heads?|num_heads|n_embd)\b|\bposition_bias\b"
)
_OF_FREQUENCIES = re.compile(r"freq|rotary|cos|sin")
_OF_POSITIONS = re.compile(r"pos|wpe")
_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU),
    *(nn.Softplus, nn.Softsign, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.Dropout),
)


@dataclass(frozen=True)
class Attention:
    """An attention whose heads can be shared out.

    Attributes:
        name: The module whose forward has the heads.
        query, key, value: The names of the projections; the same name where one layer makes all three.
        out: The name of the projection behind them.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Features of a head.
        norms: Modules that see the features of one head at a time: their gradients are sums over the heads.
    """

    name: str
    query: str
    key: str
    value: str
    out: str
    heads: int
    kv_heads: int
    head_dim: int
    norms: tuple[str, ...] = ()

    @property
    def fused(self) -> bool:
        """Whether one layer makes queries, keys and values."""
        return self.query == self.key

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of its layers, each once."""
        return tuple(dict.fromkeys((self.query, self.key, self.value, self.out)))


@dataclass(frozen=True)
class FeedForward:
    """Layers into inner features, of which each is treated by itself, and the layer back out.

    Attributes:
        name: The module that they are in.
        columns: The names of the layers into the inner features.
        rows: The name of the layer out of them.
        inner: The inner features.
    """

    name: str
    columns: tuple[str, ...]
    rows: str
    inner: int

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of its layers."""
        return (*self.columns, self.rows)


def sizes_of(module: nn.Module | None) -> tuple[int, int] | None:
    """Returns the input and output features of a linear layer that computes as torch's or transformers' own, or None.

    Example:
        >>> sizes_of(nn.Linear(2, 3)), sizes_of(nn.ReLU())
        ((2, 3), None)
    """
    weight = None if module is None else module._parameters.get("weight")
    if module is None or weight is None or weight.dim() != 2 or hasattr(weight, "to_local"):
        return None
    if not is_linear(module):
        return None
    return (weight.shape[1], weight.shape[0]) if isinstance(module, nn.Linear) else (weight.shape[0], weight.shape[1])


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes as torch's linear layer or transformers' ``Conv1D``; its weight may be elsewhere."""
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward and "forward" not in vars(module)
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and "forward" not in vars(module)


def child(owner: nn.Module, path: str) -> nn.Module | None:
    """Returns a module by its path inside another, or None where there is none."""
    found: Any = owner
    for part in path.split("."):
        found = found._modules.get(part) if isinstance(found, nn.Module) else None
    return found if isinstance(found, nn.Module) else None


def joined(prefix: str, name: str) -> str:
    """Returns the name of a module inside another.

    Example:
        >>> joined("blocks.0", "attention"), joined("", "head")
        ('blocks.0.attention', 'head')
    """
    return f"{prefix}.{name}" if prefix and name else prefix or name


def find_attentions(module: nn.Module) -> list[Attention]:
    """Returns the attentions of a model whose heads can be shared out, in its order."""
    found: list[Attention] = []
    taken: set[str] = set()
    for name, owner in module.named_modules():
        attention = _attention_in(name, owner) or _fused_attention(name, owner)
        if attention is not None and taken.isdisjoint(attention.layers):
            found.append(attention)
            taken.update(attention.layers)
    return found


def _attention_in(name: str, owner: nn.Module) -> Attention | None:
    for paths in _ATTENTION:
        sizes = [sizes_of(child(owner, path)) for path in paths]
        if any(size is None for size in sizes):
            continue
        holder_path = paths[0].rpartition(".")[0]
        holder = child(owner, holder_path) if holder_path else owner
        query, key, value, out = (size for size in sizes if size is not None)
        assert holder is not None
        if key[1] != value[1] or query[1] != out[0] or key[1] > query[1]:
            return None
        head_dim = _head_dim(holder, query[1])
        if head_dim is None or query[1] % head_dim or key[1] % head_dim or query[1] % key[1]:
            return None
        inside = {path.rpartition(".")[2] for path in paths if path.rpartition(".")[0] == holder_path}
        norms = _norms(holder, inside, head_dim)
        if norms is None or not _may_be_shared_out(holder, {query[1] // head_dim, key[1] // head_dim}):
            return None
        inner = joined(name, holder_path)
        return Attention(
            inner,
            *_four([joined(name, path) for path in paths]),
            heads=query[1] // head_dim,
            kv_heads=key[1] // head_dim,
            head_dim=head_dim,
            norms=tuple(joined(inner, norm) for norm in norms),
        )
    return None


def _four(names: list[str]) -> tuple[str, str, str, str]:
    query, key, value, out = names
    return query, key, value, out


def _fused_attention(name: str, owner: nn.Module) -> Attention | None:
    """GPT-2's, whose one projection is cut by an attribute that can be set."""
    fused, out = sizes_of(child(owner, "c_attn")), sizes_of(child(owner, "c_proj"))
    if fused is None or out is None or fused[1] != 3 * out[0]:
        return None
    width, head_dim = getattr(owner, "split_size", None), getattr(owner, "head_dim", None)
    if width != out[0] or not head_dim or width % head_dim or not mentions(type(owner), "split_size"):
        return None
    if _norms(owner, {"c_attn", "c_proj"}, head_dim) is None or not _may_be_shared_out(owner, {width // head_dim}):
        return None
    qkv = joined(name, "c_attn")
    heads = width // head_dim
    return Attention(name, qkv, qkv, qkv, joined(name, "c_proj"), heads, heads, head_dim)


def _head_dim(holder: nn.Module, features: int) -> int | None:
    for attribute in _HEAD_SIZES:
        if isinstance(size := getattr(holder, attribute, None), int) and size > 0:
            return size
    for attribute in _HEAD_COUNTS:
        if isinstance(count := getattr(holder, attribute, None), int) and count > 0 and features % count == 0:
            return features // count
    return None


def _norms(holder: nn.Module, projections: set[str], head_dim: int) -> tuple[str, ...] | None:
    """What else has parameters in an attention: norms over the features of a head; None if there is anything else."""
    if any(parameter is not None for parameter in holder._parameters.values()):
        return None
    norms = []
    for name, inner in holder.named_children():
        shapes = [tuple(parameter.shape) for parameter in inner.parameters()]
        if name in projections or not shapes:
            continue
        if any(shape != (head_dim,) for shape in shapes):
            return None
        norms.append(name)
    return tuple(norms)


def find_feed_forwards(module: nn.Module, taken: set[str]) -> list[FeedForward]:
    """Returns the pairs of layers whose inner features can be shared out, in the model's order.

    Args:
        module: The model.
        taken: Names of layers that something else has a use for.
    """
    found: list[FeedForward] = []
    taken = set(taken)
    for name, owner in module.named_modules():
        if not is_readable(type(owner)):
            continue
        for pair in (*_named_pairs(name, owner), *_pairs_in_sequence(name, owner)):
            if taken.isdisjoint(pair.layers):
                found.append(pair)
                taken.update(pair.layers)
    return found


def _named_pairs(name: str, owner: nn.Module) -> Iterator[FeedForward]:
    for columns, rows in _FEED_FORWARD:
        into = [sizes_of(child(owner, path)) for path in columns]
        out = sizes_of(child(owner, rows))
        if out is None or any(size != (out[1], out[0]) for size in into):
            continue
        if "." not in rows and len(columns) == 1 and sizes_of(child(owner, "gate")) is not None:
            continue  # the gate is of other sizes: not what the name says
        yield FeedForward(name, tuple(joined(name, path) for path in columns), joined(name, rows), out[0])
        return


def _pairs_in_sequence(name: str, owner: nn.Module) -> Iterator[FeedForward]:
    if not isinstance(owner, nn.Sequential) or type(owner).forward is not nn.Sequential.forward:
        return
    first: tuple[str, int] | None = None
    for key, layer in owner.named_children():
        size = sizes_of(layer)
        if size is not None and first is not None and size[0] == first[1]:
            yield FeedForward(name, (joined(name, first[0]),), joined(name, key), first[1])
            first = None
        elif size is not None:
            first = key, size[1]
        elif type(layer) not in _ELEMENTWISE:
            first = None


def find_embeddings(module: nn.Module) -> list[str]:
    """Returns the names of the token embeddings that can be split by their rows: of the largest table, if it is large.

    Tables of positions are none, and one that some forward uses by name in another way is left alone.
    """
    tables = [
        (name, table)
        for name, table in module.named_modules()
        if _is_plain_table(table) and not _OF_POSITIONS.search(name.rpartition(".")[2])
    ]
    largest: Any = max((table for _, table in tables), key=lambda table: table.num_embeddings, default=None)
    if largest is None or largest.num_embeddings < SMALLEST_VOCABULARY:
        return []
    same = [name for name, table in tables if table._parameters["weight"] is largest._parameters["weight"]]
    attributes = {name.rpartition(".")[2] for name in same}
    classes = {type(owner) for owner in module.modules()}
    if any(_uses_the_weight(kind, attribute) for kind in classes for attribute in attributes):
        return []
    return same


def _is_plain_table(module: nn.Module) -> bool:
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return False
    weight = module._parameters.get("weight")
    plain = module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
    return plain and weight is not None and not hasattr(weight, "to_local")


def find_heads(module: nn.Module, tables: list[str], taken: set[str]) -> list[str]:
    """Returns the names of the output layers whose classes can be split.

    They are what is tied to a split embedding, and the model's last layer, where it has many classes.

    Args:
        module: The model.
        tables: The embeddings that are split.
        taken: Names of layers that lie inside attention or feed-forward layers.
    """
    weights = {id(module.get_submodule(name)._parameters["weight"]) for name in tables}
    layers = [(name, layer) for name, layer in module.named_modules() if is_linear(layer)]
    tied = [name for name, layer in layers if id(layer._parameters["weight"]) in weights]
    if tied or not layers:
        return tied
    name, last = layers[-1]
    size = sizes_of(last)
    tied_elsewhere = (
        sum(layer._parameters.get("weight") is last._parameters["weight"] for layer in module.modules()) > 1
    )
    large = size is not None and size[1] >= SMALLEST_VOCABULARY and not tied_elsewhere
    return [name] if large and name not in taken and not _in_a_list(module, name) else []


def _in_a_list(module: nn.Module, name: str) -> bool:
    """Whether a module is part of something repeated."""
    parts = name.split(".")
    return any(isinstance(module.get_submodule(".".join(parts[:n])), nn.ModuleList) for n in range(1, len(parts)))


def _uses_the_weight(kind: type, attribute: str) -> bool:
    return re.search(rf"\bself\.{attribute}\.weight\b", source_of(kind)) is not None


def _may_be_shared_out(holder: nn.Module, heads: set[int]) -> bool:
    """Whether nothing says that a forward needs all heads: not its code, nor a buffer of one row a head."""
    if not is_readable(type(holder)) or _COUNTS_ALL_HEADS.search(source_of(type(holder))):
        return False
    buffers = {name: b for name, b in holder._buffers.items() if b is not None and not _OF_FREQUENCIES.search(name)}
    return not any(next((size for size in b.shape if size > 1), 0) in heads for b in buffers.values())


def parameters_of(module: nn.Module, name: str) -> list[torch.Tensor]:
    """Returns the parameters that a layer has by itself."""
    return [p for p in module.get_submodule(name)._parameters.values() if p is not None]
