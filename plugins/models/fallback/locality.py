"""Checks that a loaded model treats tokens one by one outside of attention, as batches of many sequences need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve

from engine.core.attention import AttentionSpec, ForwardBatch, KVPool
from engine.core.errors import CheckpointError
from engine.core.models import ForwardPass

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Maximum relative difference of a token's hidden states that rounding may cause."""
POSITIONS = (3, 0, 7, 1, 4, 2)
"""Of the tokens of the check."""
AGAIN = (4, 1, 5)
"""Indices of the tokens that are computed a second time, in this order."""


class TokenwiseAttention:
    """Stands in for an attention backend: each token's result follows from its own query, key and value."""

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any) -> torch.Tensor:
        """As AttentionBackend.forward."""
        repeats = q.shape[1] // k.shape[1]
        gate = (q * k.repeat_interleave(repeats, 1)).mean(-1, keepdim=True).sigmoid()
        return v.repeat_interleave(repeats, 1) * gate


def check_locality(
    forward: Callable[[ForwardPass], torch.Tensor],
    specs: Sequence[AttentionSpec],
    vocab_size: int,
    device: str,
    name: str,
) -> None:
    """Compare tokens computed in two batches of different size and order, without attention between tokens.

    specs: of each cache group, with blocks of one token. name: of the architecture. Raises CheckpointError if the
    hidden state of the median token depends on other tokens.
    """
    tokens = (torch.arange(len(POSITIONS), device=device) * 7919 + 13) % vocab_size
    positions = torch.tensor(POSITIONS, device=device).clamp(max=specs[0].max_len - 1)
    again = torch.tensor(AGAIN, device=device)
    pools = [KVPool(spec, 1, device) for spec in specs]
    attention: Any = TokenwiseAttention()

    def hidden(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        batch = _batch(tokens, positions, pools[0].scratch_block)
        passes = [ForwardPass(batch=batch, attention=attention, plan=None, pool=pool) for pool in pools]
        return forward(evolve(passes[0], groups=tuple(passes) if len(passes) > 1 else ()))

    first = hidden(tokens, positions)[again]
    second = hidden(tokens[again], positions[again])
    size = first.float().norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    difference = (first.float() - second.float()).norm(dim=-1) / size
    if bool(first.isfinite().all()) and not bool(difference.median() <= TOLERANCE[first.dtype]):
        raise CheckpointError(
            f"{name} of transformers mixes the tokens of a batch outside of attention (by a convolution, a recurrence"
            f" or the order of tokens): alone, a token differs by {float(difference.median()):.2g}; such a model cannot"
            " compute batches of several sequences, and needs a model plugin of its own"
        )


def _batch(tokens: torch.Tensor, positions: torch.Tensor, slot: int) -> ForwardBatch:
    """A batch with the fields that a model may use; all tokens are written to one slot that is never read."""
    nothing: Any = torch.zeros(0, dtype=torch.int32, device=tokens.device)
    no_host = np.zeros(0, np.int32)
    return ForwardBatch(
        tokens=tokens,
        positions=positions,
        slots=torch.full_like(tokens, slot),
        query_starts=nothing,
        context_lens=nothing,
        block_tables=nothing,
        logit_rows=nothing,
        num_decodes=0,
        query_lens_host=no_host,
        context_lens_host=no_host,
        block_tables_host=no_host.reshape(0, 0),
    )
