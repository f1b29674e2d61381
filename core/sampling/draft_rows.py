"""The rows of a batch that verify drafts: one for each token of each draft slice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from engine.core.transfer import HostCopy, to_device
from engine.core.types import NO_TOKEN, DraftSlice, TokenLogprobs


@frozen(kw_only=True)
class DraftRows:
    """The last rows of a batch: one per token of each draft slice."""

    num_before: int
    """Rows of the batch before these, which verify no drafts."""
    slices: tuple[DraftSlice, ...]
    counts: tuple[int, ...]
    """Rows of each slice: one more than its drafts."""
    drafts: torch.Tensor
    """[slices, k] int64, -1 where a slice has fewer than k drafts."""
    first: torch.Tensor
    """[slices] int64, the first row of each slice."""
    table_rows: torch.Tensor
    """[slices] int64, the row of each sequence in the persistent batch and in the SamplingTable."""
    offsets: torch.Tensor
    """[rows of the batch] int64: number of drafts before each row, which are outputs once they are accepted."""

    def before(self, slices: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The drafts before some rows of the batch: [rows, k] int64, -1 where a row has fewer than k before.

        slices: [rows] int64, the slice of each row, any for a row that verifies no draft; rows: [rows] int64.
        """
        places = torch.arange(self.drafts.shape[1], device=rows.device)
        return self.drafts[slices].masked_fill(places >= self.offsets[rows][:, None], -1)

    @classmethod
    def of(
        cls, slices: Sequence[DraftSlice], rows: npt.NDArray[np.int64], num_before: int, device: torch.device
    ) -> DraftRows:
        """Make the rows of draft slices, by one copy to the device. rows: [slices], the row of each sequence."""
        counts = np.fromiter((len(part.tokens) for part in slices), np.int64, len(slices))
        first = num_before + np.cumsum(counts) - counts
        offsets = np.zeros(num_before + int(counts.sum()), np.int64)
        offsets[num_before:] = np.arange(len(offsets) - num_before) - np.repeat(first - num_before, counts)
        drafts = np.full((len(slices), int(counts.max()) - 1), -1, np.int64)
        for row, part in zip(drafts, slices, strict=True):
            row[: len(part.tokens) - 1] = part.tokens[1:]
        tensors = to_device([drafts, first, rows, offsets], device)
        return cls(
            num_before=num_before,
            slices=tuple(slices),
            counts=tuple(counts.tolist()),
            drafts=tensors[0],
            first=tensors[1],
            table_rows=tensors[2],
            offsets=tensors[3],
        )


@frozen(kw_only=True)
class VerifiedDrafts:
    """Draft rows whose tokens are sampled, with the copy to the host of how many drafts of each slice are accepted."""

    rows: DraftRows
    sampled: torch.Tensor
    """[rows of the batch] int64 on the device: the token sampled from each row."""
    num_accepted: torch.Tensor
    """[slices] int64 on the device."""
    accepted: HostCopy
    """Of `num_accepted`."""

    def to_host(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[TokenLogprobs, ...], ...]]:
        """StepResult.verified and verified_logprobs. tokens, logprobs: of all rows of the batch; without log
        probabilities, `logprobs` is empty."""
        (accepted,) = self.accepted.wait()
        at = self.rows.num_before
        verified: list[tuple[int, ...]] = []
        entries: list[tuple[TokenLogprobs, ...]] = []
        for count, number in zip(self.rows.counts, accepted.tolist(), strict=True):
            found = tokens[at : at + number + 1]
            if NO_TOKEN in found:  # the drafts that the device accepted after NO_TOKEN are arbitrary
                found = found[: found.index(NO_TOKEN) + 1]
            verified.append(tuple(found))
            if logprobs:
                entries.append(tuple(entry for entry in logprobs[at : at + len(found)] if entry is not None))
            at += count
        return tuple(verified), tuple(entries) if any(entries) else ()
