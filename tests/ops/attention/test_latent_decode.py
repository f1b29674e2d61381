"""Edge cases of decode over a latent cache; the attention suite covers the rest."""

from __future__ import annotations

import pytest
import torch
import triton
from attrs import evolve

from engine.ops.attention.latent_decode import latent_decode_configs

from .latent import DECODE, Case, decodes

pytestmark = [] if triton.knobs.runtime.interpret else [pytest.mark.gpu]
# The interpreter does not support products of bfloat16.
HALVES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def check(case: Case, programs: int, block_n: int = DECODE.block_n) -> None:
    case.check(case.decode(case.workspace(programs), evolve(DECODE, block_n=block_n)))


@pytest.mark.parametrize("programs", [1, 2, 3, 7, 40])
def test_latent_decode_attends_to_ragged_sequences_across_ranges(programs: int) -> None:
    check(Case(decodes(1, 16, 17, 100, 33, 5)), programs)


@pytest.mark.parametrize("programs", [5, 18, 37, 80])
def test_latent_decode_merges_many_parts_of_one_sequence(programs: int) -> None:
    check(Case(decodes(1300), heads=1, latent=16), programs)


def test_latent_decode_reuses_a_workspace_for_consecutive_launches() -> None:
    case = Case(decodes(70, 200, 31))
    workspace = case.workspace(6)
    first = case.decode(workspace)
    torch.testing.assert_close(case.decode(workspace), first, rtol=0, atol=0)
    other = Case(decodes(1, 260))
    other.check(other.decode(workspace))


def test_latent_decode_writes_no_parts_when_sequences_fill_ranges() -> None:
    case = Case(decodes(*[64] * 6))
    workspace = case.workspace(3)
    case.check(case.decode(workspace))
    assert workspace.acc.isnan().all()


def test_latent_decode_leaves_rows_beyond_num_sequences_unchanged() -> None:
    case = Case(decodes(20, 40))
    assert (case.decode(case.workspace(3), extra_rows=2)[2:] == -7).all()


@pytest.mark.parametrize("count", [15, 16, 17, pytest.param(300, marks=pytest.mark.gpu)])
def test_latent_decode_attends_with_any_number_of_sequences(count: int) -> None:
    check(Case(decodes(*(1 + 7 * i % 23 for i in range(count))), heads=1, latent=16), 4)


@pytest.mark.parametrize("heads", [1, 4, 8, 16, 20, 40])
def test_latent_decode_attends_with_any_number_of_query_heads(heads: int) -> None:
    check(Case(decodes(50, 9), heads=heads), 3)


@pytest.mark.parametrize(("latent", "rotated"), [(16, 8), (32, 8), (48, 16), (256, 32), (512, 64)])
def test_latent_decode_attends_with_keys_of_any_size(latent: int, rotated: int) -> None:
    check(Case(decodes(50, 9), latent=latent, rotated=rotated), 3)


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("block_n", [16, 64])
def test_latent_decode_finds_cache_blocks_smaller_and_larger_than_tiles(block_n: int, block_size: int) -> None:
    check(Case(decodes(50, 130), block_size=block_size), 3, block_n)


@pytest.mark.parametrize("dtype", HALVES)
def test_latent_decode_attends_in_half_precision(dtype: torch.dtype) -> None:
    check(Case(decodes(50, 130), dtype=dtype), 3)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 4, 16, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_latent_decode_attends_at_real_sizes(dtype: torch.dtype, heads: int) -> None:
    case = Case(decodes(1, 3000, 17, 700), heads=heads, latent=512, rotated=64, dtype=dtype)
    for _, config in latent_decode_configs(heads, 576 * dtype.itemsize, dtype.itemsize, 232448):
        case.check(case.decode(config.make_workspace(heads, 512, case.q.device), config))


@pytest.mark.parametrize(
    ("size", "stages", "programs"), [(228, (4, 3), (1, 2)), (164, (4, 2), (1, 2)), (100, (3, 2), (1, 2))]
)
def test_latent_decode_configs_fit_the_shared_memory_of_each_gpu(
    size: int, stages: tuple[int, int], programs: tuple[int, int]
) -> None:
    """Hopper, A100 and the smallest; two programs run per multiprocessor where there is room and many sequences are."""
    found = [config for _, config in latent_decode_configs(16, 576 * 2, 2, size * 1024)]
    assert tuple(config.num_stages for config in found) == stages
    assert tuple(config.programs_per_sm for config in found) == programs


def test_latent_decode_configs_of_many_heads_and_of_float32() -> None:
    many_heads = [config for _, config in latent_decode_configs(128, 576 * 2, 2, 228 * 1024)]
    assert [(config.block_m, config.programs_per_sm) for config in many_heads] == [(64, 1), (64, 1)]
    assert [config.block_n for _, config in latent_decode_configs(16, 576 * 4, 4, 100 * 1024)] == [16, 16]
