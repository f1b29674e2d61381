"""Edge cases of prefill over a latent cache; the attention suite covers the rest."""

from __future__ import annotations

import pytest
import torch
import triton

from engine.ops.attention.latent_prefill import latent_prefill_config
from engine.ops.attention.paged_prefill_config import PrefillConfig

from .latent import Case

pytestmark = [] if triton.knobs.runtime.interpret else [pytest.mark.gpu]
HALVES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.mark.parametrize(
    "lengths",
    [[(0, 1)], [(0, 8)], [(0, 50)], [(15, 1), (16, 1)], [(40, 33)], [(0, 20), (16, 16), (5, 9), (100, 3)]],
    ids=str,
)
def test_latent_prefill_is_causal_with_any_context(lengths: list[tuple[int, int]]) -> None:
    case = Case(lengths)
    case.check(case.prefill())


def test_latent_prefill_leaves_rows_of_decodes_unchanged() -> None:
    case = Case([(20, 1), (3, 1), (7, 12)])
    out = case.prefill(first=2)
    assert (out[:2] == -7).all()
    case.check(out, first_row=2)


@pytest.mark.parametrize("heads", [1, 3, 4, 8, 16, 40])
def test_latent_prefill_attends_with_any_number_of_query_heads(heads: int) -> None:
    case = Case([(5, 9), (0, 4)], heads=heads)
    case.check(case.prefill())


@pytest.mark.parametrize(("latent", "rotated"), [(16, 8), (32, 8), (48, 16), (256, 32), (512, 64)])
def test_latent_prefill_attends_with_keys_of_any_size(latent: int, rotated: int) -> None:
    case = Case([(21, 11)], latent=latent, rotated=rotated)
    case.check(case.prefill())


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize(("block_m", "block_n"), [(16, 32), (32, 16)])
def test_latent_prefill_finds_cache_blocks_smaller_and_larger_than_tiles(
    block_m: int, block_n: int, block_size: int
) -> None:
    case = Case([(45, 20), (0, 70)], block_size=block_size)
    case.check(case.prefill(PrefillConfig(block_m=block_m, block_n=block_n, num_warps=4, num_stages=2)))


@pytest.mark.parametrize("dtype", HALVES)
def test_latent_prefill_attends_in_half_precision(dtype: torch.dtype) -> None:
    case = Case([(50, 30)], dtype=dtype)
    case.check(case.prefill())


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 4, 16, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_latent_prefill_attends_at_real_sizes(dtype: torch.dtype, heads: int) -> None:
    case = Case([(0, 40), (700, 13), (65, 1)], heads=heads, latent=512, rotated=64, dtype=dtype)
    case.check(case.prefill(latent_prefill_config(576 * dtype.itemsize, dtype.itemsize, 232448, wgmma=True)))


def test_latent_prefill_configs_fit_the_shared_memory_of_each_gpu() -> None:
    """Hopper, its successors, A100 and the smallest."""
    gpus = ((228, True), (228, False), (164, False), (100, False))
    found = [latent_prefill_config(576 * 2, 2, size * 1024, wgmma=wgmma) for size, wgmma in gpus]
    assert [config.block_m for config in found] == [64, 64, 64, 16]
    assert latent_prefill_config(576 * 4, 4, 100 * 1024, wgmma=False).block_m == 16
