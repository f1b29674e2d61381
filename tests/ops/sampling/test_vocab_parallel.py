"""Kernels of ranks that share a vocabulary."""

import pytest
import torch

from engine.ops.sampling.vocab_parallel import choose_peaks, look_up, place_peaks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("size", [8, 40])
def test_vectors_of_the_rank_and_zeros(size):
    table = torch.randn(5, size, device=DEVICE)
    tokens = torch.tensor([9, 10, 14, 15, 0, 12], device=DEVICE)
    found = look_up(tokens, table, 10)
    expected = torch.zeros(6, size, device=DEVICE)
    expected[[1, 2, 5]] = table[[0, 4, 2]]
    assert torch.equal(found, expected)
    assert look_up(tokens[:0], table, 10).shape == (0, size)


@pytest.mark.parametrize(("ranks", "rows"), [(2, 3), (3, 130), (4, 1)])
def test_the_likeliest_token_of_all_ranks(ranks, rows):
    generator = torch.Generator().manual_seed(0)
    peaks = torch.randint(4, (ranks, rows), generator=generator).float().to(DEVICE)  # so few that some are equal
    tokens = torch.randint(100, (ranks, rows), generator=generator).to(DEVICE)
    peaks[-1, 0] = float("nan")
    placed = [place_peaks(peaks[rank], tokens[rank], 100 * rank, rank, ranks) for rank in range(ranks)]
    best, chosen = choose_peaks(sum(placed))
    for row in range(rows):
        if row == 0:
            assert best[0].isnan()
            assert 0 <= chosen[0] < 100 * ranks
            continue
        first = int((peaks[:, row] == peaks[:, row].max()).int().argmax())
        assert best[row] == peaks[first, row]
        assert chosen[row] == 100 * first + tokens[first, row]
