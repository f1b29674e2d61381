"""Composite layers compute large sums in two chunks of rows, whose exchange starts before later rows are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.core.distributed import PartialSum, RankGroup
from engine.core.distributed.partial_sum import SplitSum
from engine.core.distributed.sum_exchange import ExchangedSum
from engine.core.layers import LayerFactory
from engine.testing.ranks import LoneRank, run_ranks
from tests.core.layers.test_blocks import EPS, HIDDEN, INTERMEDIATE, attention_block, fill, forward_pass, gated_mlp, mlp

ROWS = 5


class Exchange:
    """Stands in for a SumExchange: sums by the group's all-reduce, when the sum is needed."""

    def __init__(self, group: RankGroup, first: int = 3) -> None:
        """first: number of rows in the first chunk."""
        self.group = group
        self.first = first
        self.events: list[str] = []
        """What was done, with the number of rows."""

    def supports(self, size: int, dtype: str) -> bool:
        return (size, dtype) == (HIDDEN, "float32")

    def split(self, rows: int) -> int | None:
        return self.first if rows > self.first else None

    def start(self, addend: torch.Tensor) -> ExchangedSum:
        self.events.append(f"start {len(addend)}")
        return ExchangedSum(addend, self.group, self, 0)  # type: ignore[arg-type]

    def receive(self, started: ExchangedSum) -> list[torch.Tensor]:
        self.events.append(f"receive {len(started.addend)}")
        return [started.addend, self.group.all_reduce(started.addend.clone()) - started.addend]

    def release(self, received: ExchangedSum) -> None:
        pass


def make(group: RankGroup, splits: bool) -> LayerFactory:
    group.overlapped_sums = Exchange(group) if splits else None  # type: ignore[assignment]
    return LayerFactory(dtype="float32", device="cpu", group=group)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, HIDDEN, generator=generator), torch.randn(ROWS, HIDDEN, generator=generator)


def whole(hidden: Any) -> torch.Tensor:
    return hidden.reduce() if isinstance(hidden, PartialSum) else hidden


@pytest.mark.parametrize("second", [gated_mlp, mlp])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_blocks_in_chunks_equal_whole_blocks(second: Callable[..., Any], scale: float) -> None:
    """Two decoder layers and the last norm."""

    def work(group: RankGroup) -> Any:
        found = []
        for splits in (False, True):
            layers = make(group, splits)
            attention, other = attention_block(layers, output_scale=scale), second(layers)
            norm = layers.norm("last", HIDDEN, EPS)
            fill(layers)
            hidden, residual = inputs()
            for _ in range(2):
                hidden, residual = attention(forward_pass(), hidden, residual, None)
                assert isinstance(hidden, SplitSum) == splits
                hidden, residual = other(hidden, residual)
                assert isinstance(hidden, SplitSum) == splits
            found.append(norm(hidden, residual))
        return found

    for expected, found in run_ranks(2, work):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_chunk_is_sent_before_the_sum_of_the_next_is_needed() -> None:
    group = LoneRank(0, 2)
    layers = make(group, splits=True)
    attention, other = attention_block(layers), gated_mlp(layers)
    fill(layers)
    hidden, residual = attention(forward_pass(), *inputs(), None)
    hidden, residual = other(hidden, residual)
    attention(forward_pass(), hidden, residual, None)
    exchange: Any = group.overlapped_sums
    sent = ["start 3", "start 2"]
    assert exchange.events == [*sent, "receive 3", "start 3", "receive 2", "start 2", "receive 3", "receive 2", *sent]


def test_few_rows_are_not_split() -> None:
    layers = make(LoneRank(0, 2), splits=True)
    attention, other = attention_block(layers), gated_mlp(layers)
    fill(layers)
    hidden, residual = (given[:3] for given in inputs())
    hidden, residual = attention(forward_pass(), hidden, residual, None)
    assert type(hidden) is PartialSum
    assert type(other(hidden, residual)[0]) is PartialSum


def test_mlp_splits_its_result_behind_a_sum_that_is_whole() -> None:
    layers = make(LoneRank(0, 2), splits=True)
    other = gated_mlp(layers)
    fill(layers)
    assert isinstance(other(*inputs())[0], SplitSum)


def test_blocks_without_a_norm_of_their_input_or_with_one_of_their_result_are_not_split() -> None:
    """The result of the first is part of another sum, and that of the second is reduced by the block."""
    layers = make(LoneRank(0, 2), splits=True)
    settings: dict[str, Any] = {"eps": EPS}
    alone = layers.gated_mlp("a", HIDDEN, INTERMEDIATE, norm="", **settings)
    normed = layers.gated_mlp("b", HIDDEN, INTERMEDIATE, norm="n", output_norm="after", **settings)
    fill(layers)
    assert type(alone(*inputs())[0]) is PartialSum
    assert isinstance(normed(*inputs())[0], torch.Tensor)


def test_residual_of_chunks_without_a_residual_is_their_sum() -> None:
    layers = make(LoneRank(0, 2), splits=True)
    first, second = gated_mlp(layers), attention_block(layers)
    fill(layers)
    hidden, _ = first(inputs()[0], None)
    addends = [chunk.addend.clone() for chunk in hidden.chunks]
    _, residual = second(forward_pass(), hidden, None, None)
    torch.testing.assert_close(residual, torch.cat(addends))


def test_split_sum_is_part_of_another_sum_by_its_addends() -> None:
    def work(group: RankGroup) -> Any:
        exchange: Any = Exchange(group)
        rows = [torch.full((count, HIDDEN), 1.0 + group.rank) for count in (3, 2)]
        both = SplitSum([exchange.start(one) for one in rows], group) + PartialSum(torch.ones(ROWS, HIDDEN), group)
        return both.reduce()

    for found in run_ranks(2, work):
        assert torch.equal(found, torch.full((ROWS, HIDDEN), 5.0))
