"""The decode kernel where its stretches, tiles and paddings meet; the attention suite covers the rest."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
import torch
import triton
from attrs import define

from engine.core.attention.base import AttentionSpec
from engine.ops.attention.paged_decode import (
    DecodeConfig,
    DecodeWorkspace,
    decode_configs,
    pad_sequences,
    paged_decode,
    pieces_at_once,
)
from engine.testing.attention import dense_attention

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
pytestmark = [] if triton.knobs.runtime.interpret else [pytest.mark.gpu]
# The interpreter multiplies no bfloat16.
HALVES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
SMALL = DecodeConfig(tile=16, warps=4, stages=2, programs=2)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@define(slots=False)
class Case:
    """Sequences in a pool that is NaN elsewhere, and what their last tokens attend to."""

    lengths: Sequence[int]
    heads: tuple[int, int] = (2, 1)
    dim: int = 32
    page: int = 16
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    value_scale: float = 1.0

    def __attrs_post_init__(self) -> None:
        torch.manual_seed(0)
        heads, kv_heads = self.heads
        kv_dtype = self.kv_dtype or self.dtype
        counts = [-(-length // self.page) for length in self.lengths]
        order = torch.randperm(sum(counts) + 1).tolist()
        shape = (sum(counts) + 1, self.page, kv_heads, self.dim)
        pool = [torch.full(shape, torch.nan) for _ in range(2)]
        self.tables = torch.full((len(counts), max(counts)), order.pop(), dtype=torch.int32)
        # A view of the packed projections, as the model hands it over.
        packed = torch.randn(len(counts), heads + 2 * kv_heads, self.dim).to(self.dtype).to(DEVICE)
        self.q = packed[:, :heads]
        expected = []
        for row, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
            self.tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
            at = torch.arange(length)
            blocks, offsets = self.tables[row][at // self.page].long(), at % self.page
            k, v = (torch.randn(length, kv_heads, self.dim).to(kv_dtype).float() for _ in range(2))
            pool[0][blocks, offsets], pool[1][blocks, offsets] = k, v
            v = v.double() * self.value_scale
            expected.append(dense_attention(self.q[row : row + 1].cpu(), k, v, self.spec(), self.window))
        self.expected = torch.cat(expected)
        self.keys, self.values = (part.to(kv_dtype).to(DEVICE) for part in pool)

    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_layers=1,
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=self.dim,
            scale=self.dim**-0.5,
            dtype="float32",
            kv_dtype="float32",
            block_size=self.page,
            max_len=max(self.lengths),
            sliding_windows=(self.window,),
            softcap=self.softcap,
        )

    def workspace(self, programs: int) -> DecodeWorkspace:
        made = DecodeWorkspace.make(programs, *self.heads, self.dim, DEVICE)
        made.sums.fill_(torch.nan)
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
            scale=self.dim**-0.5,
            softcap=self.softcap,
            window=self.window,
            value_scale=self.value_scale,
            workspace=workspace,
            config=config,
        )
        assert not workspace.arrivals.any(), "arrivals are not 0 again"
        return out

    def check(self, programs: int, config: DecodeConfig = SMALL) -> None:
        error = (
            self.run(self.workspace(programs), config).double().cpu() - self.expected
        ).norm() / self.expected.norm()
        assert error <= TOLERANCE[self.dtype]


@pytest.mark.parametrize("programs", [1, 2, 3, 7, 40])
def test_ragged_sequences_across_stretches(programs):
    Case([1, 16, 17, 100, 33, 5], heads=(4, 2)).check(programs)


@pytest.mark.parametrize("programs", [5, 18, 37])
def test_one_sequence_of_many_pieces(programs):
    Case([591]).check(programs)


def test_a_workspace_serves_one_launch_after_the_other():
    case = Case([70, 200, 31])
    workspace = case.workspace(6)
    first = case.run(workspace)
    torch.testing.assert_close(case.run(workspace), first, rtol=0, atol=0)
    other = Case([1, 260])
    torch.testing.assert_close(other.run(workspace).double().cpu(), other.expected, rtol=1e-4, atol=1e-5)


def test_sequences_that_fill_stretches_leave_no_pieces():
    case = Case([64] * 6)
    workspace = case.workspace(3)
    case.run(workspace)
    assert workspace.sums.isnan().all()


def test_rows_beyond_the_decodes_are_left_alone():
    case = Case([20, 40])
    assert (case.run(case.workspace(3), extra_rows=2)[2:] == -7).all()


@pytest.mark.parametrize("count", [15, 16, 17, pytest.param(300, marks=pytest.mark.gpu)])
def test_any_number_of_sequences(count):
    Case([1 + 7 * i % 23 for i in range(count)], heads=(1, 1), dim=16).check(4)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 40, 500])
def test_a_window_across_stretches(window):
    Case([1, 90, 200, 16], window=window).check(5)


def test_a_soft_cap_across_stretches():
    Case([90, 200, 16], softcap=1.5).check(5)


@pytest.mark.parametrize("group", [1, 3, 7, 8, 16, 20])
def test_groups_of_any_size(group):
    Case([50, 9], heads=(2 * group, 2)).check(3)


@pytest.mark.parametrize("dim", [16, 48, 80, 96, 256])
def test_heads_of_any_multiple_of_16(dim):
    Case([50, 9], dim=dim).check(3)


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("tile", [16, 64])
def test_pages_smaller_and_larger_than_tiles(tile, page):
    Case([50, 130], page=page).check(3, DecodeConfig(tile=tile, warps=2, stages=3, programs=1))


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision(dtype):
    Case([50, 130], dtype=dtype).check(3)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_cache_of_8_bits(dtype):
    Case([50, 130], dtype=dtype, kv_dtype=torch.float8_e4m3fn).check(3)


@pytest.mark.parametrize("programs", [1, 2, 5])
def test_values_that_count_more_than_once(programs):
    """Whole sequences, and those put together from pieces."""
    Case([50, 130, 7], kv_dtype=torch.float8_e4m3fn, value_scale=0.37).check(programs)


@pytest.mark.parametrize("shared_memory", [65536, 102400, 167936, 233472])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [16, 96, 128, 256])
def test_launches_fit_a_multiprocessor(head_dim, itemsize, shared_memory):
    configs = decode_configs(head_dim, itemsize, shared_memory)
    for _, config in configs:
        tiles = (config.stages - 1) * 2 * config.tile * triton.next_power_of_2(head_dim) * itemsize
        assert config.programs * (tiles + 4096) <= shared_memory or (config.stages, config.programs) == (2, 1)
        assert config.tile in (16, 32, 64, 128)
    most = [most for most, _ in configs]
    assert most == sorted(most)
    assert most[-1] == float("inf")


def test_launches_are_those_measured_where_the_memory_is_as_large():
    """228 KB a multiprocessor, heads of 128 numbers."""
    assert [attrs.astuple(config) for _, config in decode_configs(128, 2, 233472)] == [
        (32, 4, 4, 1),
        (64, 4, 4, 2),
        (64, 2, 2, 4),
        (16, 1, 3, 8),
    ]
    assert attrs.astuple(decode_configs(128, 1, 233472)[-1][1]) == (32, 1, 3, 10)


@pytest.mark.parametrize("number", range(4))
def test_launches_that_are_chosen(number):
    config = decode_configs(32, 4, 233472)[number][1]
    Case([50, 130, 7]).check(config.programs, config)


def test_few_lengths_of_the_vector_of_lengths():
    assert {pad_sequences(count) for count in range(1, 513)} == {16, 256, 512}


@pytest.mark.parametrize("programs", [1, 2, 3, 4])
def test_pieces_put_together_at_once_are_few_enough_for_the_registers(programs):
    config = DecodeConfig(tile=64, warps=4, stages=3, programs=programs)
    sizes = {dim: pieces_at_once(4, dim, config) for dim in (64, 128, 256)}
    assert all(count == 1 or count * 4 * dim <= 64 * 128 // programs for dim, count in sizes.items())
    assert pieces_at_once(1, 16, config) == 16
