"""Captures work on a GPU in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import torch

from engine.core.runner.graph_extension import ExtendedGraph, GraphExtender

T = TypeVar("T")
U = TypeVar("U")


class GraphCapturer:
    """Captures work on a GPU in CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device, *, extends: bool = True) -> None:
        """extends: whether a graph may be extended by another capture; False where it has operations of NCCL."""
        self._memory = torch.cuda.MemPool()
        """Memory pool of all graphs, which lives as long as this object."""
        self._pool: Any = self._memory.id
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        self._extender = GraphExtender.find() if extends else None
        self._first: torch.cuda.CUDAGraph | None = None
        """The first graph that was extended, kept: PyTorch frees a pool's pinned memory with the pool's last graph."""

    def capture(
        self, work: Callable[[], T], warm_up: Callable[[], object] | None = None
    ) -> tuple[Callable[[], None], T]:
        """Run `warm_up`, so that all kernels are compiled and all memory is allocated, then capture `work`.

        warm_up: the part of `work` whose kernels have not run yet; None: all of it.
        Returns the function that replays the graph, and what `work` returned during the capture: tensors that each
        replay fills again, and that a replay of another graph may overwrite.
        """
        (replay,), made = self.capture_segments(lambda break_graph: work(), warm_up)
        return replay, made

    def capture_alike(
        self, begin: Callable[[], T], endings: Iterable[Callable[[T], U]], warm_up: Callable[[], object]
    ) -> list[tuple[Callable[[], None], U]]:
        """Capture a graph for each ending: `begin`, then the ending with what `begin` returned. The beginning is
        captured once, where the driver can extend a graph.

        Returns, per ending, what `capture` does. What `begin` returned may be overwritten when all are captured.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            warm_up()
            if self._extender is None:
                captured = [self.capture(_joined(begin, ending), lambda: None) for ending in endings]
            else:
                captured = self._extend(self._extender, begin, endings)
        current.wait_stream(self._stream)
        return captured

    def _extend(
        self, extender: GraphExtender, begin: Callable[[], T], endings: Iterable[Callable[[T], U]]
    ) -> list[tuple[Callable[[], None], U]]:
        """Capture `begin` once, and each ending at the end of a copy."""
        stream = self._stream.cuda_stream
        beginning = torch.cuda.CUDAGraph(keep_graph=True)
        beginning.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            begun = begin()
            end = extender.capture_end(stream)
        except BaseException:
            with suppress(RuntimeError):  # ending a capture that has failed fails too, and says less
                beginning.capture_end()
            raise
        beginning.capture_end()
        self._first = self._first or beginning
        captured: list[tuple[Callable[[], None], U]] = []
        for ending in endings:
            graphs: list[ExtendedGraph] = []
            with (
                torch.cuda.use_mem_pool(self._memory, self._device),
                extender.extended(int(beginning.raw_cuda_graph()), end, stream, self._memory, graphs),
            ):
                made = ending(begun)
            captured.append((graphs[0].replay, made))
        return captured

    def capture_segments(
        self, work: Callable[[Callable[[], None]], T], warm_up: Callable[[], object] | None = None
    ) -> tuple[list[Callable[[], None]], T]:
        """Capture work in segments, each a graph, to be replayed one after the other.

        work: receives a function that breaks the graph: each call ends a segment and begins the next. warm_up: as for
        `capture`.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            # torch.cuda.graph would first collect garbage and empty the allocator's cache: 50 ms per graph.
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def break_graph() -> None:
            graphs[-1].capture_end()
            begin()

        with torch.cuda.stream(self._stream):
            if warm_up is None:
                work(lambda: None)
            else:
                warm_up()
            begin()
            try:
                made = work(break_graph)
            finally:
                graphs[-1].capture_end()
        current.wait_stream(self._stream)
        return [graph.replay for graph in graphs], made


def _joined(begin: Callable[[], T], ending: Callable[[T], U]) -> Callable[[], U]:
    return lambda: ending(begin())


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same memory that does not own it, so that a later capture may reuse the memory.

    Only for memory that each replay no longer needs when another replay begins. (torch's CUDA graph trees make such
    tensors in the same way.)
    """
    if tensor.device.type == "cpu":
        return tensor
    owner = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(owner.data_ptr(), tensor.device, owner.nbytes())
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
