"""Groups of inputs that share a scale: which input is in which group, on this rank, and whether that can be served."""

from __future__ import annotations

import torch

from engine.core.errors import CheckpointError
from engine.plugins.quant.w4a16 import Scheme


def check_groups(name: str, scheme: Scheme, inputs: int, total: int) -> None:
    """Raises CheckpointError where ranks that share `total` inputs evenly, `inputs` each, would cut a group.

    name: of the layer.
    """
    if inputs != total and scheme.group_size != -1 and inputs % scheme.group_size:
        raise CheckpointError(
            f"{total // inputs} ranks share the {total} inputs of {name}, {inputs} each, which cuts groups of"
            f" {scheme.group_size}; use fewer ranks"
        )


def group_of(name: str, stored: torch.Tensor | None, scheme: Scheme, inputs: int, total: int) -> torch.Tensor | None:
    """The group of each of this rank's inputs: [inputs] int32; None: they lie side by side.

    name: of the tensor; stored: this rank's part of it, of all inputs' groups; None or empty: they lie side by side.
    inputs: this rank's; total: over all ranks.
    Raises CheckpointError for a tensor of another size, for groups of unequal size, and for inputs of one group on
    several ranks.
    """
    if stored is None or stored.numel() == 0:
        return None
    if tuple(stored.shape) != (inputs,):
        raise CheckpointError(f"tensor {name} has shape {list(stored.shape)}; the model expects [{inputs}] or none")
    size = total if scheme.group_size == -1 else scheme.group_size
    side_by_side = torch.arange(inputs, device=stored.device, dtype=torch.int64) // size
    found = stored.to(torch.int64)
    if inputs != total:
        if not torch.equal(found - found[0], side_by_side):
            raise CheckpointError(
                f"tensor {name} gives inputs to groups in an order of its own (act-order), and {total // inputs}"
                " ranks share these inputs, so that groups would be on several of them; use one rank, or a checkpoint"
                " with desc_act false (actorder weight)"
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
    """The same scales. Raises CheckpointError for one that is no finite number."""
    if not bool(torch.isfinite(scales).all()):
        raise CheckpointError(f"tensor {name} holds scales that are infinite or no number; the file is damaged")
    return scales
