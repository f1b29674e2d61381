"""A step whose kernels are launched, around copies to the host that a test controls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.core.errors import ExecutorError
from engine.core.runner.drafter import Proposals
from engine.core.runner.step import PendingStep
from engine.core.sampling.draft_rows import DraftRows, VerifiedDrafts
from engine.core.sampling.sampled_tokens import SampledTokens
from engine.core.types import DraftSlice


class Copy:
    """Stands in for a HostCopy."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors
        self.done = True
        self.failure = ""

    def ready(self) -> bool:
        return self.done

    def wait(self) -> tuple[torch.Tensor, ...]:
        if self.failure:
            raise RuntimeError(self.failure)
        return self.tensors


class Copies:
    """The copies of a step in which one sequence decodes and one verifies a draft, which is accepted."""

    def __init__(self) -> None:
        self.sampled = Copy(torch.tensor([3, 8, 9]), torch.ones(3))
        self.accepted = Copy(torch.tensor([1]))
        self.proposals = Copy(torch.tensor([[4], [5]]))

    def pending(self, *, proposes: bool = True) -> PendingStep:
        copies: Any = self
        rows = DraftRows.of([DraftSlice(2, 7, (6, 8))], torch.tensor([1]).numpy(), 1, torch.device("cpu"))
        tokens, accepted = torch.tensor([3, 8, 9]), torch.tensor([1])
        verified = VerifiedDrafts(rows=rows, sampled=tokens, num_accepted=accepted, accepted=copies.accepted)
        proposals = Proposals(tokens=copies.proposals, room=torch.tensor([1, 1]).numpy(), verified=verified)
        samples = (SampledTokens(tokens=tokens, copy=copies.sampled),)
        return PendingStep(5, samples, (), {}, drafts=verified, proposals=proposals if proposes else None)


COPIES: list[Callable[[Copies], Copy]] = [
    lambda copies: copies.sampled,
    lambda copies: copies.accepted,
    lambda copies: copies.proposals,
]
NAMES = ["tokens", "accepted drafts", "proposals"]


def test_pending_step_returns_tokens_verified_drafts_and_proposals_when_all_are_copied() -> None:
    pending = Copies().pending()
    assert pending.done()
    result = pending.result()
    assert (result.tokens, result.verified, result.proposals) == (((3,),), ((8, 9),), ((4,), ()))


@pytest.mark.parametrize("of", COPIES, ids=NAMES)
def test_pending_step_is_not_done_when_a_copy_is_not(of: Callable[[Copies], Copy]) -> None:
    copies = Copies()
    of(copies).done = False
    assert not copies.pending().done()


@pytest.mark.parametrize(
    ("of", "proposes"),
    list(zip([*COPIES, COPIES[1]], [True, True, True, False], strict=True)),
    ids=[*NAMES, "accepted drafts without proposals"],
)
def test_pending_step_raises_an_executor_error_when_the_device_failed_in_a_copy(
    of: Callable[[Copies], Copy], *, proposes: bool
) -> None:
    copies = Copies()
    of(copies).failure = "an illegal memory access"
    with pytest.raises(ExecutorError, match=r"^step 5 failed on the device: an illegal memory access"):
        copies.pending(proposes=proposes).result()
