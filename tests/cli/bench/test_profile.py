"""Profiles: kernels by name, and the time without any."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.cli.bench.profile import MARK, HostStep, Profile, Ran, _read, merged, print_profile, rows_of

ROOT = Path(__file__).resolve().parents[3]


def event(name: str, kind: str, begin: float, end: float, *, lane: int = 7, note: bool = False) -> Any:
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=kind),
        device_resource_id=lane,
        time_range=SimpleNamespace(start=begin, end=end, elapsed_us=lambda: end - begin),
        self_cpu_time_total=1.0,
        is_user_annotation=note,
    )


EVENTS = [
    event(MARK, "CPU", 100, 150, note=True),
    event(MARK, "CPU", 200, 260, note=True),
    event(MARK, "CUDA", 110, 290, note=True),  # the profiler repeats an annotation on the device, around its kernels
    event("cudaGraphLaunch", "CPU", 120, 125),
    event("gemm", "CUDA", 110, 140),
    event("norm", "CUDA", 130, 150),
    event("gemm", "CUDA", 152, 160),
    event("gemm", "CUDA", 210, 240),
    event("Memcpy DtoH", "CUDA", 241, 242, lane=8),
]
PHASES = [(("schedule", 1.0), ("submit", 20.0)), (("schedule", 2.0), ("submit", 30.0))]


@pytest.fixture
def profile() -> Profile:
    host, ran = _read(EVENTS, PHASES, gpu=True)
    return Profile(title="decode, batch 1", steps=2, wall=100.0, host=host, ran=ran)


def test_only_what_ran_on_the_device_counts(profile: Profile) -> None:
    assert profile.host == (HostStep(0, 50, PHASES[0]), HostStep(100, 160, PHASES[1]))
    assert profile.ran[0] == Ran("gemm", 7, 10, 40, 30)
    assert [one.name for one in profile.ran] == ["gemm", "norm", "gemm", "gemm", "Memcpy DtoH"]


def test_busy_is_the_union_and_the_sum_of_what_is_a_kernel_s_own(profile: Profile) -> None:
    assert profile.busy == (40 + 8 + 30 + 1) / 2
    assert profile.idle == 100 - profile.busy
    assert profile.profiled == (242 - 110) / 2
    assert profile.gaps() == (50 / 2, (2 + 1) / 2)
    assert profile.kernels() == [("gemm", 1.5, 34), ("norm", 0.5, 5), ("Memcpy DtoH", 0.5, 0.5)]
    assert sum(spent for _, _, spent in profile.kernels()) == profile.busy


def test_a_kernel_that_waits_for_others_counts_when_none_of_them_runs() -> None:
    waiting = [event("waits", "CUDA", 5, 30), event("first", "CUDA", 0, 20), event("short", "CUDA", 21, 22)]
    _, ran = _read(waiting, [], gpu=True)
    assert {one.name: one.own for one in ran} == {"first": 20, "short": 1, "waits": 9}


@pytest.mark.parametrize(
    ("spans", "own"),
    [
        ([(0, 10), (3, 5)], [8, 2]),
        ([(3, 5), (0, 10), (6, 7)], [2, 7, 1]),
        ([(0, 6), (2, 8), (3, 4), (20, 30), (22, 30)], [5, 2, 1, 10, 0]),
    ],
    ids=["nested", "two nested", "chain"],
)
def test_own_times_of_kernels_that_overlap_add_up_to_the_busy_time(spans: Any, own: list[float]) -> None:
    kernels = [event(str(number), "CUDA", *span, lane=number) for number, span in enumerate(spans)]
    _, ran = _read(kernels, [], gpu=True)
    assert [one.own for one in ran] == own
    profile = Profile(title="", steps=1, wall=100.0, host=(), ran=ran)
    assert sum(spent for _, _, spent in profile.kernels()) == profile.busy


def test_spans_that_touch_are_one() -> None:
    assert merged(iter([(5, 6), (0, 2), (1, 3), (3, 4)])) == [(0, 4), (5, 6)]
    assert merged(iter([(0, 9), (1, 2), (8, 10)])) == [(0, 10)]


def test_a_timeline_holds_whole_steps(profile: Profile) -> None:
    made = profile.timeline()
    assert [step["begin"] for step in made["steps"]] == [0, 100]
    assert made["steps"][1]["phases"] == [["schedule", 2.0], ["submit", 30.0]]
    assert made["kernels"][-1] == ["Memcpy DtoH", 8, 141, 142]
    json.dumps(made)


def test_a_profile_is_rows_and_a_table(profile: Profile, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row.metric: row.value for row in rows_of(profile)}
    assert rows["device busy"] == profile.busy
    assert rows["device idle"] == profile.idle
    assert rows["kernel gemm"] == 34
    print_profile(profile)
    printed = capsys.readouterr().out
    assert "gemm" in printed
    assert "100.0 wall, 39.5 device busy, 60.5 idle" in printed


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """Of a real engine. In a process of its own: the profiler cannot be trusted to leave its process as it was."""
    directory = tmp_path_factory.mktemp("profile")
    command = [sys.executable, "-c", "from engine.cli.main import main; main()", "bench", "latency"]
    command += ["--model", str(tiny), "--kv-memory", "8MiB", "--device", "cpu", "--threads", "1"]
    command += [
        "--bandwidth",
        "0.01",
        "--matmul",
        "0.1",
        "--batch",
        "2",
        "--input-len",
        "6",
        "--steps",
        "4",
        "--prefill",
        "2x30",
    ]
    command += ["--profile", "--profile-steps", "6", "--trace", str(directory / "trace.json")]
    done = subprocess.run([*command, "--json", str(directory / "r.json")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "decode, batch 2: kernels, 6 steps" in done.stdout
    return directory / "trace.json"


def test_an_engine_is_profiled(trace: Path) -> None:
    rows = json.loads(trace.with_name("r.json").read_text())["rows"]
    for title in ("decode, batch 2", "prefill, 2 x 30"):
        mine = {row["metric"]: row["value"] for row in rows if row["case"] == f"profile: {title}"}
        kernels = [value for metric, value in mine.items() if metric.startswith("kernel ")]
        assert 0 < kernels[0] <= mine["device busy"] < mine["step under the profiler"]
        assert kernels == sorted(kernels, reverse=True)
        assert mine["device idle"] == pytest.approx(mine["step"] - mine["device busy"])
    decode = json.loads(trace.read_text())["profiles"][0]
    assert len(decode["steps"]) == 6
    for step, after in zip(decode["steps"], decode["steps"][1:], strict=False):
        assert step["begin"] < step["end"] <= after["begin"]
        assert sum(spent for _, spent in step["phases"]) <= step["end"] - step["begin"]
    # The operators of a step lie within it: both clocks are one.
    last = decode["steps"][-1]
    within = [one for one in decode["kernels"] if last["begin"] <= one[2] and one[3] <= last["end"]]
    assert len(within) > 20


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_a_timeline_is_drawn(trace: Path, tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "plot_timeline.py"
    done = subprocess.run(
        [sys.executable, str(script), str(trace), "--out", str(tmp_path / "img" / "timeline")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "img" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "img" / "timeline.svg").read_text()
