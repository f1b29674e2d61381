"""Recognizes which earlier tokens a layer attends to, from the mask function that its code chose."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.plugins.models.fallback.errors import RefusedError

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Batch index, head, position of the query and of the key -> whether the query attends to the key."""
PATTERN = (
    "attends to tokens in another pattern than all earlier ones or the last ones (a sliding window); chunks, blocks and"
    " prefixes are not served"
)
MAX_POSITIONS = 1 << 20
"""Maximum positions that are compared."""


def sliding_window(mask: MaskFunction, max_len: int) -> int | None:
    """The number of last tokens, its own included, that a token attends to; None: all of them.

    Raises RefusedError for any other pattern.
    """
    count = min(max_len, MAX_POSITIONS)
    keys = torch.arange(count)
    width = int(_row(mask, count - 1, keys).sum())
    window = None if width == count else width
    near = {0, 1, 2, count // 2, count - 1}
    if window is not None:
        near |= {edge + offset for edge in (window, 2 * window, 3 * window) for offset in (-1, 0, 1)}
    for position in sorted(position for position in near if 0 <= position < count):
        wanted = (keys <= position) & (keys > position - (window or count))
        if not torch.equal(_row(mask, position, keys), wanted):
            raise RefusedError(PATTERN)
    return window


def _row(mask: MaskFunction, position: int, keys: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros((), dtype=torch.int64)
    try:
        return torch.as_tensor(mask(zero, zero, torch.tensor(position), keys)).expand(len(keys)).bool()
    except Exception as error:  # of a function that needs more than positions, as the padding of a batch
        raise RefusedError(PATTERN) from error
