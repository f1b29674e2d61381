"""argmax_rows against torch, with ties and numbers that are not finite."""

import pytest
import torch

from engine.ops.sampling.argmax import CHUNK, argmax_rows, reduce_max

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (2, CHUNK), (2, 2 * CHUNK + 5)])
def test_argmax_rows_equals_torch(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.randn(rows, columns, device=device).to(dtype)
    max_logits, tokens = argmax_rows(logits)
    assert (max_logits.dtype, tokens.dtype) == (torch.float32, torch.int64)
    assert torch.equal(max_logits, logits.float().amax(-1))
    assert torch.equal(tokens, (logits == logits.amax(-1, keepdim=True)).int().argmax(-1))


def test_argmax_rows_takes_the_first_of_equals(device: torch.device) -> None:
    logits = torch.zeros(4, 3 * CHUNK, device=device)
    for row, columns in enumerate([(5, 9), (CHUNK + 1, 2 * CHUNK), (CHUNK - 1, CHUNK), (0, 3 * CHUNK - 1)]):
        logits[row, list(columns)] = 1.0
    assert argmax_rows(logits)[1].tolist() == [5, CHUNK + 1, CHUNK - 1, 0]


def test_argmax_rows_shows_numbers_that_are_not_finite(device: torch.device) -> None:
    logits = torch.randn(6, CHUNK + 10, device=device)
    logits[0, 3] = NAN
    logits[1, CHUNK + 3] = NAN
    logits[2, CHUNK + 9] = INF
    logits[3] = -INF
    logits[4] = NAN
    max_logits, tokens = argmax_rows(logits)
    assert max_logits.isnan().tolist() == [True, True, False, False, True, False]
    assert max_logits[2:4].tolist() == [INF, -INF]
    assert tokens[[2, 3]].tolist() == [CHUNK + 9, 0]
    assert ((tokens >= 0) & (tokens < CHUNK + 10)).all()
    assert max_logits[5] == logits[5].amax()


def test_reduce_max_takes_many_partial_results(device: torch.device) -> None:
    max_logits = torch.randn(3, 2500, device=device)
    tokens = torch.arange(2500, dtype=torch.int32, device=device).expand(3, -1).contiguous()
    max_logits[1, [1030, 6, 2070]] = 50.0
    max_logits[2, 2048] = NAN
    best, where = reduce_max(max_logits, tokens)
    assert where[:2].tolist() == [int(max_logits[0].argmax()), 6]
    assert best[2].isnan()


def test_argmax_rows_takes_no_rows(device: torch.device) -> None:
    max_logits, tokens = argmax_rows(torch.empty(0, 10, device=device))
    assert max_logits.shape == tokens.shape == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(1, 151936), (256, 128256)])
def test_argmax_rows_equals_torch_at_real_sizes(rows: int, columns: int, device: torch.device) -> None:
    logits = torch.randn(rows, columns, device=device).to(torch.bfloat16)
    max_logits, tokens = argmax_rows(logits)
    assert torch.equal(max_logits, logits.float().amax(-1))
    assert torch.equal(tokens, (logits == logits.amax(-1, keepdim=True)).int().argmax(-1))
