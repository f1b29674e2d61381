"""Modules that stand in the library's model for the engine's layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from engine.core.layers import Embedding, Linear, OutputLayer, PartialLinear, RMSNorm, RotaryEmbedding
from engine.plugins.models.fallback.attention import AttentionCalls


class LinearModule(nn.Module):
    """A linear layer of the engine."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear
        self.in_features, self.out_features = linear.spec.in_features, linear.spec.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., inputs] -> [..., outputs], of this rank."""
        if x.dim() == 2:
            return self._linear(x)
        return self._linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class MergedLinear:
    """Linear modules with one input as one layer of the engine: the first call computes the outputs of all."""

    def __init__(self, linear: Linear, sizes: Sequence[int]) -> None:
        """sizes: outputs of each module, of this rank."""
        self._linear = LinearModule(linear)
        self._sizes = list(sizes)
        self._input: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()

    def output(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """The output of module number `index`. Nothing is kept after the call for the last module."""
        if self._input is not x:
            self._input = x
            self._outputs = self._linear(x).split_with_sizes(self._sizes, -1)
        found = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._input, self._outputs = None, ()
        return found


class MergedPart(nn.Module):
    """One module of a MergedLinear."""

    def __init__(self, merged: MergedLinear, index: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self._merged = merged
        self._index = index
        self.in_features, self.out_features = in_features, out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., inputs] -> [..., outputs], of this rank."""
        return self._merged.output(self._index, x)


class EmbeddingModule(nn.Module):
    """A token embedding of the engine."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self._embedding = embedding

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: [1, tokens] -> [1, tokens, hidden_size]."""
        return self._embedding(tokens.view(-1)).unsqueeze(0)


class HeadModule(nn.Module):
    """An output layer of the engine, with the bias that some architectures add."""

    bias: torch.Tensor | None

    def __init__(self, head: OutputLayer) -> None:
        super().__init__()
        self._head = head
        self.register_parameter("bias", None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [1, rows, hidden_size] -> [1, rows, vocab_size]."""
        logits = self._head(hidden.view(-1, hidden.shape[-1])).unsqueeze(0)
        return logits if self.bias is None else logits + self.bias


class RMSNormModule(nn.Module):
    """A norm of the engine."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self._norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size] -> the same shape."""
        return self._norm(x)[0]


class GatedModule(nn.Module):
    """A gated MLP of the engine's linear layers."""

    def __init__(self, gate_up: Linear, down: PartialLinear) -> None:
        super().__init__()
        self._gate_up = gate_up
        self._down = down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., hidden_size] -> the same shape."""
        rows = x.reshape(-1, x.shape[-1])
        return self._down(self._gate_up.gated_quantized_for(self._down.linear, rows)).reduce().view(x.shape)


class AttentionModule(nn.Module):
    """Attention of the engine: projections, norm of heads, rotary embedding, KV cache, output projection."""

    def __init__(
        self, qkv: Linear, attention: Any, output: Linear, rotary: RotaryEmbedding, calls: AttentionCalls
    ) -> None:
        """attention: of LayerFactory.attention."""
        super().__init__()
        self._qkv = qkv
        self._attention = attention
        self._output = output
        self._rotary = rotary
        self._calls = calls

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> tuple[torch.Tensor, None]:
        """hidden_states: [1, tokens, hidden_size] -> the same shape, and no attention weights. Ignores the rest."""
        run, _, _ = self._calls.next_call(self)
        attended = self._attention(run, self._qkv(hidden_states[0]), self._calls.angles(self._rotary, run))
        return self._output(attended)[None], None
