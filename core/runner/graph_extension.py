"""Extends a captured CUDA graph by further captures, so that graphs that begin alike are captured once.

PyTorch captures a graph from its first node on. The driver can also clone a graph and go on capturing at its end
(cuStreamBeginCaptureToGraph, of CUDA 12.3): the kernels that follow depend on those before as in one capture, with
programmatic dependent launch, which a child graph would interrupt.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

import torch
from attrs import frozen

FUNCTIONS = (
    "cuStreamGetCaptureInfo_v3",
    "cuStreamBeginCaptureToGraph",
    "cuStreamEndCapture",
    "cuGraphClone",
    "cuGraphNodeFindInClone",
    "cuGraphInstantiateWithFlags",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGetErrorName",
)
RUNTIME = "libcudart.so.{}"
"""PyTorch has loaded it; a launch by this library appears in profiles like PyTorch's own."""
THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL."""
AUTO_FREE_ON_LAUNCH = 1
"""CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH, as PyTorch instantiates its graphs."""
EDGE_BYTES = 8
"""Size of CUgraphEdgeData."""


@frozen
class CaptureEnd:
    """The nodes that the next node of a capture would depend on."""

    nodes: list[int]
    """CUgraphNode."""
    edges: bytes
    """CUgraphEdgeData of each of the nodes, EDGE_BYTES bytes; empty, or zero bytes, for ordinary dependencies."""


class GraphExtender:
    """The driver's functions that extend captured graphs, and the runtime's that launches them."""

    def __init__(self, driver: Any, runtime: Any) -> None:
        self._driver = driver
        self._runtime = runtime

    @staticmethod
    def find() -> GraphExtender | None:
        """The functions of this machine's driver; None if it lacks one of them."""
        if torch.version.cuda is None:
            return None
        from engine.ops.common.cuda_driver import open_driver

        try:
            driver, runtime = open_driver(), ctypes.CDLL(RUNTIME.format(torch.version.cuda.partition(".")[0]))
        except OSError:
            return None
        return GraphExtender(driver, runtime) if all(hasattr(driver, name) for name in FUNCTIONS) else None

    def capture_end(self, stream: int) -> CaptureEnd:
        """Return the nodes that the next captured node depends on. stream: cudaStream_t, which is being captured.

        Raises RuntimeError with the driver's name of its error.
        """
        status, number, graph, count = c_int(), c_uint64(), c_void_p(), c_size_t()
        nodes, edges = ctypes.POINTER(c_void_p)(), c_void_p()
        self._call(
            "cuStreamGetCaptureInfo_v3",
            c_void_p(stream),
            *map(byref, (status, number, graph, nodes, edges, count)),
        )
        data = ctypes.string_at(edges.value, EDGE_BYTES * count.value) if edges.value else b""
        return CaptureEnd([nodes[index] or 0 for index in range(count.value)], data)

    @contextmanager
    def extended(
        self, graph: int, end: CaptureEnd, stream: int, memory: object, made: list[ExtendedGraph]
    ) -> Iterator[None]:
        """Capture what the `with` block launches in a stream as the end of a copy of a graph.

        graph: cudaGraph_t. end: of its capture. stream: the current stream, not being captured. memory: of the graph,
        kept as long as the copy. made: receives the copy, ready to be launched. Raises what the block raises, or
        RuntimeError with the driver's name of its error.
        """
        copy, ended = c_void_p(), c_void_p()
        self._call("cuGraphClone", byref(copy), c_void_p(graph))
        try:
            nodes = (c_void_p * len(end.nodes))()
            for index, node in enumerate(end.nodes):
                found = c_void_p()
                self._call("cuGraphNodeFindInClone", byref(found), c_void_p(node), copy)
                nodes[index] = found
            edges = ctypes.create_string_buffer(end.edges, len(end.edges)) if any(end.edges) else None
            self._call(
                "cuStreamBeginCaptureToGraph",
                c_void_p(stream),
                copy,
                nodes,
                edges,
                c_size_t(len(nodes)),
                c_int(THREAD_LOCAL),
            )
            try:
                yield
            except BaseException:
                self._driver.cuStreamEndCapture(c_void_p(stream), byref(ended))  # fails too, and says less
                raise
            self._call("cuStreamEndCapture", c_void_p(stream), byref(ended))
            executable = c_void_p()
            self._call("cuGraphInstantiateWithFlags", byref(executable), copy, c_uint64(AUTO_FREE_ON_LAUNCH))
            made.append(ExtendedGraph(self._driver, self._runtime, executable, memory))
        finally:
            self._driver.cuGraphDestroy(copy)

    def _call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver. Raises RuntimeError with the driver's name of its error."""
        code = getattr(self._driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed: {_error_name(self._driver, code)}")


class ExtendedGraph:
    """An executable graph, and the memory pool that was in use during its capture."""

    def __init__(self, driver: Any, runtime: Any, executable: c_void_p, memory: object) -> None:
        self._memory = memory
        self._driver = driver
        self._executable = executable
        self._launch: Callable[[c_void_p, c_void_p], int] = runtime.cudaGraphLaunch
        self._device = torch.cuda.current_device()

    def replay(self) -> None:
        """Launch the graph in the current stream. Raises RuntimeError if it cannot be launched."""
        code = self._launch(self._executable, c_void_p(torch._C._cuda_getCurrentRawStream(self._device)))
        if code:
            raise RuntimeError(f"cudaGraphLaunch failed with error {code}")

    def __del__(self) -> None:
        self._driver.cuGraphExecDestroy(self._executable)


def _error_name(driver: Any, code: int) -> str:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(c_int(code), byref(name))
    return (name.value or b"").decode() or str(code)
