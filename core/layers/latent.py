"""Latent keys (MLA, arXiv:2405.04434): norm, rotary embedding and the write to the KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.core.layers.rotary import Angles, rotate_pairs

if TYPE_CHECKING:
    from engine.core.layers.norm import RMSNorm
    from engine.core.models.forward_pass import ForwardPass


class LatentKeys:
    """Completes the queries and keys of one layer with latent attention, and writes the keys to the KV cache.

    A key is [latent | rotated], for all query heads. A query has the same parts.
    """

    def __init__(self, norm: RMSNorm, latent: int, rotated: int) -> None:
        """norm: of the latent. latent, rotated: sizes of the parts."""
        self.norm = norm
        self.latent = latent
        self.rotated = rotated

    def __call__(
        self,
        run: ForwardPass,
        layer: int,
        q: torch.Tensor,
        rotated: torch.Tensor,
        projected: torch.Tensor,
        angles: Angles,
    ) -> torch.Tensor:
        """Return the keys: [tokens, 1, latent + rotated].

        run: the pass of the layer's cache group; layer: index in the group. q: [tokens, heads, latent + rotated], whose
        second part is filled with `rotated`: [tokens, heads, rotated], after rotation. projected: [tokens, latent +
        rotated], the keys before norm and rotation; may be overwritten.
        """
        q[..., self.latent :] = rotate_pairs(rotated, angles)
        latent, shared = torch.split(projected, [self.latent, self.rotated], -1)
        latent, _ = self.norm(latent.contiguous(), None)
        k = torch.cat((latent[:, None], rotate_pairs(shared[:, None], angles)), -1)
        run.pool.write(layer, k, k[..., : self.latent], run.batch.slots)
        return k
