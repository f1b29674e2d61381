"""Graphs that begin alike, and the driver's functions that extend a captured graph."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.core.runner.graph_capture import GraphCapturer, weak_ref_tensor
from engine.core.runner.graph_extension import CaptureEnd, ExtendedGraph, GraphExtender

DEVICE = torch.device("cuda:0")


def endings_of(out: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
    """The endings of a graph; the second fills `out`, and the others return a tensor of their own."""

    def fill(x: torch.Tensor) -> None:
        out.copy_(x.square())

    return [lambda x: x + 1, fill, lambda x: (x * 2).sum(0)]


@pytest.mark.gpu
@pytest.mark.parametrize("extends", [True, False])
def test_graphs_that_begin_alike_replay_the_beginning_and_their_own_end(extends: bool) -> None:
    source, out = torch.zeros(64, 512, device=DEVICE), torch.zeros(64, 512, device=DEVICE)
    runs: list[str] = []
    capturer = GraphCapturer(DEVICE, extends=extends)

    def begin() -> torch.Tensor:
        runs.append("begin")
        return (source + 3) * 2

    ends = endings_of(out)
    graphs = capturer.capture_alike(begin, ends, lambda: [end(begun) for begun in [begin()] for end in ends])
    assert len(runs) == 1 + (1 if extends and GraphExtender.find() else 3)
    made = [None if result is None else weak_ref_tensor(result) for _, result in graphs]
    replays = [replay for replay, _ in graphs]
    del graphs
    gc.collect()
    torch.cuda.empty_cache()
    filler = torch.full((32 << 20,), 7.0, device=DEVICE)  # would overwrite memory that no one keeps
    for value in (1.0, 5.0):
        source.fill_(value)
        want = (value + 3) * 2
        replays[0]()
        assert made[0] is not None
        assert (made[0] == want + 1).all()
        replays[1]()
        assert (out == want**2).all()
        replays[2]()
        assert made[2] is not None
        assert (made[2] == 64 * 2 * want).all()
    assert (filler == 7).all()


@pytest.mark.gpu
def test_several_sizes_of_graphs_that_begin_alike_are_captured_and_replayed() -> None:
    capturer = GraphCapturer(DEVICE)
    source = torch.ones(1 << 20, device=DEVICE)

    def capture(rows: int) -> Any:
        part = source[: rows << 16]
        ends: list[Callable[[torch.Tensor], Any]] = [lambda x: part.copy_(x * 2), lambda x: part.copy_(x * 3)]

        def begin() -> torch.Tensor:
            return (part + 1) * 0.5

        return capturer.capture_alike(begin, ends, begin)

    kept = [capture(rows) for rows in (16, 12, 8, 4)]
    (first, _), (second, _) = kept[-1]
    first()
    assert (source[: 4 << 16] == 2).all()
    second()
    assert (source[: 4 << 16] == 4.5).all()
    assert (source[4 << 16 :] == 1).all()


class Refusing:
    """A driver whose calls fail with error 900, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: 900

    def cuGetErrorName(self, code: ctypes.c_int, name: Any) -> int:  # noqa: N802
        name._obj.value = f"NAME_OF_{code.value}".encode()
        return 0


def test_an_error_of_the_driver_is_named() -> None:
    extender = GraphExtender(Refusing(), Refusing())
    with pytest.raises(RuntimeError, match=r"^cuStreamGetCaptureInfo_v3 failed: NAME_OF_900$"):
        extender.capture_end(0)
    made: list[ExtendedGraph] = []
    with (
        pytest.raises(RuntimeError, match=r"^cuGraphClone failed: NAME_OF_900$"),
        extender.extended(1, CaptureEnd([2], bytes(8)), 0, None, made),
    ):
        pytest.fail("nothing is captured")
    assert made == []


class Accepting(Refusing):
    """A driver that only fails to end a capture."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: 901 if name == "cuStreamEndCapture" else 0


class Lacking:
    """A driver with one of the functions."""

    def cuGraphClone(self) -> None:  # noqa: N802
        pytest.fail("no function is called")


def test_an_error_of_what_is_captured_is_raised_and_not_that_of_ending_its_capture() -> None:
    extender, made = GraphExtender(Accepting(), Accepting()), list[ExtendedGraph]()
    end = CaptureEnd([2], bytes(8))
    with pytest.raises(torch.OutOfMemoryError), extender.extended(1, end, 0, None, made):
        raise torch.OutOfMemoryError
    with (
        pytest.raises(RuntimeError, match=r"^cuStreamEndCapture failed: NAME_OF_901$"),
        extender.extended(1, end, 0, None, made),
    ):
        pass
    assert made == []


def test_no_graph_is_extended_without_the_driver_or_by_one_that_lacks_a_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert GraphExtender.find() is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Lacking())
    assert GraphExtender.find() is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Refusing())
    assert GraphExtender.find() is not None
    monkeypatch.setattr(torch.version, "cuda", None)
    assert GraphExtender.find() is None
