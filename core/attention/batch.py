"""The batch of one forward pass, as models and attention backends see it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from attrs import define


@define(kw_only=True)
class ForwardBatch:
    """One forward pass over ragged sequences, laid end to end; those that decode (one token each) stand first.

    Device tensors have their host copies beside them, so that a backend can plan without waiting for the device.

    In a batch for the CUDA graph of a decode step all sequences decode, the tensors are the graph's own, and their
    contents change from one replay to the next: only shapes may be relied on. The host copies then hold the most that
    can come: contexts of the longest length. (What a model sees while pieces between attention calls are recorded has
    tokens, positions and slots only.)
    """

    tokens: torch.Tensor
    """[tokens] int64."""
    positions: torch.Tensor
    """[tokens] int64: each token's place in its sequence."""
    slots: torch.Tensor
    """[tokens] int64: where its key and value go: block * block_size + offset."""
    query_starts: torch.Tensor
    """[sequences + 1] int32: first token of each sequence, then the number of tokens."""
    context_lens: torch.Tensor
    """[sequences] int32: tokens in the cache after this pass, the new ones included."""
    block_tables: torch.Tensor
    """[sequences, most blocks] int32; beyond a sequence's blocks: any valid block."""
    logit_rows: torch.Tensor
    """[rows] int64: the tokens whose logits are wanted."""
    num_decodes: int
    query_lens_host: npt.NDArray[np.int32]
    """[sequences] int32."""
    context_lens_host: npt.NDArray[np.int32]
    """[sequences] int32."""
    block_tables_host: npt.NDArray[np.int32]
    """[sequences, most blocks] int32."""

    @property
    def num_sequences(self) -> int:
        """How many sequences."""
        return len(self.query_lens_host)
