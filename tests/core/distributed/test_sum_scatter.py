"""Sums by parts of rows: on four GPUs, and their protocol on the CPU, by a driver that runs operations immediately."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.distributed.overlapped_sums import Allocate
from engine.core.distributed.scattered_rows import ScatteredRows, whole_rows
from engine.core.distributed.scattered_sum import ScatteredSum
from engine.core.distributed.sum_exchange import ExchangedSum
from engine.core.distributed.sum_scatter import SumScatter
from engine.core.errors import ExecutorError
from tests.core.distributed.gpu_processes import run_script
from tests.core.distributed.immediate_driver import ImmediateDriver, Meeting, on_ranks, patch_streams

SIZE, MAX_ROWS = 8, 4096


@pytest.fixture(params=[False, True], ids=["eager", "captured"])
def immediate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_streams(monkeypatch, captures=request.param)


def on_scatters(ranks: int, work: Callable[[SumScatter, Meeting], Any], max_rows: int = MAX_ROWS) -> list[Any]:
    """Run `work` on each rank, and check that no flag is set at the end."""

    def run(group: Meeting, allocate: Allocate) -> Any:
        driver: Any = ImmediateDriver()
        sizes: dict[str, Any] = {"max_rows": max_rows, "size": SIZE, "dtype": torch.bfloat16}
        scatter = SumScatter(driver, group, allocate, torch.device("cpu", 0), **sizes)
        found = work(scatter, group)
        group.minimum(0)
        assert not scatter._memory[scatter._flags_at :].view(torch.int32).any(), "a flag is set"
        return found

    return on_ranks(ranks, run)


def addends(rank: int, rows: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(count, SIZE, generator=generator).to(torch.bfloat16) for count in rows]


def sums(ranks: int, rows: list[int]) -> list[torch.Tensor]:
    """The sums in the order of the ranks, rounded once."""
    found = []
    for same in zip(*(addends(rank, rows) for rank in range(ranks)), strict=True):
        total = same[0].float()
        for one in same[1:]:
            total = total + one
        found.append(total.to(torch.bfloat16))
    return found


def doubled(chunk: ScatteredSum | ExchangedSum) -> ScatteredSum:
    """Have the ranks compute twice the sum, and the number of each row's owner."""
    assert isinstance(chunk, ScatteredSum)
    with chunk.norm_stream():
        own = chunk.receive().reduce()
        chunk.gather([2 * own, torch.full((len(own),), chunk.slot, dtype=torch.float32)])
    return chunk


@pytest.mark.usefixtures("immediate")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_owners_results_reach_all_ranks_in_the_order_of_a_pipeline(ranks: int) -> None:
    """Two sums are always in progress, and all memory is used many times. Some parts have no rows."""
    rows = [640, 512, 5, 2] * 6

    def work(scatter: SumScatter, group: Meeting) -> list[torch.Tensor]:
        found, before = [], None
        for number, addend in enumerate(addends(group.rank, rows)):
            if (number + group.rank) % 3 == 0:
                time.sleep(0.001)  # the ranks are not in step
            chunk = scatter.start(addend)
            if before is not None:
                found.append(doubled(before).finish()[0].clone())
            before = chunk
        assert before is not None
        return [*found, doubled(before).finish()[0].clone()]

    for found in on_scatters(ranks, work):
        for one, wanted in zip(found, sums(ranks, rows), strict=True):
            assert torch.equal(one, 2 * wanted)


@pytest.mark.usefixtures("immediate")
def test_both_chunks_are_normed_before_either_is_finished() -> None:
    """As the blocks do: the second chunk's addend is sent behind the first chunk's norm."""
    rows = [640, 512] * 5

    def work(scatter: SumScatter, group: Meeting) -> list[torch.Tensor]:
        found = []
        given = addends(group.rank, rows)
        one, two = scatter.start(given[0]), scatter.start(given[1])
        for following in range(2, len(rows) + 2, 2):
            assert isinstance(one, ScatteredSum)
            assert isinstance(two, ScatteredSum)
            assert one.is_sent
            assert not two.is_sent
            doubled(one)
            assert two.is_sent
            doubled(two)
            values, numbers = one.finish()
            assert numbers.eq(one.slot).all()
            found.append(values.clone())
            if following < len(rows):
                one = scatter.start(given[following])
            found.append(two.finish()[0].clone())
            if following < len(rows):
                two = scatter.start(given[following + 1])
        return found

    for found in on_scatters(4, work):
        for one, wanted in zip(found, sums(4, rows), strict=True):
            assert torch.equal(one, 2 * wanted)


@pytest.mark.usefixtures("immediate")
def test_third_sum_moves_a_norm_that_was_not_received() -> None:
    rows = [9, 5, 2]

    def work(scatter: SumScatter, group: Meeting) -> list[torch.Tensor]:
        given = addends(group.rank, rows)
        chunks: list[Any] = [doubled(scatter.start(addend)) for addend in given[:2]]
        chunks.append(doubled(scatter.start(given[2])))
        return [chunk.finish()[0].clone() for chunk in chunks]

    for found in on_scatters(4, work):
        for one, wanted in zip(found, sums(4, rows), strict=True):
            assert torch.equal(one, 2 * wanted)


@pytest.mark.usefixtures("immediate")
def test_split_is_a_multiple_of_tiles_between_the_limits() -> None:
    def work(scatter: SumScatter, group: Meeting) -> list[int | None]:
        return [scatter.split(rows) for rows in (0, 4095, 4096, 4097, 8192, 8193)]

    assert on_scatters(2, work, max_rows=8192) == [[None, None, 2048, 2176, 4096, None]] * 2


@pytest.mark.usefixtures("immediate")
def test_third_sum_settles_the_first() -> None:
    rows = [3, 9, 300, 4, 1, 8, 7]

    def work(scatter: SumScatter, group: Meeting) -> list[torch.Tensor]:
        chunks = [scatter.start(addend) for addend in addends(group.rank, rows)]
        found = [chunk.reduce() for chunk in reversed(chunks)]
        assert all(chunk.reduce() is one for chunk, one in zip(reversed(chunks), found, strict=True))
        return found

    for found in on_scatters(4, work):
        for one, wanted in zip(reversed(found), sums(4, rows), strict=True):
            assert torch.equal(one, wanted)


@pytest.mark.usefixtures("immediate")
def test_addends_are_withdrawn_unchanged() -> None:
    rows = [5] * 4

    def work(scatter: SumScatter, group: Meeting) -> torch.Tensor:
        *first, last = (scatter.start(addend) for addend in addends(group.rank, rows))
        for one, wanted in zip(first, addends(group.rank, rows), strict=False):
            assert torch.equal(one.withdraw(), wanted)
        return last.reduce()

    for found in on_scatters(4, work):
        assert torch.equal(found, sums(4, rows)[-1])


@pytest.mark.usefixtures("immediate")
def test_sum_that_was_normed_is_refused_when_it_is_used_again() -> None:
    """Also before its norm is finished. No rank would send the addends again."""

    def work(scatter: SumScatter, group: Meeting) -> None:
        chunk = doubled(scatter.start(addends(group.rank, [9])[0]))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the addends of a PartialSum were summed before; pass it to one"):
                chunk.reduce()
            if chunk in scatter._in_progress:
                chunk.finish()

    on_scatters(4, work)


@pytest.mark.usefixtures("immediate")
def test_a_rank_that_is_alone_waits_for_no_other() -> None:
    def work(scatter: SumScatter, group: Meeting) -> None:
        scatter.is_alone = True
        [addend] = addends(group.rank, [4])
        chunk = scatter.start(addend)
        assert chunk.reduce() is addend
        assert chunk.withdraw() is addend

    on_scatters(4, work)


@pytest.mark.usefixtures("immediate")
def test_norm_that_is_larger_than_its_memory_is_an_error() -> None:
    def work(scatter: SumScatter, group: Meeting) -> None:
        chunk = scatter.start(addends(group.rank, [2048])[0])
        assert isinstance(chunk, ScatteredSum)
        with pytest.raises(ExecutorError, match=r"a norm of 2048 rows of 64 bytes does not fit rank \d's memory"):
            chunk.gather([torch.zeros(chunk.end - chunk.begin, 2 * SIZE)])
        with pytest.raises(
            ExecutorError, match=r"rank \d has 512 rows of a sum, but its norm has a tensor of 511 rows"
        ):
            chunk.gather([torch.zeros(511, SIZE)])
        chunk.reduce()

    on_scatters(4, work)


def test_driver_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_streams(monkeypatch, captures=False)

    def work(scatter: SumScatter, group: Meeting) -> None:
        driver: Any = scatter._driver
        driver.copy = lambda *given: 719
        with pytest.raises(
            ExecutorError, match=f"rank {group.rank} of 4: a sum next to computation failed: CUDA error 719"
        ):
            scatter.start(addends(group.rank, [8])[0])

    on_scatters(4, work)


def test_scattered_rows_are_gathered() -> None:
    whole = torch.arange(22.0).view(11, 2)

    def work(group: Meeting, allocate: Allocate) -> torch.Tensor:
        first = whole[:8][2 * group.rank : 2 * group.rank + 2]
        last = whole[8:][group.rank : group.rank + 1]  # the last rank has none of these three
        rows = ScatteredRows([first, last], [8, 3], group)
        assert len(rows) == 11
        assert (rows.shape, rows.dtype, rows.device, rows.ndim) == (whole.shape, whole.dtype, whole.device, 2)
        assert not rows.is_gathered, "these need no other rank"
        assert whole_rows(rows) is rows.whole()
        zeros = torch.zeros(11, 2)
        for found in (rows + 0.0, zeros + rows, 1.0 * rows, torch.cat([rows[:4], rows[4:]]), zeros.copy_(rows)):  # type: ignore[arg-type]
            assert torch.equal(found, whole)
        numbers: Any = copy.copy(rows)
        assert numbers.parts == rows.parts
        assert torch.equal(2.0 - numbers, 2.0 - whole)
        assert torch.equal(-(numbers / 2), -(whole / 2))
        assert torch.equal(numbers @ torch.ones(2, 3), whole @ torch.ones(2, 3))
        assert torch.equal((1 - whole) * (numbers > 3), (1 - whole) * (whole > 3))
        assert torch.equal(numbers == 3, whole == 3)
        assert torch.equal(numbers != whole, torch.zeros(11, 2) > 0)
        assert rows.size(1) == 2
        assert rows in {rows}
        return torch.cat([rows.as_tensor()])

    assert all(torch.equal(found, whole) for found in on_ranks(4, work))
    assert whole_rows(whole) is whole
    assert whole_rows(None) is None


PROCESS = """
import sys
import torch
from engine.core.device import find_device
from engine.core.distributed.rank_group import join
from engine.core.distributed.rendezvous import Rendezvous
from engine.core.distributed.sum_scatter import SumScatter
from engine.ops.norm.rms_norm import add_rms_norm
from engine.ops.norm.rms_norm_quantize import add_rms_norm_quantize

rank, directory = int(sys.argv[1]), sys.argv[2]
group = join(Rendezvous(rank=rank, ranks=4, place=directory, timeout=60.0), find_device(f"cuda:{rank}"))
device, dtype, size, fp8 = torch.device("cuda", rank), torch.bfloat16, 4096, torch.float8_e4m3fn
group.open_overlapped_sums(4096, size, dtype)
scatter = group.overlapped_sums
assert isinstance(scatter, SumScatter), "these GPUs do not share memory"
generator = torch.Generator(device).manual_seed(rank)
shared = torch.Generator(device).manual_seed(7)
weight = torch.rand(size, generator=shared, device=device).to(dtype)

def normed(chunk, residual, quantizes):
    "Norm this rank's rows of a chunk, and send them."
    with chunk.norm_stream():
        first, *others = chunk.receive().receive()
        own = residual[chunk.begin : chunk.end]
        if quantizes:
            *made, _ = add_rms_norm_quantize(first, own, weight, 1e-5, fp8, others=others)
        else:
            made = [add_rms_norm(first, own, weight, 1e-5, others)[0]]
        chunk.gather(made)

def step(addends, residuals, made, quantizes):
    "Two sums in the order of a layer."
    chunks = [scatter.start(one) for one in addends[:2]]
    for number in range(4):
        if number % 2 == 0:
            for each in (number, number + 1):
                normed(chunks[each], residuals[each], quantizes)
        for target, one in zip(made[number], chunks[number].finish(), strict=True):
            target.copy_(one)
        if number < 2:
            chunks.append(scatter.start(addends[2 + number]))

def check(made, addends, residuals, quantizes, what):
    for found, addend, residual in zip(made, addends, residuals, strict=True):
        total = 0
        for one in group.all_gather(addend):
            total = total + one.float()
        total = total.to(dtype)
        reduced = group.all_reduce(addend.clone())
        assert (reduced.float() - total.float()).norm() <= 0.01 * total.float().norm(), f"{what}: unlike NCCL"
        if quantizes:
            expected = add_rms_norm_quantize(total, residual.clone(), weight, 1e-5, fp8)[:2]
        else:
            expected = add_rms_norm(total, residual.clone(), weight, 1e-5)[:1]
        for one, right in zip(found, expected, strict=True):
            assert torch.equal(one.float(), right.float()), what

def sizes_and_memory(sizes, quantizes):
    "Addends, residuals and memory for results."
    given = [torch.zeros(rows, size, device=device, dtype=dtype) for rows in sizes]
    made = [[torch.zeros(rows, size, device=device, dtype=fp8 if quantizes else dtype)] for rows in sizes]
    if quantizes:
        for one in made:
            one.append(torch.zeros(len(one[0]), device=device))
    return given, [torch.zeros_like(one) for one in given], made

def renew(given, residuals):
    for one in given:
        one.copy_(torch.randn(one.shape, generator=generator, device=device))
    for one in residuals:
        one.copy_(torch.randn(one.shape, generator=shared, device=device))

for quantizes in (False, True):
    given, residuals, made = sizes_and_memory((640, 1030, 2048, 2), quantizes)
    for call in range(12):
        renew(given, residuals)
        kept = [one.clone() for one in residuals]
        torch.cuda.synchronize()
        if call % 4 == rank:
            torch.cuda._sleep(600_000)
        step(given, residuals, made, quantizes)
        check(made, given, kept, quantizes, f"call {call}")

    given, residuals, made = sizes_and_memory((1024, 1024, 1024, 1024), quantizes)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(given, residuals, made, quantizes)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        step(given, residuals, made, quantizes)
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    for call in range(20):
        renew(given, residuals)
        kept = [one.clone() for one in residuals]
        torch.cuda.synchronize()
        if call % 4 == rank:
            torch.cuda._sleep(600_000)
        step(given, residuals, made, quantizes) if call % 3 == 2 else graph.replay()
        check(made, given, kept, quantizes, f"replay {call}")
torch.cuda.synchronize()
group.close()
"""
"""One rank's process: sums and norms launched and from a CUDA graph, with ranks that are not in step."""


@pytest.mark.gpu
def test_four_gpus_norm_the_sum_of_all_addends(tmp_path: Path) -> None:
    run_script(PROCESS, 4, tmp_path)
