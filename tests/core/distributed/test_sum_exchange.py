"""Exchanges of two ranks: on two GPUs, and their protocol on the CPU, by a driver that runs operations immediately."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.distributed.overlapped_sums import Allocate
from engine.core.distributed.sum_exchange import BUFFERS, SumExchange
from engine.core.errors import ExecutorError
from tests.core.distributed.gpu_processes import run_script
from tests.core.distributed.immediate_driver import ImmediateDriver, Meeting, on_ranks, patch_streams

SIZE, MAX_ROWS = 8, 4096
CPU = torch.device("cpu")


@pytest.fixture(params=[False, True], ids=["eager", "captured"])
def immediate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_streams(monkeypatch, captures=request.param)


def on_both(work: Callable[[SumExchange, int], Any]) -> list[Any]:
    """Run `work` on two ranks, each a thread."""

    def run(group: Meeting, allocate: Allocate) -> Any:
        driver: Any = ImmediateDriver()
        settings: dict[str, Any] = {"max_rows": MAX_ROWS, "size": SIZE, "dtype": torch.bfloat16}
        exchange = SumExchange(driver, group, allocate, torch.device("cpu", 0), **settings)
        found = work(exchange, group.rank)
        group.minimum(0)
        flags = exchange._memory[BUFFERS * exchange._nbytes :].view(torch.int32)
        assert flags[: 2 * BUFFERS].tolist() == [0] * BUFFERS + [1] * BUFFERS, "all buffers are free again"
        return found

    return on_ranks(2, run)


def addends(rank: int, count: int, rows: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(rows, SIZE, generator=generator).to(torch.bfloat16) for _ in range(count)]


def expected(count: int, rows: int) -> Iterator[torch.Tensor]:
    for one, other in zip(addends(0, count, rows), addends(1, count, rows), strict=True):
        yield (one.float() + other.float()).to(torch.bfloat16)


@pytest.mark.usefixtures("immediate")
def test_sums_are_the_same_on_both_ranks_in_the_order_of_a_pipeline() -> None:
    """Two exchanges are always in progress, and all buffers are used many times."""
    count, rows = 41, 640

    def work(exchange: SumExchange, rank: int) -> list[torch.Tensor]:
        found, before = [], None
        for number, addend in enumerate(addends(rank, count, rows)):
            if (number + rank) % 3 == 0:
                time.sleep(0.001)  # the ranks are not in step
            chunk = exchange.start(addend)
            if before is not None:
                found.append(before.reduce())
            before = chunk
        assert before is not None
        return [*found, before.reduce()]

    for found in on_both(work):
        for one, wanted in zip(found, expected(count, rows), strict=True):
            assert torch.equal(one, wanted)


@pytest.mark.usefixtures("immediate")
def test_third_exchange_ends_the_first_whose_sum_is_kept() -> None:
    def work(exchange: SumExchange, rank: int) -> list[torch.Tensor]:
        chunks = [exchange.start(addend) for addend in addends(rank, 7, 3)]
        sums = [chunk.reduce() for chunk in reversed(chunks)]
        assert all(chunk.reduce() is one for chunk, one in zip(reversed(chunks), sums, strict=True))
        return sums

    for found in on_both(work):
        for one, wanted in zip(reversed(found), expected(7, 3), strict=True):
            assert torch.equal(one, wanted)


@pytest.mark.usefixtures("immediate")
def test_addends_are_withdrawn_unchanged() -> None:
    """Also that of an exchange which ended since others were started."""

    def work(exchange: SumExchange, rank: int) -> torch.Tensor:
        *first, last = (exchange.start(addend) for addend in addends(rank, 4, 5))
        for one, wanted in zip(first, addends(rank, 4, 5), strict=False):
            assert torch.equal(one.withdraw(), wanted)
        return last.reduce()

    *_, wanted = expected(4, 5)
    for found in on_both(work):
        assert torch.equal(found, wanted)


@pytest.mark.usefixtures("immediate")
def test_sum_that_was_received_is_refused_when_it_is_used_again() -> None:
    def work(exchange: SumExchange, rank: int) -> None:
        one, other = (exchange.start(addend) for addend in addends(rank, 2, 5))
        one.receive()
        one.release()
        with pytest.raises(RuntimeError, match="the addends of a PartialSum were summed before; pass it to one"):
            one.reduce()
        other.reduce()

    on_both(work)


@pytest.mark.usefixtures("immediate")
def test_a_rank_that_is_alone_waits_for_no_other() -> None:
    def work(exchange: SumExchange, rank: int) -> None:
        exchange.is_alone = True
        [addend] = addends(rank, 1, 4)
        chunk = exchange.start(addend)
        assert chunk.reduce() is addend
        assert chunk.withdraw() is addend

    on_both(work)


@pytest.mark.usefixtures("immediate")
def test_split_is_a_multiple_of_tiles_between_the_limits() -> None:
    def work(exchange: SumExchange, rank: int) -> list[int | None]:
        return [exchange.split(rows) for rows in (0, 1024, 2047, 2048, 2049, 2304, 4096, 4097)]

    assert on_both(work) == [[None, None, None, 1024, 1152, 1152, 2048, None]] * 2


@pytest.mark.usefixtures("immediate")
def test_error_of_the_driver_names_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(exchange: SumExchange, rank: int) -> None:
        monkeypatch.setattr(exchange._driver, "record", lambda event, stream: 700)
        with pytest.raises(ExecutorError, match=rf"rank {rank} of 2: a sum next to computation failed: CUDA error 700"):
            exchange.start(addends(rank, 1, 4)[0])

    on_both(work)


PROCESS = """
import sys
import torch
from engine.core.device import find_device
from engine.core.distributed.rank_group import join
from engine.core.distributed.rendezvous import Rendezvous

rank, directory = int(sys.argv[1]), sys.argv[2]
group = join(Rendezvous(rank=rank, ranks=2, place=directory, timeout=60.0), find_device(f"cuda:{rank}"))
device, dtype, size = torch.device("cuda", rank), torch.bfloat16, 4096
group.open_overlapped_sums(4096, size, dtype)
exchange = group.overlapped_sums
assert exchange is not None, "these GPUs do not share memory"
generator = torch.Generator(device).manual_seed(rank)

def sums(addends, delays):
    "The sums of four addends, in the order of a layer."
    first, second = exchange.start(addends[0]), exchange.start(addends[1])
    delays()
    one = first.reduce()
    third = exchange.start(addends[2])
    two = second.reduce()
    fourth = exchange.start(addends[3])
    delays()
    return one, two, third.reduce(), fourth.reduce()

def check(found, addends, what):
    for one, addend in zip(found, addends, strict=True):
        both = group.all_gather(addend)
        assert torch.equal(one, (both[0].float() + both[1].float()).to(dtype)), what
        assert torch.equal(one, group.all_reduce(addend.clone())), f"{what}: unlike NCCL"

for call in range(30):
    addends = [torch.randn(rows, size, generator=generator, device=device).to(dtype) for rows in (640, 512, 2048, 1)]
    delays = (lambda: torch.cuda._sleep(300_000)) if (call + rank) % 3 == 0 else lambda: None
    check(sums([each.clone() for each in addends], delays), addends, f"call {call}")

given = [torch.zeros(1024, size, device=device, dtype=dtype) for _ in range(4)]
made = [torch.zeros_like(each) for each in given]

def step():
    for one, each in zip(made, sums([each.clone() for each in given], lambda: None), strict=True):
        one.copy_(each)

stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    step()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    step()
    graph.capture_end()
torch.cuda.current_stream().wait_stream(stream)
for call in range(20):
    addends = [torch.randn(1024, size, generator=generator, device=device).to(dtype) for _ in range(4)]
    for one, each in zip(given, addends, strict=True):
        one.copy_(each)
    if (call + rank) % 2:
        torch.cuda._sleep(300_000)
    step() if call % 3 == 2 else graph.replay()
    check(made, addends, f"replay {call}")
torch.cuda.synchronize()
group.close()
"""
"""One rank's process: exchanges launched and from a CUDA graph, with ranks that are not in step."""


@pytest.mark.gpu
def test_two_gpus_sum_as_nccl_does(tmp_path: Path) -> None:
    run_script(PROCESS, 2, tmp_path)
