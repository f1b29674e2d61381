import math

import pytest
import torch

from engine.core.errors import ExecutorError
from engine.core.sampling.batch_params import Report
from engine.core.sampling.result import HostCopy, Ranks, SampledTokens


def test_tokens_and_log_probabilities_reach_the_host():
    report = Report(rows=torch.tensor([1]), host_rows=(1,), counts=(2,))
    ranks = Ranks(
        report=report,
        chosen=torch.tensor([-0.5]),
        ranks=torch.tensor([2]),
        best=torch.tensor([[-0.25, -0.5, -3.0]]),
        best_tokens=torch.tensor([[8, 5, 1]]),
    )
    sampled = SampledTokens.from_tokens(torch.tensor([4, 5]), torch.tensor([1.0, 2.0]), (10, 11), ranks)
    assert sampled.ready()
    tokens, entries = sampled.to_host()
    assert tokens == [4, 5]
    assert entries[0] is None
    assert (entries[1].token, entries[1].logprob, entries[1].rank) == (5, -0.5, 2)
    assert entries[1].top == ((8, -0.25), (5, -0.5))


@pytest.mark.parametrize("peak", [math.nan, math.inf, -math.inf])
def test_sequences_whose_logits_were_not_finite_are_named(peak):
    tokens, peaks = torch.tensor([4, 5, 6]), torch.tensor([1.0, peak, peak])
    with pytest.raises(ExecutorError, match="sequence 11, 12 are not finite"):
        SampledTokens.from_tokens(tokens, peaks, (10, 11, 12)).to_host()


@pytest.mark.gpu
def test_copies_wait_for_their_own_event_only():
    """A buffer overwritten again and again: each copy has its own state of it, and later work is not waited for."""
    buffer, peaks = torch.zeros(8, dtype=torch.int64, device="cuda"), torch.zeros(8, device="cuda")
    SampledTokens.from_tokens(buffer, peaks, range(8)).to_host()
    pending = []
    for step in range(20):
        buffer.fill_(step)
        pending.append(SampledTokens.from_tokens(buffer, peaks, range(8)))
    end = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    end.record()
    assert [each.to_host()[0] for each in pending] == [[step] * 8 for step in range(20)]
    assert not end.query()
    later = SampledTokens.from_tokens(buffer, peaks, range(8))
    assert not later.ready()
    assert later.to_host()[0] == [19] * 8
    assert later.ready()


@pytest.mark.gpu
def test_pinned_blocks_are_not_reused_too_early():
    """Copies dropped while under way must not hand their memory to the next ones."""
    source = torch.arange(1000, device="cuda")
    torch.cuda._sleep(500_000_000)
    for _ in range(50):
        HostCopy.begin(source)
    kept = [HostCopy.begin(source + number) for number in range(10)]
    expected = torch.arange(1000)
    for number, copy in enumerate(kept):
        assert torch.equal(copy.wait()[0], expected + number)
