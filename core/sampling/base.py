"""Contract of a sampling path: how a batch's next tokens are chosen, step by step or inside a CUDA graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from attrs import frozen

if TYPE_CHECKING:
    from engine.core.models.base import Model
    from engine.core.sampling.draft_rows import DraftRows
    from engine.core.sampling.sampled_tokens import SampledTokens
    from engine.core.sampling.sampling_batch import SamplingBatch

PathName = Literal["greedy", "draw", "full"]


@frozen(kw_only=True)
class CapturedTokens:
    """Tokens sampled inside a CUDA graph: tensors of the graph, filled again by each replay."""

    tokens: torch.Tensor
    """[rows] int64."""
    max_logits: torch.Tensor
    """[rows] float32, as in `SampledTokens.from_tokens`."""
    table_advanced: bool
    """Whether the graph has already advanced `SamplingTable.num_outputs` for these tokens."""


class SamplingPath(ABC):
    """One way to sample the next token of each sequence of a batch.

    A batch takes the cheapest path that serves all of its sequences: greedy, then draw, then full.
    """

    name: ClassVar[PathName]
    capturable: bool = True
    """Whether `capture` may be called; if not, CUDA graphs of the full path serve the path's batches."""

    def __init__(self) -> None:
        self.needed_by: set[int] = set()
        """Sequences that no cheaper path serves."""

    def is_needed(self, sequences: Iterable[int]) -> bool:
        """Whether no cheaper path serves a batch of these sequences."""
        return bool(self.needed_by) and not self.needed_by.isdisjoint(sequences)

    @abstractmethod
    def capture(self, model: Model, hidden: torch.Tensor, table_rows: torch.Tensor) -> CapturedTokens | torch.Tensor:
        """Sample from hidden states while a CUDA graph is captured.

        hidden: [rows, hidden_size]; table_rows: [rows] int64, rows of the SamplingTable. Returns the tokens, or logits
        [rows, vocab] for `Sampler.sample` to take after each replay.
        """

    @abstractmethod
    def sample(
        self, logits: torch.Tensor, batch: SamplingBatch, table_rows: torch.Tensor, drafts: DraftRows | None = None
    ) -> SampledTokens:
        """Sample from logits ([rows, vocab], left unchanged), advance `SamplingTable.num_outputs` except for rows of
        drafts, and start the copy of the tokens to the host. Does not wait for the device. table_rows: [rows] int64."""
