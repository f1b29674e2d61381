"""Composite layers with norms of which each rank computes its own rows, as threads with the real protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from engine.core.distributed import PartialSum
from engine.core.distributed.overlapped_sums import Allocate
from engine.core.distributed.partial_sum import SplitSum
from engine.core.distributed.scattered_rows import ScatteredRows, whole_rows
from engine.core.distributed.sum_scatter import SumScatter
from engine.core.layers import LayerFactory
from engine.core.layers.normed_parts import NormedParts
from tests.core.distributed.immediate_driver import ImmediateDriver, Meeting, on_ranks, patch_streams
from tests.core.layers.test_blocks import EPS, HIDDEN, INTERMEDIATE, attention_block, fill, forward_pass, gated_mlp, mlp
from tests.testing.quant_faults import ByRow, Fused

ROWS, FIRST, RANKS = 21, 12, 4


@pytest.fixture(autouse=True)
def _streams(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_streams(monkeypatch, captures=False)


class Halves(SumScatter):
    """A SumScatter that splits few rows, too."""

    def split(self, rows: int) -> int | None:
        return FIRST if rows > FIRST else None


def make(group: Meeting, allocate: Allocate, *, splits: bool, fused: bool = False) -> LayerFactory:
    driver: Any = ImmediateDriver()
    sizes: dict[str, Any] = {"max_rows": 1024, "size": HIDDEN, "dtype": torch.float32}
    group.overlapped_sums = Halves(driver, group, allocate, torch.device("cpu", 0), **sizes) if splits else None
    return LayerFactory(dtype="float32", device="cpu", group=group, fused=fused)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, HIDDEN, generator=generator), torch.randn(ROWS, HIDDEN, generator=generator)


def check_ranks(work: Callable[[LayerFactory], list[torch.Tensor]], *, fused: bool = False) -> None:
    """Compare the results of whole sums and of scattered ones, which are the same on all ranks to the last bit."""

    def both(group: Meeting, allocate: Allocate) -> list[list[torch.Tensor]]:
        return [work(make(group, allocate, splits=splits, fused=fused)) for splits in (False, True)]

    ranks = on_ranks(RANKS, both)
    for expected, found in ranks:
        for one, other, same in zip(expected, found, ranks[0][1], strict=True):
            torch.testing.assert_close(one, other)
            assert torch.equal(other, same)


@pytest.mark.parametrize("second", [gated_mlp, mlp])
def test_blocks_by_parts_equal_whole_blocks(second: Callable[..., Any]) -> None:
    """Two decoder layers and the last norm."""

    def work(layers: LayerFactory) -> list[torch.Tensor]:
        splits = layers._group.overlapped_sums is not None
        attention, other = attention_block(layers), second(layers)
        norm = layers.norm("last", HIDDEN, EPS)
        fill(layers)
        hidden, residual = inputs()
        for _ in range(2):
            hidden, residual = attention(forward_pass(), hidden, residual, None)
            assert isinstance(hidden, SplitSum) == splits
            hidden, residual = other(hidden, residual)
            assert isinstance(hidden, SplitSum) == isinstance(residual, ScatteredRows) == splits
        normed, residual = norm(hidden, residual)
        return [normed, whole_rows(residual)]

    check_ranks(work)


def add_in_place(residual: Any) -> None:
    residual.add_(1.0)


def set_rows(residual: Any) -> None:
    residual[3:] = 0.5


def write_result(residual: Any) -> None:
    torch.mul(residual, 2.0, out=residual)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("write", [add_in_place, set_rows, write_result])
def test_norms_by_parts_add_a_residual_that_a_model_wrote_to(write: Callable[[Any], None], fused: bool) -> None:
    def work(layers: LayerFactory) -> list[torch.Tensor]:
        first, second = gated_mlp(layers), gated_mlp(layers)
        norm = layers.norm("last", HIDDEN, EPS)
        fill(layers)
        hidden, residual = first(*inputs())
        hidden, residual = second(hidden, residual)
        write(residual)
        normed, residual = norm(hidden, residual)
        return [normed, whole_rows(residual)]

    check_ranks(work, fused=fused)


@pytest.mark.parametrize("kind", ["rms", "layer", "none"])
def test_layers_that_need_whole_sums_gather_sum_and_residual(kind: str) -> None:
    """A norm of a whole sum behind a norm by parts, as of experts behind attention."""

    def work(layers: LayerFactory) -> list[torch.Tensor]:
        attention, other = attention_block(layers), gated_mlp(layers)
        norm: Any = layers._input_norm("" if kind == "none" else "last", HIDDEN, EPS, kind if kind != "none" else "rms")
        fill(layers)
        hidden, residual = attention(forward_pass(), *inputs(), None)
        hidden, residual = other(hidden, residual)
        normed, residual = norm(hidden, residual)
        normed, residual = norm(PartialSum(normed / RANKS, layers._group), residual)
        return [normed, whole_rows(residual)]

    check_ranks(work)


def test_sum_whose_chunks_were_settled_is_normed_whole() -> None:
    def work(layers: LayerFactory) -> list[torch.Tensor]:
        first, second = attention_block(layers), gated_mlp(layers)
        fill(layers)
        hidden, residual = inputs()
        early, total = first(forward_pass(), hidden, residual.clone(), None)
        late, _ = second(hidden, residual.clone())  # settles the former
        found = []
        for one in (early, late):
            made, after = second(one, total.clone())
            found += [made.reduce(), whole_rows(after)]
        return found

    check_ranks(work)


def test_fused_norms_by_parts_equal_whole_norms() -> None:
    def work(layers: LayerFactory) -> list[torch.Tensor]:
        first = gated_mlp(layers)
        second = layers.gated_mlp("second", HIDDEN, INTERMEDIATE, norm="second_norm", eps=EPS)
        norm = layers.norm("last", HIDDEN, EPS)
        fill(layers)
        hidden, residual = inputs()
        for block in (first, second, first):
            hidden, residual = block(hidden, residual)
        normed, residual = norm(hidden, residual)
        return [normed, whole_rows(residual)]

    check_ranks(work, fused=True)


class Next:
    """A linear layer behind a norm, whose kernel quantizes its input."""

    weights: ClassVar[dict[str, torch.Tensor]] = {}

    def __init__(self, fused: Fused) -> None:
        self.fused = fused
        self.asked: list[int] = []

    def fused_input_quantization(self, x: torch.Tensor) -> Fused:
        self.asked.append(len(x))
        return self.fused


@pytest.mark.parametrize("kind", [ByRow, Fused])
def test_norms_by_parts_are_quantized_if_that_is_by_row(kind: type[Fused]) -> None:
    def work(group: Meeting, allocate: Allocate) -> None:
        layers = make(group, allocate, splits=True, fused=True)
        norm: Any = layers.norm("last", HIDDEN, EPS)
        fill(layers)
        given, residual = inputs()
        scatter, linear = layers._group.overlapped_sums, Next(kind(None))
        chunks: Any = [scatter.start(part / RANKS) for part in given.split([FIRST, ROWS - FIRST])]  # type: ignore[union-attr]
        parts = NormedParts(norm, linear, chunks, residual.clone(), layers._group)  # type: ignore[arg-type]
        found: list[Any] = [one.x.clone() if kind is ByRow else one.clone() for one in parts]  # type: ignore[union-attr]
        assert set(linear.asked) == {FIRST, ROWS - FIRST}, "the next layer multiplies whole chunks"
        expected = torch.nn.functional.rms_norm(given + residual, (HIDDEN,), norm.weight, EPS)
        torch.testing.assert_close(torch.cat(found), expected)
        torch.testing.assert_close(whole_rows(parts.residual()), given + residual)

    on_ranks(RANKS, work)
