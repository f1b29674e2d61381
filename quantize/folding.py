"""Folds AWQ's scales into the layer before: the norm or linear layer that computes an input divides it by its scale.

This is exact where results are linear in the divided weights: a norm's weight; up_proj, whose outputs are multiplied by
the gate's; v_proj, whose outputs attention averages (query heads that share a value head also share its scales).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from attrs import frozen
from torch import nn

from engine.core.errors import CheckpointError

NORMS = {"q_proj": "input_layernorm", "gate_proj": "post_attention_layernorm"}
"""First of the linear layers that share inputs -> the norm before them."""
LINEARS = {"down_proj": "mlp.up_proj", "o_proj": "self_attn.v_proj"}
"""Linear layer -> the linear layer before it."""


@frozen(kw_only=True)
class Fold:
    """Linear layers that share their inputs, and the layer that computes them. Names within the decoder layer."""

    linears: tuple[str, ...]
    before: str
    shared: torch.Tensor | None = None
    """[inputs] int64: the output of `before` from which each input comes; None: the same index."""

    def apply(self, layer: nn.Module, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Divide in the layer before, multiply the weights. Returns the scales after rounding: [inputs].

        scales: [inputs], equal where `shared` is. dtype: of the stored norm, which is rounded to it before the weights
        are multiplied, so that the two cancel up to rounding in float32.
        """
        source = layer.get_submodule(self.before)
        weight = _data(source, "weight")
        if isinstance(source, nn.Linear):
            outputs = scales
            if self.shared is not None:
                outputs = torch.empty(weight.shape[0], device=scales.device).index_copy_(0, self.shared, scales)
            weight /= outputs[:, None]
            if source.bias is not None:
                _data(source, "bias").div_(outputs)
        else:
            rounded = (weight / scales).to(dtype).float()
            lossless = (rounded != 0) & rounded.isfinite() & (weight != 0)
            scales = torch.where(lossless, weight / rounded, 1.0)
            weight.copy_(torch.where(lossless, rounded, weight))
        for name in self.linears:
            _data(layer.get_submodule(name), "weight").mul_(scales)
        return scales


def find_folds(layer: nn.Module, merged: Sequence[Sequence[str]], head_dim: int) -> list[Fold]:
    """The linear layers of a decoder layer that can be scaled, in the order of computation.

    merged: names of linear layers within it, grouped by shared inputs.
    Raises CheckpointError if the layer has none of the known names.
    """
    modules = dict(layer.named_modules())
    folds = []
    for names in merged:
        first = names[0].rpartition(".")[2]
        before = NORMS.get(first) or LINEARS.get(first)
        if before is None or before not in modules:
            raise CheckpointError(
                f"awq does not know what computes the inputs of {', '.join(names)}: it knows only the names of Llama's"
                " layers; use --method gptq"
            )
        source, inputs = modules[before], modules[names[0]].in_features
        shared = None
        if first == "o_proj":
            heads = torch.arange(inputs // head_dim)
            serves = inputs // source.out_features  # query heads per value head
            shared = ((heads // serves)[:, None] * head_dim + torch.arange(head_dim)).flatten()
            shared = shared.to(source.weight.device)
        folds.append(Fold(linears=tuple(names), before=before, shared=shared))
    return folds


def check_exact(
    layer: nn.Module, folds: Sequence[Fold], run: Callable[[nn.Module], torch.Tensor], dtype: torch.dtype
) -> None:
    """Scale a copy of a layer at random and compare its outputs. Raises CheckpointError if they differ.

    run: computes a layer's outputs for some inputs. A network with Llama's names may still differ from Llama: its norm
    may add 1 to the weight, or follow the layer that its name says it precedes.
    """
    copy = deepcopy(layer)
    for fold in folds:
        weight = layer.get_parameter(f"{fold.linears[0]}.weight")
        scales = torch.rand(weight.shape[1], generator=torch.Generator().manual_seed(0)) + 0.5
        scales = scales.to(weight.device)
        fold.apply(copy, scales if fold.shared is None else scales[fold.shared], dtype)
    expected, found = run(layer), run(copy)
    if not float((found - expected).norm()) < 1e-3 * float(expected.norm()):
        raise CheckpointError(
            "awq cannot scale this architecture: its layers bear the names of a Llama's, but scaling a norm's weight or"
            " a layer's outputs changes what they compute; use --method gptq"
        )


def _data(module: nn.Module, name: str) -> torch.Tensor:
    parameter = module.get_parameter(name)
    return parameter.data
