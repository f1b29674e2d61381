"""Kernels of a vocabulary sharded over ranks."""

import pytest
import torch

from engine.ops.sampling.vocab_parallel import choose_max_logits, look_up, place_max_logits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("size", [8, 40])
def test_look_up_returns_the_vectors_of_the_rank_and_zeros(size: int) -> None:
    table = torch.randn(5, size, device=DEVICE)
    tokens = torch.tensor([9, 10, 14, 15, 0, 12], device=DEVICE)
    found = look_up(tokens, table, 10)
    expected = torch.zeros(6, size, device=DEVICE)
    expected[[1, 2, 5]] = table[[0, 4, 2]]
    assert torch.equal(found, expected)
    assert look_up(tokens[:0], table, 10).shape == (0, size)


@pytest.mark.parametrize(("ranks", "rows"), [(2, 3), (3, 130), (4, 1)])
def test_choose_max_logits_takes_the_first_of_equals(ranks: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    max_logits = (
        torch.randint(4, (ranks, rows), generator=generator).float().to(DEVICE)
    )  # few values, so that some are equal
    tokens = torch.randint(100, (ranks, rows), generator=generator).to(DEVICE)
    max_logits[-1, 0] = float("nan")
    placed = [place_max_logits(max_logits[rank], tokens[rank], 100 * rank, rank, ranks) for rank in range(ranks)]
    best, chosen = choose_max_logits(sum(placed))
    for row in range(rows):
        if row == 0:
            assert best[0].isnan()
            assert 0 <= chosen[0] < 100 * ranks
            continue
        first = int((max_logits[:, row] == max_logits[:, row].max()).int().argmax())
        assert best[row] == max_logits[first, row]
        assert chosen[row] == 100 * first + tokens[first, row]
