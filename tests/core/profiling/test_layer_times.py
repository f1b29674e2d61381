"""Device and host times by module, from events made by hand: nesting, threads, replays of CUDA graphs, mismatches."""

from __future__ import annotations

import pytest

from engine.core.errors import ControlError
from engine.core.profiling.layer_events import BATCH, BREAK, COLLECTIVE, KERNEL, REPLAY, TWIN, ModuleTimes
from engine.core.profiling.layer_times import COPIES, OUTSIDE, attribute

from .chrome_events import Event, kernel, launch, mark, module, span, step

NORM, LINEAR, HEAD = "layers.0.norm", "layers.0.linear", "head"


def test_kernels_belong_to_the_innermost_module_around_their_launch() -> None:
    events = [
        step(0, 0, 50),
        launch(1, 1, "cudaMemcpyAsync"),
        module("layers.0", 5, 40),
        module(NORM, 6, 10),
        launch(7, 2),
        module(LINEAR, 11, 30),
        launch(12, 3),
        module(LINEAR, 14, 20),  # a method that calls another of the same layer
        launch(15, 4),
        launch(32, 5),
        step(1, 60, 80),
        launch(61, 6),
        kernel("Memcpy HtoD", 100, 110, 1, "gpu_memcpy"),
        kernel("norm", 110, 130, 2),
        kernel("gemm", 130, 160, 3),
        kernel("bias", 155, 170, 4),  # set up while the one before runs
        kernel("add", 172, 180, 5),
        kernel("norm", 200, 210, 6),
    ]
    found = attribute(events)
    assert (found.steps, found.span) == (1, 100)
    assert found.modules[LINEAR] == ModuleTimes(calls=1, cpu=19, device=40, kernels=2)
    assert found.modules[NORM] == ModuleTimes(calls=1, cpu=4, device=20, kernels=1)
    assert found.modules["layers.0"] == ModuleTimes(calls=1, cpu=35 - 19 - 4, device=8, kernels=1)
    assert found.modules[BATCH] == ModuleTimes(cpu=50 - 35, device=10, kernels=1)
    assert list(found.modules) == [BATCH, "layers.0", NORM, LINEAR]
    assert found.idle == 2 + 20


def test_device_times_and_idle_sum_to_the_steps_when_kernels_overlap() -> None:
    events = [step(0, 0, 90), module(NORM, 1, 5), launch(2, 1), module(LINEAR, 10, 60)]
    events += [launch(20, 2), launch(30, 3), step(1, 100, 190), launch(110, 4)]
    events += [kernel("norm", 50, 90, 1), kernel("within", 60, 70, 2), kernel("waits", 85, 95, 3)]
    found = attribute([*events, kernel("next", 120, 130, 4)])
    assert found.modules[NORM].device == 30  # 50 to 60, 70 to 90
    assert found.modules[LINEAR].device == 15  # 60 to 70, 90 to 95
    assert (found.span, found.idle) == (70, 25)
    cut = attribute([*events, kernel("next", 92, 130, 4)])  # begins while the last kernel of the step before runs
    assert (cut.modules[LINEAR].device, cut.span, cut.idle) == (12, 42, 0)


def test_first_steps_and_the_last_are_not_counted() -> None:
    events: list[Event] = []
    for number in range(5):
        events += [step(number, 10 * number, 10 * number + 5), module(NORM, 10 * number + 1, 10 * number + 4)]
        events += [
            launch(10 * number + 2, number + 1),
            kernel("norm", 100 + 20 * number, 110 + 20 * number, number + 1),
        ]
    found = attribute(events, first=2)
    assert (found.steps, found.span) == (2, 40)
    assert found.modules == {NORM: ModuleTimes(calls=2, cpu=6, device=20, kernels=2), BATCH: ModuleTimes(cpu=4)}


def test_kernels_of_another_thread_are_outside_of_the_steps() -> None:
    events = [step(0, 0, 30), module(NORM, 1, 29), launch(2, 1), launch(5, 2, thread=2), step(1, 40, 50), launch(41, 3)]
    events += [mark("something else", 3, 20, thread=2), span("cpu_op", "aten::mul", 4, 9, thread=2)]
    events += [kernel("norm", 100, 110, 1), kernel("other", 110, 115, 2), kernel("norm", 140, 150, 3)]
    found = attribute(events)
    assert (found.modules[NORM].device, found.modules[NORM].cpu) == (10, 28)
    assert found.modules[OUTSIDE] == ModuleTimes(device=5, kernels=1)


def test_collectives_count_by_annotation_and_by_name() -> None:
    events = [step(0, 0, 30), module(NORM, 1, 29), mark(COLLECTIVE, 2, 5), launch(3, 1), launch(7, 2), launch(9, 3)]
    events += [step(1, 40, 50), launch(41, 4)]
    events += [kernel("copy", 100, 104, 1), kernel("ncclDevKernel_AllReduce", 104, 110, 2), kernel("norm", 110, 111, 3)]
    found = attribute([*events, kernel("x", 120, 121, 4)])
    assert found.modules[NORM] == ModuleTimes(calls=1, cpu=28, device=11, collective=10, kernels=3)


TWINS = [
    mark(f"{TWIN}decode 8, greedy", 500, 600),
    module(NORM, 505, 510),
    launch(506, 50),
    module(LINEAR, 511, 540),
    launch(512, 51),
    launch(514, 52, "cudaMemsetAsync"),
    module("layers.0", 541, 580),
    module(NORM, 542, 545),
    launch(543, 53),
    kernel("norm", 700, 710, 50),
    kernel("gemm", 710, 720, 51),
    kernel("Memset (Device)", 720, 721, 52, "gpu_memset"),
    kernel("norm", 721, 730, 53),
]
"""A captured step of two norms, a linear layer and a memset, run kernel by kernel."""


def replayed(names: list[str], at: float, correlation: int) -> list[Event]:
    """The kernels of one replay, each 10 us long."""
    return [
        kernel(name, at + 10 * number, at + 10 * number + 10, correlation, "gpu_memset" if "Mem" in name else "kernel")
        for number, name in enumerate(names)
    ]


IN_ORDER = ["norm", "gemm", "Memset (Device)", "norm"]


def test_kernels_of_a_replay_belong_to_the_modules_of_the_same_step_without_graph() -> None:
    events = [step(0, 0, 40), launch(2, 1, "cudaMemcpyAsync"), launch(10, 2, "cudaGraphLaunch")]
    events += [launch(20, 3, "cudaGraphLaunch"), launch(20.5, 3, "cuGraphLaunch"), *TWINS]
    events += [launch(22, 9, "cuGraphLaunch"), step(1, 50, 60), launch(51, 4, "cudaGraphLaunch")]
    events += [kernel("Memcpy HtoD", 95, 100, 1, "gpu_memcpy")]
    events += [*replayed(IN_ORDER, 100, 2), *replayed(IN_ORDER, 145, 3), *replayed(IN_ORDER, 195, 4)]
    found = attribute(events, graphs={0: "decode 8, greedy", 1: "decode 8, greedy"})
    assert (found.steps, found.span, found.idle) == (1, 100, 5 + 10)
    assert found.modules[NORM] == ModuleTimes(calls=4, device=40, kernels=4)
    assert found.modules[LINEAR] == ModuleTimes(calls=2, device=40, kernels=4)
    assert found.modules["layers.0"].calls == 2
    assert found.modules[REPLAY] == ModuleTimes(calls=2, cpu=3)
    assert found.modules[BATCH] == ModuleTimes(cpu=37, device=5, kernels=1)


def test_piecewise_graphs_are_matched_one_by_one_with_attention_between() -> None:
    key = "64 tokens"
    twins = [mark(TWIN + key, 500, 600), module(LINEAR, 501, 540), launch(502, 50)]
    twins += [module("attention", 505, 530), launch(506, 51), mark(BREAK, 510, 511), launch(520, 52)]
    twins += [module(HEAD, 545, 590), launch(546, 53)]
    twins += [kernel("gemm", 700, 701, 50), kernel("rotate", 701, 702, 51)]
    twins += [kernel("copy", 702, 703, 52), kernel("gemm", 703, 704, 53)]
    events = [step(0, 0, 40), launch(2, 1, "cudaGraphLaunch"), module("attention", 5, 9), launch(6, 2)]
    events += [launch(12, 3, "cudaGraphLaunch"), step(1, 50, 60), launch(51, 4)]
    events += [*replayed(["gemm", "rotate"], 100, 1), kernel("attend", 120, 130, 2)]
    events += [*replayed(["copy", "gemm"], 130, 3), kernel("Memcpy HtoD", 160, 161, 4, "gpu_memcpy")]
    found = attribute([*events, *twins], graphs={0: key})
    assert found.modules["attention"].device == 10 + 10 + 10  # within both graphs, and between them
    assert found.modules[LINEAR].device == found.modules[HEAD].device == 10
    assert (found.idle, found.modules[REPLAY].calls) == (10, 2)


def replay_of(names: list[str]) -> list[Event]:
    events = [step(0, 0, 40), launch(10, 2, "cudaGraphLaunch"), step(1, 50, 60), launch(51, 4), *TWINS]
    return [*events, *replayed(names, 100, 2), kernel("Memcpy HtoD", 200, 201, 4, "gpu_memcpy")]


def test_copies_of_another_order_get_a_line_of_their_own() -> None:
    events = replay_of(["norm", "Memset (Device)", "gemm", "norm"])
    found = attribute(events, graphs={0: "decode 8, greedy"})
    assert found.modules[COPIES] == ModuleTimes(device=10, kernels=1)
    assert (found.modules[NORM].device, found.modules[LINEAR].device) == (20, 10)


def test_kernels_by_which_the_driver_copies_in_a_replay_belong_to_the_module_that_copies() -> None:
    key = "decode 64, greedy"
    twins = [mark(TWIN + key, 500, 600), module(NORM, 501, 540), launch(502, 50), launch(503, 51, "cudaMemcpyAsync")]
    twins += [module(LINEAR, 550, 560), launch(551, 52)]
    twins += [kernel("norm", 700, 701, 50), kernel("Memcpy DtoD (Device -> Device)", 701, 702, 51, "gpu_memcpy")]
    twins += [kernel("gemm", 702, 703, 52)]
    events = [step(0, 0, 40), launch(10, 2, "cudaGraphLaunch"), step(1, 50, 60), launch(51, 4)]
    events += [*replayed(["norm", "memcpy32_post", "gemm"], 100, 2), kernel("Memcpy HtoD", 200, 201, 4, "gpu_memcpy")]
    found = attribute([*events, *twins], graphs={0: key})
    assert (found.modules[NORM].device, found.modules[NORM].kernels, found.modules[LINEAR].device) == (20, 2, 10)
    assert COPIES not in found.modules


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            ["norm", "norm", "gemm"],
            "has 3 kernels .* without graphs 3; .* number 1 of graph 0: norm in .*, gemm without",
        ),
        (["norm", "gemm"], "has 2 kernels .* number 2 of graph 0: nothing in the replay, norm without"),
        (["norm", "gemm", "norm", "more"], "number 3 of graph 0: more in the replay, nothing without.*--graphs off"),
    ],
)
def test_a_replay_of_other_kernels_is_refused(names: list[str], words: str) -> None:
    with pytest.raises(ControlError, match=words):
        attribute(replay_of(names), graphs={0: "decode 8, greedy"})


def test_what_cannot_be_attributed_is_refused() -> None:
    two = [step(0, 0, 5), launch(1, 1), step(1, 6, 9), launch(7, 2)]
    ran = [kernel("a", 10, 11, 1), kernel("a", 20, 21, 2)]
    with pytest.raises(ControlError, match="fewer than two steps"):
        attribute([*two, *ran], first=1)
    with pytest.raises(ControlError, match="the profiler saw no kernel"):
        attribute(two)
    with pytest.raises(ControlError, match="step 0 replayed 0 CUDA graphs"):
        attribute([*two, *ran], graphs={0: "decode 8, greedy"})
    graph = [step(0, 0, 5), launch(1, 1, "cudaGraphLaunch"), *two[2:], *ran]
    with pytest.raises(ControlError, match="step 0 replays a CUDA graph that was not run"):
        attribute(graph)


def test_operators_take_the_place_of_kernels_on_a_cpu() -> None:
    events = [
        step(0, 0, 60),
        span("cpu_op", "aten::index", 1, 4),
        module(NORM, 10, 30),
        span("cpu_op", "aten::linear", 12, 20),
        span("cpu_op", "aten::mm", 13, 19),
        mark(COLLECTIVE, 21, 28),
        span("cpu_op", "gloo:all_reduce", 22, 23),
        module("attention", 31, 50),
        mark(KERNEL, 32, 48),
        span("cpu_op", "aten::empty", 33, 34),
        step(1, 100, 120),
        span("cpu_op", "aten::index", 101, 104),
    ]
    found = attribute(events, device="cpu")
    assert (found.span, found.idle) == (100, 100 - 3 - 15 - 16)
    assert found.modules[NORM] == ModuleTimes(calls=1, cpu=20, device=15, collective=7, kernels=2)
    assert found.modules["attention"] == ModuleTimes(calls=1, cpu=19, device=16, kernels=1)
    assert found.modules[BATCH] == ModuleTimes(cpu=60 - 20 - 19, device=3, kernels=1)
