"""The layers that the model templates are made of."""

from __future__ import annotations

from paraflow.nn.attention import SelfAttention
from paraflow.nn.block import TransformerBlock
from paraflow.nn.feed_forward import FeedForward
from paraflow.nn.init import Embedding, Linear, residual_std
from paraflow.nn.rotary import Rotary

__all__ = ["Embedding", "FeedForward", "Linear", "Rotary", "SelfAttention", "TransformerBlock", "residual_std"]
