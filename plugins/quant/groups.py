"""Assigns this rank's inputs to groups that share a scale, and checks that the assignment can be served."""

from __future__ import annotations

import torch

from engine.core.errors import CheckpointError
from engine.plugins.quant.w4a16 import GroupScheme


def group_of(
    name: str, stored: torch.Tensor | None, scheme: GroupScheme, inputs: int, total: int, *, ordered: bool
) -> torch.Tensor | None:
    """The group of each of this rank's inputs: [inputs] int32. None: groups are consecutive inputs.

    name: of the tensor (g_idx). stored: this rank's part of it; None or empty: groups are consecutive. inputs: this
    rank's; total: over all ranks. ordered: act-order; the rank then has the scales of all groups. Otherwise it has the
    scales of its own groups, and a group must not span ranks.

    Raises CheckpointError for a tensor of another size, for groups that do not exist or of unequal size, and for a rank
    whose scales and inputs are of different groups.
    """
    shared = inputs != total
    if stored is None or stored.numel() == 0:
        if shared and ordered:
            raise CheckpointError(
                f"the checkpoint lacks {name}, which act-order needs where {total // inputs} ranks share the inputs;"
                " use one rank"
            )
        return None
    if tuple(stored.shape) != (inputs,):
        raise CheckpointError(f"tensor {name} has shape {list(stored.shape)}; the model expects [{inputs}] or none")
    size = total if scheme.group_size == -1 else scheme.group_size
    consecutive = torch.arange(inputs, device=stored.device, dtype=torch.int64) // size
    found = stored.to(torch.int64)
    if shared and ordered:
        if int(found.min()) < 0 or int(found.max()) >= scheme.groups(total):
            raise CheckpointError(
                f"tensor {name} has groups {int(found.min())} to {int(found.max())}; expected 0 to"
                f" {scheme.groups(total) - 1}"
            )
        return found.to(torch.int32)
    if shared:
        if not torch.equal(found - found[0], consecutive):
            raise CheckpointError(
                f"tensor {name} has act-order, which quantization_config does not say (desc_act, actorder), so that"
                f" {total // inputs} ranks cannot share these inputs; use one rank"
            )
        return None
    if torch.equal(found, consecutive):
        return None
    if not torch.equal(found.sort().values, consecutive):
        raise CheckpointError(
            f"tensor {name} must assign {size} inputs to each of {scheme.groups(inputs)} groups (fewer to the last); it"
            f" has groups {int(found.min())} to {int(found.max())} of unequal size"
        )
    return found.to(torch.int32)


def check_scales(name: str, scales: torch.Tensor) -> torch.Tensor:
    """Return the scales. Raises CheckpointError if any is not finite."""
    if not bool(torch.isfinite(scales).all()):
        raise CheckpointError(f"tensor {name} has scales that are not finite; the file is damaged")
    return scales
