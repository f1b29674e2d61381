"""Edge cases of the decode kernel: ranges of tiles, partial tiles, padding; the attention suite covers the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import triton
from attrs import define, evolve

from engine.core.attention.base import AttentionSpec
from engine.ops.attention import paged_decode as module
from engine.ops.attention.paged_decode import pad_sequences, paged_decode
from engine.ops.attention.paged_decode_config import DecodeConfig, decode_configs
from engine.ops.attention.paged_decode_merge import DecodeWorkspace
from engine.testing.attention_cases import dense_attention

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
pytestmark = [] if triton.knobs.runtime.interpret else [pytest.mark.gpu]
# The interpreter does not support products of bfloat16.
HALVES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
SMALL = DecodeConfig(block_n=16, num_warps=4, num_stages=2, programs_per_sm=2)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@define(slots=False)
class Case:
    """Sequences in a KV pool, NaN where no query sees a slot, and the expected attention of their last tokens."""

    lengths: Sequence[int]
    heads: tuple[int, int] = (2, 1)
    dim: int = 32
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    value_scale: float = 1.0
    q_factor: float = 1.0
    """Factor on the queries; the scale of the scores is divided by it."""
    has_sinks: bool = False

    def __attrs_post_init__(self) -> None:
        torch.manual_seed(0)
        heads, kv_heads = self.heads
        kv_dtype = self.kv_dtype or self.dtype
        counts = [-(-length // self.block_size) for length in self.lengths]
        order = torch.randperm(sum(counts) + 1).tolist()
        shape = (sum(counts) + 1, self.block_size, kv_heads, self.dim)
        pool = [torch.full(shape, torch.nan) for _ in range(2)]
        self.tables = torch.full((len(counts), max(counts)), order.pop(), dtype=torch.int32)
        # A view of the packed projections, as in the models.
        packed = torch.randn(len(counts), heads + 2 * kv_heads, self.dim).mul(self.q_factor).to(self.dtype).to(DEVICE)
        self.q = packed[:, :heads]
        self.sinks = torch.linspace(-4.0, 8.0, heads, device=DEVICE) if self.has_sinks else None
        sinks = None if self.sinks is None else self.sinks.cpu()
        expected = []
        for row, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
            self.tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
            at = torch.arange(0 if self.window is None else max(length - self.window, 0), length)
            blocks, offsets = self.tables[row][at // self.block_size].long(), at % self.block_size
            k, v = (torch.randn(length, kv_heads, self.dim).to(kv_dtype).float() for _ in range(2))
            pool[0][blocks, offsets], pool[1][blocks, offsets] = k[at], v[at]
            v = v.double() * self.value_scale
            expected.append(dense_attention(self.q[row : row + 1].cpu(), k, v, self.spec(), self.window, sinks))
        self.expected = torch.cat(expected)
        self.keys, self.values = (part.to(kv_dtype).to(DEVICE) for part in pool)

    @property
    def scale(self) -> float:
        return self.dim**-0.5 / self.q_factor

    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_layers=1,
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=self.dim,
            scale=self.scale,
            dtype="float32",
            kv_dtype="float32",
            block_size=self.block_size,
            max_len=max(self.lengths),
            sliding_windows=(self.window,),
            softcap=self.softcap,
        )

    def workspace(self, programs: int) -> DecodeWorkspace:
        made = DecodeWorkspace.make(programs, *self.heads, self.dim, DEVICE)
        made.acc.fill_(torch.nan)
        made.stats.fill_(torch.nan)
        return made

    def run(self, workspace: DecodeWorkspace, config: DecodeConfig = SMALL, extra_rows: int = 0) -> torch.Tensor:
        rows = len(self.lengths)
        out = torch.full((rows + extra_rows, *self.q.shape[1:]), -7.0, dtype=self.dtype, device=DEVICE)
        paged_decode(
            self.q,
            self.keys,
            self.values,
            self.tables.to(DEVICE),
            torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE),
            out,
            num_sequences=rows,
            scale=self.scale,
            softcap=self.softcap,
            window=self.window,
            value_scale=self.value_scale,
            sinks=self.sinks,
            workspace=workspace,
            config=config,
        )
        assert not workspace.arrivals.any(), "arrivals are not reset to 0"
        return out

    def check(self, programs: int, config: DecodeConfig = SMALL) -> None:
        error = (
            self.run(self.workspace(programs), config).double().cpu() - self.expected
        ).norm() / self.expected.norm()
        assert error <= TOLERANCE[self.dtype]


@pytest.mark.parametrize("programs", [1, 2, 3, 7, 40])
def test_decode_attends_to_ragged_sequences_across_ranges(programs: int) -> None:
    Case([1, 16, 17, 100, 33, 5], heads=(4, 2)).check(programs)


@pytest.mark.parametrize("programs", [5, 18, 37])
def test_decode_merges_many_parts_of_one_sequence(programs: int) -> None:
    Case([591]).check(programs)


@pytest.mark.parametrize("programs", [15, 16, 17, 23, 60])
@pytest.mark.parametrize("lengths", [[100, 33, 161, 17], [1, 1, 1, 2000], [64, 64, 64, 64]])
def test_decode_attends_to_few_sequences_in_ranges_of_their_own(lengths: Sequence[int], programs: int) -> None:
    """With 15 programs, ranges still have tiles of two sequences."""
    case = Case(lengths, heads=(4, 2))
    case.check(programs)
    if programs < 16:
        return
    workspace = case.workspace(programs)
    case.run(workspace)
    written = ~workspace.acc.flatten(2).isnan().all(2)
    assert not written.all(1).any(), "a program has parts of two sequences"


def test_decode_shares_ranges_where_those_of_one_sequence_would_be_much_longer() -> None:
    """13 tiles for each of 5 sequences: ranges of 3 tiles for 22 programs, or of 4 if no sequences shared one."""
    case = Case([208] * 5, heads=(4, 2))
    case.check(22)
    workspace = case.workspace(22)
    case.run(workspace)
    written = ~workspace.acc.flatten(2).isnan().all(2)
    assert written.all(1).any()


@pytest.mark.parametrize(
    ("lengths", "programs", "extra_tiles", "whole"),
    [
        ([64] * 5, 7, 1, True),  # 20 tiles in ranges of 3 or 4
        ([64] * 5, 7, 0, False),
        ([1, 100, 33, 17, 64], 5, 3, True),  # 17 tiles in ranges of 4; the longest sequence has 7
        ([1, 100, 33, 17, 64], 5, 2, False),
        ([1, 100, 33, 17, 64], 4, 3, False),
        ([64, 50], 40, 9, True),  # ranges of 1 tile, or of 4
        ([65, 50], 40, 9, False),
        ([64], 1, 0, True),
    ],
)
def test_decode_divides_no_sequence_where_ranges_become_little_longer(
    lengths: Sequence[int], programs: int, extra_tiles: int, whole: bool
) -> None:
    config = evolve(SMALL, extra_tiles=extra_tiles)
    case = Case(lengths, heads=(4, 2))
    case.check(programs, config)
    workspace = case.workspace(programs)
    case.run(workspace, config)
    assert bool(workspace.acc.isnan().all()) == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_decode_divides_no_sequence_within_a_window_and_with_sinks(dtype: torch.dtype) -> None:
    """Windows of 50 positions have up to 5 tiles."""
    config = evolve(SMALL, extra_tiles=4)
    kv_dtype = torch.float8_e4m3fn if dtype == torch.float16 else None
    case = Case([300, 70, 1, 129], window=50, has_sinks=True, dtype=dtype, kv_dtype=kv_dtype)
    case.check(6, config)
    workspace = case.workspace(6)
    case.run(workspace, config)
    assert workspace.acc.isnan().all()


@pytest.mark.parametrize(("length", "parts"), [(16 * 16, 16), (16 * 16 + 1, 9), (38 * 16, 19), (70 * 16, 35)])
def test_decode_makes_ranges_longer_where_a_sequence_has_many_parts(length: int, parts: int) -> None:
    config = evolve(SMALL, min_tiles=2)
    case = Case([length])
    case.check(80, config)
    workspace = case.workspace(80)
    case.run(workspace, config)
    assert int((~workspace.acc.flatten(2).isnan().all(2)).sum()) == parts


@pytest.mark.parametrize("start_tiles", [1, 2, 5])
@pytest.mark.parametrize("programs", [1, 2, 3, 7, 11, 40])
def test_decode_attends_across_ranges_that_count_the_starts_of_sequences(programs: int, start_tiles: int) -> None:
    Case([1, 16, 17, 100, 33, 5], heads=(4, 2)).check(programs, evolve(SMALL, start_tiles=start_tiles))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("programs", [4, 9])
def test_decode_counts_the_starts_of_sequences_within_a_window_and_with_sinks(
    programs: int, dtype: torch.dtype
) -> None:
    kv_dtype = torch.float8_e4m3fn if dtype == torch.float16 else None
    case = Case([300, 70, 1, 129, 2, 3], window=50, has_sinks=True, dtype=dtype, kv_dtype=kv_dtype)
    case.check(programs, evolve(SMALL, start_tiles=2))


@pytest.mark.parametrize(("start_tiles", "parts"), [(0, 3), (3, 2)])
def test_decode_gives_ranges_with_many_starts_fewer_tiles(start_tiles: int, parts: int) -> None:
    """12 sequences of one tile and one of 12, in 6 ranges: of 4 tiles, or of 11 that count 3 per start."""
    config = evolve(SMALL, start_tiles=start_tiles)
    case = Case([16] * 12 + [12 * 16])
    case.check(6, config)
    workspace = case.workspace(6)
    case.run(workspace, config)
    assert int((~workspace.acc.flatten(2).isnan().all(2)).sum()) == parts


def test_decode_attends_to_few_sequences_within_a_window() -> None:
    Case([300, 70, 1], window=50).check(14)


def test_decode_reuses_a_workspace_for_consecutive_launches() -> None:
    case = Case([70, 200, 31])
    workspace = case.workspace(6)
    first = case.run(workspace)
    torch.testing.assert_close(case.run(workspace), first, rtol=0, atol=0)
    other = Case([1, 260])
    torch.testing.assert_close(other.run(workspace).double().cpu(), other.expected, rtol=1e-4, atol=1e-5)


def test_decode_writes_no_parts_when_sequences_fill_ranges() -> None:
    case = Case([64] * 6)
    workspace = case.workspace(3)
    case.run(workspace)
    assert workspace.acc.isnan().all()


def test_decode_leaves_rows_beyond_num_sequences_unchanged() -> None:
    case = Case([20, 40])
    assert (case.run(case.workspace(3), extra_rows=2)[2:] == -7).all()


@pytest.mark.parametrize("count", [15, 16, 17, pytest.param(300, marks=pytest.mark.gpu)])
def test_decode_attends_with_any_number_of_sequences(count: int) -> None:
    Case([1 + 7 * i % 23 for i in range(count)], heads=(1, 1), dim=16).check(4)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 40, 500])
def test_decode_attends_within_a_window_across_ranges(window: int) -> None:
    Case([1, 90, 200, 16], window=window).check(5)


def test_decode_caps_scores_across_ranges() -> None:
    Case([90, 200, 16], softcap=1.5).check(5)


@pytest.mark.parametrize("programs", [1, 5])
@pytest.mark.parametrize("programs_per_sm", [1, 2])
def test_decode_adds_sinks_once_within_and_across_ranges(programs_per_sm: int, programs: int) -> None:
    config = DecodeConfig(block_n=16, num_warps=4, num_stages=2, programs_per_sm=programs_per_sm)
    Case([90, 200, 3], heads=(6, 2), window=70, has_sinks=True).check(programs, config)


@pytest.mark.parametrize("group", [1, 3, 7, 8, 16, 20])
def test_decode_attends_with_groups_of_any_size(group: int) -> None:
    Case([50, 9], heads=(2 * group, 2)).check(3)


@pytest.mark.parametrize("dim", [16, 48, 80, 96, 256])
def test_decode_attends_with_heads_of_any_multiple_of_16(dim: int) -> None:
    Case([50, 9], dim=dim).check(3)


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("block_n", [16, 64])
def test_decode_finds_cache_blocks_smaller_and_larger_than_tiles(block_n: int, block_size: int) -> None:
    config = DecodeConfig(block_n=block_n, num_warps=2, num_stages=3, programs_per_sm=1)
    Case([50, 130], block_size=block_size).check(3, config)


@pytest.mark.parametrize("dtype", HALVES)
def test_decode_attends_in_half_precision(dtype: Any) -> None:
    Case([50, 130], dtype=dtype).check(3)


def float8(lengths: Sequence[int] = (50, 130), dtype: torch.dtype = torch.bfloat16, **options: Any) -> Case:
    """A case with a float8 cache; products are computed in float16, which the interpreter supports."""
    return Case(lengths, dtype=dtype, kv_dtype=torch.float8_e4m3fn, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float8_decode_attends_with_16_bit_queries(dtype: torch.dtype) -> None:
    float8(dtype=dtype).check(3)


@pytest.mark.parametrize("group", [1, 3, 8, 9])
def test_float8_decode_attends_with_groups_of_any_size(group: int) -> None:
    float8(heads=(2 * group, 2)).check(3)


@pytest.mark.parametrize("dim", [16, 48, 80, 128, 256])
def test_float8_decode_attends_with_heads_of_any_size(dim: int) -> None:
    float8(dim=dim).check(3)


@pytest.mark.parametrize("block_size", [1, 16, 48, 64])
@pytest.mark.parametrize("block_n", [16, 64])
def test_float8_decode_finds_cache_blocks_smaller_and_larger_than_tiles(block_n: int, block_size: int) -> None:
    config = DecodeConfig(block_n=block_n, num_warps=2, num_stages=3, programs_per_sm=1)
    float8(block_size=block_size).check(3, config)


@pytest.mark.parametrize("window", [1, 16, 40])
def test_float8_decode_attends_within_a_window(window: int) -> None:
    float8([1, 90, 200, 16], window=window).check(5)


def test_float8_decode_caps_scores() -> None:
    float8([90, 200, 16], softcap=1.5).check(5)


@pytest.mark.parametrize("exponent", [-60, -20, 20, 60])
def test_float8_decode_keeps_queries_beyond_the_range_of_float16(exponent: int) -> None:
    float8(q_factor=2.0**exponent).check(3)


@pytest.mark.gpu
def test_float8_decode_returns_nan_for_nan_within_the_context_only() -> None:
    """Put a NaN into the keys, then the values, of one sequence and KV head.

    All slots beyond the contexts are NaN too. The interpreter has no NaN in float8.
    """
    for part in ("keys", "values"):
        case = float8([50, 130, 70], heads=(4, 2))
        block = case.tables[1, 100 // case.block_size].item()
        getattr(case, part)[block, 100 % case.block_size, 1] = torch.nan
        out = case.run(case.workspace(3)).float().cpu()
        assert out[1, 2:].isnan().all()
        out[1, 2:] = 0
        assert out.isfinite().all()


def test_float8_decode_does_not_lose_many_small_weights() -> None:
    """One key has nearly all of the weight; each other has less than half of the smallest number of float16."""
    length = 1000
    case = float8([length], heads=(1, 1), dim=16)
    case.keys.zero_()
    case.q.fill_(1.0)
    case.values.fill_(1.0)
    block, slot = case.tables[0, 7].item(), 3
    case.keys[block, slot, 0] = 4.5  # a score of 16 * 4.5 / 4 = 18; exp(-18) = 2^-26
    case.values[block, slot, 0] = 0.0
    out = case.run(case.workspace(2)).double().cpu()
    expected = (length - 1) / (length - 1 + math.exp(18.0))
    torch.testing.assert_close(out, torch.full_like(out, expected), rtol=1e-2, atol=0)


@pytest.mark.parametrize("dim", [16, 48])
@pytest.mark.parametrize(("heads", "fold"), [((4, 4), 2), ((8, 4), 4), ((12, 4), 2)])
@pytest.mark.parametrize("programs", [1, 4])
def test_float8_decode_folds_adjacent_kv_heads(programs: int, heads: Any, fold: int, dim: int) -> None:
    config = DecodeConfig(block_n=16, num_warps=4, num_stages=2, programs_per_sm=2, fold=fold)
    float8([50, 130, 7], heads=heads, dim=dim).check(programs, config)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("heads", "fold", "dim"), [((4, 4), 2, 64), ((8, 4), 4, 16), ((12, 4), 2, 48)])
@pytest.mark.parametrize(("programs", "programs_per_sm"), [(1, 1), (4, 1), (4, 2)])
def test_decode_folds_adjacent_kv_heads(
    programs: int, programs_per_sm: int, heads: Any, fold: int, dim: int, dtype: torch.dtype
) -> None:
    config = DecodeConfig(block_n=16, num_warps=4, num_stages=2, programs_per_sm=programs_per_sm, fold=fold)
    Case([50, 130, 7], heads=heads, dim=dim, dtype=dtype, has_sinks=True).check(programs, config)


@pytest.mark.parametrize("programs", [1, 4])
def test_float8_decode_adds_sinks_to_folded_heads(programs: int) -> None:
    config = DecodeConfig(block_n=16, num_warps=4, num_stages=2, programs_per_sm=2, fold=2)
    float8([50, 130, 7], heads=(8, 4), dim=16, has_sinks=True).check(programs, config)


@pytest.mark.parametrize("programs", [1, 2, 5])
def test_decode_scales_values(programs: int) -> None:
    """Both for sequences within one range and for merged parts."""
    Case([50, 130, 7], kv_dtype=torch.float8_e4m3fn, value_scale=0.37).check(programs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "dim", "kv_dtype"),
    [
        ((32, 8), 128, torch.float8_e4m3fn),
        ((64, 8), 128, torch.float8_e4m3fn),
        ((32, 32), 128, torch.float8_e4m3fn),
        ((32, 8), 64, torch.float8_e4m3fn),
        ((64, 8), 64, torch.float8_e4m3fn),
        ((64, 4), 128, torch.float8_e4m3fn),
        ((32, 8), 128, torch.bfloat16),
        ((16, 8), 128, torch.bfloat16),
        ((32, 8), 64, torch.bfloat16),
        ((16, 8), 256, torch.bfloat16),
    ],
)
def test_decode_launches_exactly_the_programs_that_fit(
    heads: Any, dim: int, kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More would run one after the other; fewer would be distributed unevenly.

    Except for one sequence in 16 bits, which is divided among one program per multiprocessor.
    """
    properties = torch.cuda.get_device_properties(DEVICE)
    if properties.major != 9:
        pytest.skip("launches are tuned for Hopper")
    compiled = []

    class Spy:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *args, **options: compiled.append(kernel[grid](*args, **options))

    kernel = module._decode_kernel
    monkeypatch.setattr(module, "_decode_kernel", Spy())
    memory = properties.shared_memory_per_multiprocessor
    for _, config in decode_configs(dim, kv_dtype.itemsize, memory, heads):
        if config.programs_per_sm == 1:
            continue
        case = Case([50, 130], heads=heads, dim=dim, dtype=torch.bfloat16, kv_dtype=kv_dtype)
        case.run(case.workspace(config.programs_per_head(heads[1], torch.device(DEVICE))), config)
        registers = -(-compiled[-1].n_regs // 8) * 8
        by_registers = 16384 // (registers * 32) * 4 // config.num_warps
        by_memory = memory // (compiled[-1].metadata.shared + 1024)
        assert min(by_registers, by_memory) == config.programs_per_sm


@pytest.mark.parametrize("number", range(5))
def test_decode_attends_with_each_config(number: Any) -> None:
    config = decode_configs(32, 4, 233472, (8, 1))[number][1]
    Case([50, 130, 7]).check(config.programs_per_sm, config)


def test_pad_sequences_returns_few_sizes() -> None:
    assert {pad_sequences(count) for count in range(1, 513)} == {32, 256, 512}
