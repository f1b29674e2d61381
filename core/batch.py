"""The batch as the model sees it, and how a Step becomes one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

if TYPE_CHECKING:
    import numpy as np
    import torch
    from engine.core.attention import AttentionBackend, Plan
    from engine.core.kv_cache import KVPool


@define(kw_only=True)
class ForwardBatch:
    """One forward pass over ragged sequences, laid end to end; those that decode (one token each) stand first.

    Device tensors have their host copies beside them, so that a backend can plan without waiting for the device.
    """

    tokens: torch.Tensor
    """[tokens] int64."""
    positions: torch.Tensor
    """[tokens] int64: each token's place in its sequence."""
    slots: torch.Tensor
    """[tokens] int64: where its key and value go: block * page_size + offset."""
    query_starts: torch.Tensor
    """[sequences + 1] int32: first token of each sequence, then the number of tokens."""
    context_lens: torch.Tensor
    """[sequences] int32: tokens in the cache after this pass, the new ones included."""
    block_tables: torch.Tensor
    """[sequences, most blocks] int32; beyond a sequence's blocks: any valid block."""
    logit_rows: torch.Tensor
    """[rows] int64: the tokens whose logits are wanted."""
    num_decodes: int
    query_lens_host: np.ndarray
    """[sequences] int32."""
    context_lens_host: np.ndarray
    """[sequences] int32."""
    block_tables_host: np.ndarray
    """[sequences, most blocks] int32."""

    @property
    def num_sequences(self) -> int:
        """How many sequences."""
        return len(self.query_lens_host)


@define(kw_only=True)
class ForwardPass:
    """All that a model's layers need for one pass, handed down as an argument."""

    batch: ForwardBatch
    attention: AttentionBackend
    plan: Plan
    pool: KVPool
