"""The batch of one forward pass, as models and attention backends see it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from attrs import define


@define(kw_only=True)
class ForwardBatch:
    """One forward pass over ragged sequences, concatenated; the decoding sequences (one token each) come first.

    The `_host` arrays copy device tensors, so that a backend can plan without waiting for the device.

    In the batch of a decode CUDA graph, all sequences decode, and the tensors are the graph's own buffers: their
    contents change from replay to replay, only shapes are fixed. The host arrays then describe contexts of the maximum
    length. The batch that a model sees during capture of piecewise CUDA graphs has only tokens, positions and slots.
    """

    tokens: torch.Tensor
    """[tokens] int64: token ids."""
    positions: torch.Tensor
    """[tokens] int64: position of each token in its sequence."""
    slots: torch.Tensor
    """[tokens] int64: KV cache slot of each token, block * block_size + offset."""
    query_starts: torch.Tensor
    """[sequences + 1] int32: index of each sequence's first token, then the number of tokens."""
    context_lens: torch.Tensor
    """[sequences] int32: tokens in the cache after this pass, the new ones included."""
    block_tables: torch.Tensor
    """[sequences, max_blocks] int32; entries beyond a sequence's blocks hold the number of any block of the pool."""
    logit_rows: torch.Tensor
    """[rows] int64: indices of the tokens whose logits are computed."""
    num_decodes: int
    """Number of decoding sequences."""
    query_lens_host: npt.NDArray[np.int32]
    """[sequences] int32: new tokens per sequence."""
    context_lens_host: npt.NDArray[np.int32]
    """[sequences] int32."""
    _block_tables_host: npt.NDArray[np.int32] | Callable[[], npt.NDArray[np.int32]]
    """See `block_tables_host`."""
    state_rows: torch.Tensor | None = None
    """[sequences] int64: the row of each sequence in the tensors of a StatePool."""
    rows_share_sequences: bool = False
    """Whether several sequences of a decode batch may be one sequence of the engine: draft tokens, each as a row of its
    own. Such a row sees the keys of rows before it, which the same pass writes."""
    groups: tuple[ForwardBatch, ...] = ()
    """The batch as each of several cache groups sees it: with the slots and block tables of the group."""

    @property
    def block_tables_host(self) -> npt.NDArray[np.int32]:
        """[sequences, max_blocks] int32.

        Made on first read, which must be during the forward pass: few backends need it, and one long context widens
        every row. The constructor takes the array or a function that returns it.
        """
        if callable(self._block_tables_host):
            self._block_tables_host = self._block_tables_host()
        return self._block_tables_host

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return len(self.query_lens_host)
