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
                f"the checkpoint lacks {name}, but says that groups of inputs have an order of their own (act-order),"
                f" and {total // inputs} ranks share these inputs; use one rank"
            )
        return None
    if tuple(stored.shape) != (inputs,):
        raise CheckpointError(f"tensor {name} has shape {list(stored.shape)}; the model expects [{inputs}] or none")
    size = total if scheme.group_size == -1 else scheme.group_size
    side_by_side = torch.arange(inputs, device=stored.device, dtype=torch.int64) // size
    found = stored.to(torch.int64)
    if shared and ordered:
        if int(found.min()) < 0 or int(found.max()) >= scheme.groups(total):
            raise CheckpointError(
                f"tensor {name} has groups {int(found.min())} to {int(found.max())}; there are {scheme.groups(total)}"
            )
        return found.to(torch.int32)
    if shared:
        if not torch.equal(found - found[0], side_by_side):
            raise CheckpointError(
                f"tensor {name} gives inputs to groups in an order of its own, which quantization_config does not say"
                f" (desc_act, actorder), so that {total // inputs} ranks cannot share these inputs; use one rank"
            )
        return None
    if torch.equal(found, side_by_side):
        return None
    if not torch.equal(found.sort().values, side_by_side):
        raise CheckpointError(
            f"tensor {name} must give {size} inputs to each of {scheme.groups(inputs)} groups (fewer to the last); it"
            f" has groups {int(found.min())} to {int(found.max())} of unequal size"
        )
    return found.to(torch.int32)


def check_scales(name: str, scales: torch.Tensor) -> torch.Tensor:
    """Return the scales. Raises CheckpointError if any is not finite."""
    if not bool(torch.isfinite(scales).all()):
        raise CheckpointError(f"tensor {name} holds scales that are infinite or no number; the file is damaged")
    return scales
