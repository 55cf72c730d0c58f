"""What the sizes of any transformer must satisfy."""

from __future__ import annotations

from typing import Protocol

from paraflow.errors import ModelError
from paraflow.nn.attention import check_heads


class TransformerSizes(Protocol):
    """The fields that the configurations of the transformer templates share."""

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def layers(self) -> int: ...  # noqa: D102
    @property
    def hidden(self) -> int: ...  # noqa: D102
    @property
    def heads(self) -> int: ...  # noqa: D102
    @property
    def kv_heads(self) -> int | None: ...  # noqa: D102
    @property
    def context(self) -> int: ...  # noqa: D102
    @property
    def mlp_ratio(self) -> float: ...  # noqa: D102
    @property
    def activation(self) -> str: ...  # noqa: D102
    @property
    def dropout(self) -> float: ...  # noqa: D102
    @property
    def norm(self) -> str: ...  # noqa: D102


def check_sizes(config: TransformerSizes) -> None:
    """Refuse sizes that no transformer can have.

    Raises:
        ModelError: With the field, the value given and what to write instead.
    """
    name = type(config).__name__
    for field in ("vocab_size", "layers", "hidden", "heads", "context", "mlp_ratio"):
        value = getattr(config, field)
        if value <= 0:
            raise ModelError(f"{name}({field}={value}) must be positive.")
    if not 0 <= config.dropout < 1:
        raise ModelError(f"{name}(dropout={config.dropout}) is a probability; give a number from 0 to below 1.")
    for field, known in (("activation", ("gelu", "swiglu")), ("norm", ("layer", "rms"))):
        value = getattr(config, field)
        if value not in known:
            raise ModelError(f'{name}({field}="{value}") is not known; write "{known[0]}" or "{known[1]}".')
    check_heads(config.hidden, config.heads, config.kv_heads)
