import math

import pytest
import torch

from engine.core.sampling.sampled_tokens import RowLogprobs, SampledTokens
from engine.core.sampling.sampling_batch import LogprobsRequest
from engine.core.types import NO_TOKEN


def test_to_host_returns_tokens_and_logprobs() -> None:
    request = LogprobsRequest(rows=torch.tensor([1]), host_rows=(1,), counts=(2,))
    logprobs = RowLogprobs(
        request=request,
        chosen=torch.tensor([-0.5]),
        ranks=torch.tensor([2]),
        top=torch.tensor([[-0.25, -0.5, -3.0]]),
        top_tokens=torch.tensor([[8, 5, 1]]),
    )
    sampled = SampledTokens.from_tokens(torch.tensor([4, 5]), torch.tensor([1.0, 2.0]), logprobs)
    assert sampled.ready()
    tokens, entries = sampled.to_host()
    assert tokens == [4, 5]
    assert entries[0] is None
    assert entries[1] is not None
    assert (entries[1].token, entries[1].logprob, entries[1].rank) == (5, -0.5, 2)
    assert entries[1].top == ((8, -0.25), (5, -0.5))


@pytest.mark.parametrize("max_logit", [math.nan, math.inf, -math.inf])
def test_to_host_returns_no_token_for_rows_that_are_not_finite(max_logit: float) -> None:
    tokens, max_logits = torch.tensor([4, 5, 6]), torch.tensor([1.0, max_logit, max_logit])
    sampled = SampledTokens.from_tokens(tokens, max_logits)
    assert sampled.to_host()[0] == [4, NO_TOKEN, NO_TOKEN]
    assert sampled.tokens.tolist() == [4, 5, 6], "the device goes on with tokens of the vocabulary"


@pytest.mark.gpu
def test_to_host_waits_for_its_own_copy_only() -> None:
    """A buffer is overwritten repeatedly: each copy has the values of its time, and does not wait for later work."""
    buffer, max_logits = torch.zeros(8, dtype=torch.int64, device="cuda"), torch.zeros(8, device="cuda")
    SampledTokens.from_tokens(buffer, max_logits).to_host()
    pending = []
    for step in range(20):
        buffer.fill_(step)
        pending.append(SampledTokens.from_tokens(buffer, max_logits))
    end = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda._sleep(2_000_000_000)
    end.record()
    assert [each.to_host()[0] for each in pending] == [[step] * 8 for step in range(20)]
    assert not end.query()
    later = SampledTokens.from_tokens(buffer, max_logits)
    assert not later.ready()
    assert later.to_host()[0] == [19] * 8
    assert later.ready()
