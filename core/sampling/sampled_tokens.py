"""The result of sampling, while it is copied to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import field, frozen

from engine.core.sampling.sampling_batch import LogprobsRequest
from engine.core.transfer import HostCopy
from engine.core.types import NO_TOKEN, TokenLogprobs

_NEVER = -float("inf")


@frozen(kw_only=True)
class RowLogprobs:
    """Log probabilities on the device, one row per row of the request: results of `arithmetic.row_logprobs`."""

    request: LogprobsRequest
    chosen: torch.Tensor
    ranks: torch.Tensor
    top: torch.Tensor
    top_tokens: torch.Tensor


@frozen(kw_only=True)
class SampledTokens:
    """One token per row, on the device, and its copy to the host. Several copies may be in progress."""

    tokens: torch.Tensor
    """[rows] int64 on the device, all within the vocabulary, whatever the logits."""
    _copy: HostCopy = field(alias="copy")
    _logprobs: LogprobsRequest | None = field(alias="logprobs", default=None)

    @classmethod
    def from_tokens(
        cls, tokens: torch.Tensor, max_logits: torch.Tensor, logprobs: RowLogprobs | None = None
    ) -> SampledTokens:
        """Start the copy to the host.

        tokens: [rows] int64; max_logits: [rows] float32, each row's largest logit or any number that is finite if and
        only if a token can be sampled from the row. Both may be buffers of a CUDA graph: a later replay overwrites them
        in stream order, after the copy. (The attribute `tokens` is then the buffer itself.)
        """
        tensors = [tokens, max_logits]
        if logprobs is not None:
            tensors += [logprobs.chosen, logprobs.ranks, logprobs.top, logprobs.top_tokens]
        request = None if logprobs is None else logprobs.request
        return cls(tokens=tokens, copy=HostCopy.begin(*tensors), logprobs=request)

    @classmethod
    def from_host(cls, tokens: torch.Tensor, max_logits: torch.Tensor, device: torch.device) -> SampledTokens:
        """Wrap tokens that the last kernel launched on `device` writes to host memory directly.

        tokens, max_logits: [rows], as in `from_tokens`, in pinned memory that is not written again before `to_host` was
        called. `SampledTokens.tokens` is then of no use to the device.
        """
        return cls(tokens=tokens, copy=HostCopy((tokens, max_logits), device))

    def ready(self) -> bool:
        """Whether `to_host` returns immediately."""
        return self._copy.ready()

    def tokens_on_host(self) -> list[int]:
        """Wait for the tokens alone: NO_TOKEN for rows whose logits were not finite."""
        tokens, max_logits, *_ = self._copy.wait()
        return _tokens(tokens, max_logits)

    def to_host(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Wait for the tokens (NO_TOKEN for rows whose logits were not finite), and for the log probabilities of the
        rows that asked (None for the others; empty if none did)."""
        device_tokens, max_logits, *logprobs = self._copy.wait()
        tokens = _tokens(device_tokens, max_logits)
        if (request := self._logprobs) is None:
            return tokens, []
        entries: list[TokenLogprobs | None] = [None] * len(tokens)
        chosen = [tokens[row] for row in request.host_rows]
        made = token_logprobs(chosen, request.counts, *logprobs)
        for row, entry in zip(request.host_rows, made, strict=True):
            entries[row] = entry
        return tokens, entries


def _tokens(tokens: torch.Tensor, max_logits: torch.Tensor) -> list[int]:
    """Tokens in host memory, with NO_TOKEN for rows whose logits were not finite. By NumPy: PyTorch's operations take
    ten times as long for so few numbers, and the device may be waiting for the host."""
    values, finite = tokens.numpy(), np.isfinite(max_logits.numpy())
    found: list[int] = (values if finite.all() else np.where(finite, values, NO_TOKEN)).tolist()
    return found


def token_logprobs(
    tokens: Sequence[int],
    counts: Sequence[int],
    chosen: torch.Tensor,
    ranks: torch.Tensor,
    top: torch.Tensor,
    top_tokens: torch.Tensor,
) -> list[TokenLogprobs]:
    """Convert results of `arithmetic.row_logprobs` to plain data, each row with its `counts` most likely tokens,
    without those of probability 0."""
    columns = zip(tokens, counts, chosen.tolist(), ranks.tolist(), top.tolist(), top_tokens.tolist(), strict=True)
    return [
        TokenLogprobs(
            token=token,
            logprob=logprob,
            rank=rank,
            top=tuple(each for each in zip(row_tokens[:count], row_top[:count], strict=True) if each[1] != _NEVER),
        )
        for token, count, logprob, rank, row_top, row_tokens in columns
    ]
