"""Where AWQ's scales go: an input is divided by its scale in what computes it, a norm or another linear layer.

Exact where that is linear: a norm's weight; the outputs of up_proj, which are multiplied by the gate's; the outputs of
v_proj, which attention averages (each of its heads serves several query heads, which then share its scales).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from attrs import frozen
from torch import nn

from engine.core.errors import CheckpointError

NORMS = {"q_proj": "input_layernorm", "gate_proj": "post_attention_layernorm"}
"""First of the linear layers that share their inputs -> the norm before them."""
LINEARS = {"down_proj": "mlp.up_proj", "o_proj": "self_attn.v_proj"}
"""Linear layer -> the one before it."""


@frozen(kw_only=True)
class Fold:
    """Linear layers that share their inputs, and what these inputs come from. Names within the decoder layer."""

    linears: tuple[str, ...]
    before: str
    shared: torch.Tensor | None = None
    """[inputs] int64: the output of `before` that each input comes from; None: the one of its own number."""

    def apply(self, layer: nn.Module, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Divide what computes the inputs, multiply the weights; returns the scales as they turned out, [inputs].

        scales: [inputs], equal where `shared` is. dtype: a norm is stored in it, and is rounded to it before the
        weights are multiplied, so that the two cancel but for float32's own rounding.
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
    """What can be scaled in a decoder layer, in the order in which it is computed.

    merged: names of linear layers within it, those that share their inputs together.
    Raises CheckpointError for a layer that has none of the known names.
    """
    modules = dict(layer.named_modules())
    folds = []
    for names in merged:
        first = names[0].rpartition(".")[2]
        before = NORMS.get(first) or LINEARS.get(first)
        if before is None or before not in modules:
            raise CheckpointError(
                f"awq does not know what computes the inputs of {', '.join(names)}: it wants the layers of a Llama;"
                " use --method gptq"
            )
        source, inputs = modules[before], modules[names[0]].in_features
        shared = None
        if first == "o_proj":
            heads = torch.arange(inputs // head_dim)
            serves = inputs // source.out_features  # query heads that one head of values serves
            shared = ((heads // serves)[:, None] * head_dim + torch.arange(head_dim)).flatten()
            shared = shared.to(source.weight.device)
        folds.append(Fold(linears=tuple(names), before=before, shared=shared))
    return folds


def check_exact(
    layer: nn.Module, folds: Sequence[Fold], run: Callable[[nn.Module], torch.Tensor], dtype: torch.dtype
) -> None:
    """Scale a copy of a layer at random and compare its outputs. Raises CheckpointError where they differ.

    run: the outputs of a layer for some inputs. The names of a Llama may hide another network: a norm that adds 1 to
    its weight, or stands behind what it is named before.
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
