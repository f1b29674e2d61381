"""What was sampled, on its way to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import field, frozen

from engine.core.errors import ExecutorError
from engine.core.sampling.batch_params import Report
from engine.core.types import TokenLogprobs


class HostCopy:
    """Tensors in the host's memory that are complete once an event has come."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        """tensors: in the host's memory, written by what was launched last on `device`."""
        self._tensors = tuple(tensors)
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            # Whoever waits for it sleeps: by default the driver would keep a core busy until then.
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    @classmethod
    def begin(cls, *tensors: torch.Tensor) -> HostCopy:
        """Begin to copy tensors, in the order of the present stream: whatever is launched later may overwrite them.

        On a GPU the copies are pinned blocks of torch's caching allocator, which are reused once this object is gone,
        and no sooner than the copy has ended.
        """
        device = tensors[0].device
        if device.type != "cuda":
            return cls([each.clone() for each in tensors], device)
        copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
        for copy, each in zip(copies, tensors, strict=True):
            copy.copy_(each, non_blocking=True)
        return cls(copies, device)

    def ready(self) -> bool:
        """Whether `wait` returns at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The copies, complete; nothing launched after them is waited for."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


@frozen(kw_only=True)
class Ranks:
    """Log probabilities of the rows of a report; see `sampling_ops.rank_tokens`."""

    report: Report
    chosen: torch.Tensor
    ranks: torch.Tensor
    best: torch.Tensor
    best_tokens: torch.Tensor


@frozen(kw_only=True)
class SampledTokens:
    """One token a row, on the device, and its copy for the host under way. Several may be under way at once."""

    tokens: torch.Tensor
    """[rows] int64 on the device, all within the vocabulary, whatever the logits."""
    _sequences: tuple[int, ...] = field(alias="sequences")
    _copy: HostCopy = field(alias="copy")
    _report: Report | None = field(alias="report", default=None)

    @classmethod
    def from_tokens(
        cls, tokens: torch.Tensor, peaks: torch.Tensor, sequences: Sequence[int], ranks: Ranks | None = None
    ) -> SampledTokens:
        """Begin the copy to the host.

        tokens: [rows] int64; peaks: [rows] float32, each row's greatest logit, NaN where any is. Both may be buffers of
        a CUDA graph: what is replayed later overwrites them in stream order, after the copy. (`tokens` is then the
        buffer itself.)
        """
        tensors = [tokens, peaks]
        if ranks is not None:
            tensors += [ranks.chosen, ranks.ranks, ranks.best, ranks.best_tokens]
        report = None if ranks is None else ranks.report
        return cls(tokens=tokens, sequences=tuple(sequences), copy=HostCopy.begin(*tensors), report=report)

    @classmethod
    def from_host(
        cls, tokens: torch.Tensor, peaks: torch.Tensor, sequences: Sequence[int], device: torch.device
    ) -> SampledTokens:
        """For a kernel, the one launched last on `device`, that writes into the host's memory by itself.

        tokens, peaks: [rows], as in `from_tokens`, in pinned memory that is not written again before `to_host` was
        called; `SampledTokens.tokens` is then of no use to the device.
        """
        return cls(tokens=tokens, sequences=tuple(sequences), copy=HostCopy((tokens, peaks), device))

    def ready(self) -> bool:
        """Whether `to_host` returns at once."""
        return self._copy.ready()

    def to_host(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Wait for the tokens, and for the log probabilities of the rows that asked (None for the others).

        Raises ExecutorError naming the sequences whose logits were not finite.
        """
        device_tokens, peaks, *ranks = self._copy.wait()
        tokens: list[int] = device_tokens.tolist()
        finite = peaks.isfinite()
        if not finite.all():
            bad = [str(number) for number, good in zip(self._sequences, finite.tolist(), strict=True) if not good]
            raise ExecutorError(
                f"the logits of sequence {', '.join(bad)} are not finite (NaN or infinite), so no token can be "
                "sampled; the weights may be damaged, or the numbers outgrow this dtype: try bfloat16 or float32"
            )
        entries: list[TokenLogprobs | None] = [None] * len(tokens)
        if (report := self._report) is not None:
            chosen = [tokens[row] for row in report.host_rows]
            for row, entry in zip(report.host_rows, to_entries(chosen, report.counts, *ranks), strict=True):
                entries[row] = entry
        return tokens, entries


def to_entries(
    tokens: Sequence[int],
    counts: Sequence[int],
    chosen: torch.Tensor,
    ranks: torch.Tensor,
    best: torch.Tensor,
    best_tokens: torch.Tensor,
) -> list[TokenLogprobs]:
    """Results of `rank_tokens` as plain data, row for row with as many of the likeliest as `counts` says."""
    columns = zip(tokens, counts, chosen.tolist(), ranks.tolist(), best.tolist(), best_tokens.tolist(), strict=True)
    return [
        TokenLogprobs(
            token=token,
            logprob=logprob,
            rank=rank,
            top=tuple(zip(top_tokens[:count], top[:count], strict=True)),
        )
        for token, count, logprob, rank, top, top_tokens in columns
    ]
