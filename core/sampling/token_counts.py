"""How often each token occurred in a sequence, for the penalties."""

from __future__ import annotations

import torch

from engine.core.transfer import tensor_to_device
from engine.core.types import NewSequence


class TokenCounts:
    """Token occurrences on the device: one slot, a row over the vocabulary, per sequence with penalties."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        """[slots, vocab]: occurrences in the output."""
        self.seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        """[slots, vocab]: whether the token is in the prompt or the output."""
        self._free: list[int] = []

    def add(self, new: NewSequence) -> int:
        """Count a sequence's tokens in a free slot; returns the slot."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        tokens = tensor_to_device(torch.tensor(new.tokens, dtype=torch.int64), self._device)
        output = tokens[new.prompt_len :]
        self.counts[slot].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        self.seen[slot].zero_().index_fill_(0, tokens, True)
        return slot

    def count(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count one more output token in each of these slots; both [n] int64, no slot twice."""
        self.counts[slots, tokens] += 1
        self.seen[slots, tokens] = True

    def free(self, slot: int) -> None:
        """Make a slot available again."""
        self._free.append(slot)

    def _grow(self) -> None:
        old = self.counts.shape[0]
        more = max(4, old)
        self.counts = torch.cat([self.counts, self.counts.new_zeros(more, self.counts.shape[1])])
        self.seen = torch.cat([self.seen, self.seen.new_zeros(more, self.seen.shape[1])])
        self._free.extend(reversed(range(old, old + more)))
