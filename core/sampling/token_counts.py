"""How often each token occurred in a sequence, for the penalties."""

from __future__ import annotations

import numpy as np
import torch
from attrs import define

from engine.core.transfer import tensor_to_device
from engine.core.types import NewSequence

MIN_SLOTS = 4
"""Slots that are kept once any was used."""
ENTRY_BYTES = 5
"""Bytes per slot and token: an int32 and a bool."""


@define(eq=False)
class Slot:
    """One sequence's row of the table."""

    index: int
    """Changes when the table shrinks, which happens only in `TokenCounts.free`."""


class TokenCounts:
    """Token occurrences on the device: one slot, a row over the vocabulary, per sequence with penalties.

    The table grows and shrinks with the number of such sequences, by a factor of two.
    """

    def __init__(self, vocab_size: int, max_slots: int, device: torch.device) -> None:
        self._device = device
        self._capacities = _capacities(max_slots)
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        """[slots, vocab]: occurrences in the output."""
        self.seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        """[slots, vocab]: whether the token is in the prompt or the output."""
        self._used: set[Slot] = set()
        self._free: list[int] = []

    @property
    def used(self) -> bool:
        """Whether any sequence has a slot."""
        return bool(self._used)

    @staticmethod
    def max_bytes(vocab_size: int, max_slots: int) -> int:
        """Maximum bytes of a table, reached while it grows to `max_slots`: the old table and the new."""
        return sum(_capacities(max_slots)[-2:]) * vocab_size * ENTRY_BYTES

    def add(self, new: NewSequence) -> Slot:
        """Count a sequence's tokens in a free slot; returns the slot."""
        if not self._free:
            self._resize(next(each for each in self._capacities if each > len(self._used)))
        slot = Slot(self._free.pop())
        self._used.add(slot)
        tokens = tensor_to_device(
            torch.from_numpy(np.frombuffer(new.tokens.pack(), np.int32).astype(np.int64)), self._device
        )
        output = tokens[new.prompt_len :]
        self.counts[slot.index].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        self.seen[slot.index].zero_().index_fill_(0, tokens, True)
        return slot

    def after(self, slots: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`seen` and `counts` of slots as they will be after some more output tokens: both [n, vocab].

        slots: [n] int64, a slot any number of times; tokens: [n, k] int64, -1 for no token.
        """
        seen, counts = self.seen[slots], self.counts[slots]
        counts.scatter_add_(1, tokens.clamp(min=0), (tokens >= 0).to(torch.int32))
        return seen | (counts > 0), counts

    def count(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count one more output token in each of these slots; both [n] int64, no slot twice."""
        self.counts[slots, tokens] += 1
        self.seen[slots, tokens] = True

    def count_first(self, slots: torch.Tensor, tokens: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Count the first of several output tokens of each of these slots.

        slots: [n] int64, no slot twice; tokens: [n, k] int64; num_tokens: [n] int64, from 1 to k.
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        counted = places < num_tokens[:, None]
        tokens = torch.where(counted, tokens, tokens[:, :1])  # always counted: `seen` may be set for all
        self.counts.index_put_((slots[:, None], tokens), counted.to(torch.int32), accumulate=True)
        self.seen[slots[:, None], tokens] = True

    def free(self, slot: Slot) -> None:
        """Make a slot available again. The indices of the other slots may change."""
        self._used.remove(slot)
        self._free.append(slot.index)
        smaller = [each for each in self._capacities if each < len(self.counts)]
        if smaller and 4 * len(self._used) <= len(self.counts):
            self._resize(smaller[-1])

    def _resize(self, capacity: int) -> None:
        """Move the slots in use to the beginning of a table of `capacity` slots."""
        used = sorted(self._used, key=lambda slot: slot.index)  # as the table grows, none moves: batches keep indices
        rows = tensor_to_device(torch.tensor([slot.index for slot in used], dtype=torch.int64), self._device)
        self.counts = _resized(self.counts, rows, capacity)
        self.seen = _resized(self.seen, rows, capacity)
        for index, slot in enumerate(used):
            slot.index = index
        self._free = list(range(capacity - 1, len(used) - 1, -1))


def _capacities(max_slots: int) -> list[int]:
    """The numbers of slots that a table may have, ascending."""
    found = [max_slots]
    while found[-1] > MIN_SLOTS:
        found.append(-(-found[-1] // 2))
    return found[::-1]


def _resized(table: torch.Tensor, rows: torch.Tensor, capacity: int) -> torch.Tensor:
    """A table of `capacity` rows, `rows` of the given table first; the others are not set."""
    resized = table.new_empty(capacity, table.shape[1])
    if len(rows):
        torch.index_select(table, 0, rows, out=resized[: len(rows)])
    return resized
