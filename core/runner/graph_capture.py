"""Captures work on a GPU in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class GraphCapturer:
    """Captures work on a GPU in CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device

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
            graphs[-1].capture_begin(pool=self._memory, capture_error_mode="thread_local")

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
