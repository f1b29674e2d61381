"""Random shapes next to the nearest shapes that kernels were tuned on: is any kernel or tile chosen for a known model?

    python benchmarks/shape_sweep.py [--seed 0] [--cases 30] [--only KIND ...] [--neighbours MODEL ...] [--control]
        [--limit SECONDS] [--json FILE]

Draws cases within what users run: linear layers (16-bit weights at few rows; fp8, int8 and 4-bit weights at few and
many rows), decode attention (16-bit and float8 caches) and prefill attention. The engine makes each layer and chooses
its kernel as at start-up, by measurement or by a rule. A case's time is predicted from its neighbours, which are shapes
of the models whose tuning results come with the package (scripts/tune_kernels.py), or of those named by --neighbours
(sweep_neighbours.py):

- a linear layer lies between the nearest smaller and the nearest larger shape, with the same weights and rows;
- attention takes as long as the nearest heads of the same size with as many heads in all, and as much to read or to
  multiply.

Smaller and larger are measured by the floor: the least time that a case's bytes or its operations take, at a copy
bandwidth and matmul rates measured in the same run. The predicted time is on the line between both neighbours' times.
A linear layer with neighbours on one side only is predicted from a neighbour and a tiny layer:

    predicted = fixed + floor * max((neighbour - fixed) / neighbour's floor, 1)

A case passes if its time is at most MAX_RATIO times the predicted one. --control draws the known models' own shapes,
each predicted from the others': what misses there is the prediction's error. Linear layers are timed after the norm
that makes their input, all from CUDA graphs, with cold weights and caches; a case, its neighbours and a tiny layer in
turn, ROUNDS times, of which the medians count. Where a rule chooses, the other outcomes of the rule are timed too:
regret is the chosen one's time over the best one's. Linear layers of up to 8 rows, alone in a graph, say less than a
chain of layers does (quant_chain.py), by which their rule was made.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from attrs import evolve, frozen
from sweep_attention import AttentionSweep
from sweep_cases import (
    KINDS,
    LINEAR_KINDS,
    MAX_RATIO,
    SMALL,
    AttentionCase,
    Case,
    Limits,
    LinearCase,
    Space,
    draw,
)
from sweep_linears import LinearSweep
from sweep_neighbours import find_neighbours, predicted
from sweep_run import MAX_ERROR, SweepRun
from sweep_timing import SweepTimer, make_timer

from engine.cli.bench.ceilings import copy_rate, matmul_rate
from engine.cli.bench.report import Row, percent, report
from engine.cli.tables import print_table

ROUNDS = 3
TIME, RATIO, NEIGHBOUR, REGRET = "time", "time over predicted time", "time of a neighbour", "regret"
"""Metrics of the report."""


@frozen(kw_only=True)
class Result:
    """What was measured of one case. Times in seconds."""

    case: Case
    neighbours: Sequence[Case]
    """Of the one with the smaller floor first."""
    limits: Limits
    seconds: float
    near_seconds: Sequence[float]
    """Of each neighbour."""
    fixed_seconds: float | None = None
    """Of a case with next to no work, which the prediction from a single neighbour needs. None: not measured."""
    error: float
    choices: Mapping[str, float]
    """Times by each outcome of the rule that chose the kernel, the chosen first. Empty: the choice was measured."""

    @property
    def predicted(self) -> float:
        """The time if the case is as good as its neighbours."""
        floors = [one.floor(self.limits) for one in self.neighbours]
        near = list(zip(floors, self.near_seconds, strict=True))
        return predicted(self.case.floor(self.limits), near, self.fixed_seconds or 0.0)

    @property
    def ratio(self) -> float:
        """Time over predicted time."""
        return self.seconds / self.predicted

    @property
    def share(self) -> float:
        """Floor over time."""
        return self.case.floor(self.limits) / self.seconds

    @property
    def near(self) -> list[tuple[str, float, float]]:
        """Of each neighbour its name, seconds, and floor over time."""
        times = zip(self.neighbours, self.near_seconds, strict=True)
        return [(one.near_name, seconds, one.floor(self.limits) / seconds) for one, seconds in times]

    @property
    def regret(self) -> float | None:
        """The chosen outcome's time over the best one's. None: there is no rule."""
        times = list(self.choices.values())
        return times[0] / min(times) if times else None

    def rows(self) -> list[Row]:
        """As rows of the report."""
        name = self.case.name
        found = [
            Row(case=name, metric=TIME, value=self.seconds * 1e6, unit="us", share=self.share),
            *(
                Row(case=name, metric=NEIGHBOUR, value=seconds * 1e6, unit="us", share=share, baseline_name=near)
                for near, seconds, share in self.near
            ),
            Row(
                case=name,
                metric=RATIO,
                value=self.ratio,
                unit="",
                baseline=self.predicted * 1e6,
                baseline_name="predicted, us",
            ),
            Row(case=name, metric="error", value=self.error, unit=""),
        ]
        if self.fixed_seconds is not None:
            found.append(Row(case=name, metric="fixed time", value=self.fixed_seconds * 1e6, unit="us"))
        if self.regret is not None:
            best = min(self.choices, key=lambda one: self.choices[one])
            seconds = self.choices[best] * 1e6
            chosen = next(iter(self.choices))
            label = f"{best}, instead of {chosen}" if best != chosen else best
            found.append(
                Row(case=name, metric=REGRET, value=self.regret, unit="", baseline=seconds, baseline_name=label)
            )
        return found

    def line(self) -> str:
        """For the progress."""
        regret = "" if self.regret is None else f"  regret {self.regret:.3f} of {len(self.choices)}"
        wrong = "" if self.error < MAX_ERROR else f"  WRONG by {self.error:.3f}"
        near = " and ".join(f"{name} {seconds * 1e6:.1f} us ({percent(share)})" for name, seconds, share in self.near)
        fixed = "" if self.fixed_seconds is None else f", fixed {self.fixed_seconds * 1e6:.1f}"
        return (
            f"{self.case.name:<44}{self.seconds * 1e6:>9.1f} us ({percent(self.share)})  next to {near}{fixed}"
            f"  ratio {self.ratio:.3f}{regret}{wrong}"
        )


class Sweep:
    """One run of the benchmark."""

    def __init__(self, device: torch.device, space: Space, limits: Limits) -> None:
        self._device = device
        self._space = space
        self._limits = limits
        self._timer: SweepTimer = make_timer(device)

    def open(self, kind: str, cases: Sequence[Case]) -> LinearSweep | AttentionSweep:
        """Make what the cases of one kind need, and choose and compile its kernels."""
        others = [each for case in cases for each in self._others(case)]
        made: LinearSweep | AttentionSweep
        if kind in LINEAR_KINDS:
            linears = [one for one in (*cases, *others) if isinstance(one, LinearCase)]
            made = LinearSweep(kind, str(self._device), self._space.dtype, self._timer, linears)
        else:
            first, more = ([one for one in them if isinstance(one, AttentionCase)] for them in (cases, others))
            made = AttentionSweep(self._device, self._space.dtype, self._timer, first, more)
        chosen = made.tune()
        if chosen:
            print(chosen, flush=True)
        return made

    def measure(self, case: Case, sweep: LinearSweep | AttentionSweep) -> Result:
        """Measure a case next to its neighbours."""
        others = self._others(case)
        error = sweep.error(case)  # type: ignore[arg-type]
        rounds = [[sweep.seconds(one) for one in (case, *others)] for _ in range(ROUNDS)]  # type: ignore[arg-type]
        seconds, *near, fixed = (statistics.median(times) for times in zip(*rounds, strict=True))
        choices = sweep.choices(case)  # type: ignore[arg-type]
        if isinstance(sweep, AttentionSweep):
            sweep.forget()
        return Result(
            case=case,
            neighbours=others[:-1],
            limits=self._limits,
            seconds=seconds,
            near_seconds=near,
            fixed_seconds=fixed,
            error=error,
            choices=choices,
        )

    def _others(self, case: Case) -> tuple[Case, ...]:
        """A case's neighbours, and last one that takes the launches' time alone."""
        near = find_neighbours(case, self._space, self._limits)
        return *near, near[0].smallest()


def find_limits(device: torch.device, bandwidth: float | None, matmul: float | None) -> Limits:
    """The given limits (TB/s, TFLOP/s), or measured ones."""
    name = str(device)
    flops = matmul * 1e12 if matmul else matmul_rate(name, "bfloat16")
    return Limits(
        bandwidth=bandwidth * 1e12 if bandwidth else copy_rate(name),
        flops=flops,
        flops_8bit=flops if matmul or device.type == "cpu" else matmul_rate(name, "float8_e4m3fn"),
    )


def summary(results: Sequence[Result]) -> str:
    """How many cases pass, and what the rules lose."""
    passed = sum(result.ratio <= MAX_RATIO for result in results)
    ratios = [result.ratio for result in results]
    regrets = [result.regret for result in results if result.regret is not None]
    text = f"{passed} of {len(results)} within {MAX_RATIO - 1:.0%} of the predicted time"
    if results:
        text += f"; ratios: median {statistics.median(ratios):.3f}, largest {max(ratios):.3f}"
    if regrets:
        text += (
            f"; regrets of {len(regrets)} rules: median {statistics.median(regrets):.3f}, largest {max(regrets):.3f}"
        )
    return text


def write_json(
    path: Path,
    machine: str,
    results: Sequence[Result],
    settings: Mapping[str, object],
    benchmark: str = "shape_sweep",
) -> None:
    """Write what has been measured so far."""
    rows = [row for result in results for row in result.rows()]
    content = report(benchmark, machine, rows, {**settings, "summary": summary(results)})
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def show(results: Sequence[Result]) -> None:
    """Print the table."""
    rows = []
    for result in results:
        regret = "" if result.regret is None else f"{result.regret:.2f}"
        near = ", ".join(f"{name} ({percent(share)})" for name, _, share in result.near)
        verdict = "" if result.ratio <= MAX_RATIO else "*"
        times = f"{result.seconds * 1e6:.1f}", f"{result.predicted * 1e6:.1f}"
        rows.append((result.case.name, *times, percent(result.share), near, f"{result.ratio:.2f}{verdict}", regret))
    print_table(("case", "us", "predicted", "of floor", "neighbours", "ratio", "regret"), rows)
    print(summary(results), flush=True)


def make_parser(description: str | None, control: str) -> argparse.ArgumentParser:
    """A parser of the arguments that shape_sweep.py and near_sweep.py share. control: help text of --control."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=30, metavar="N")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="of the drawn cases, those of a kind")
    parser.add_argument("--control", action="store_true", help=control)
    parser.add_argument("--limit", type=float, default=110, metavar="SECONDS", help="start no further case after this")
    parser.add_argument("--bandwidth", type=float, help="TB/s; by default a copy is timed")
    parser.add_argument("--matmul", type=float, help="TFLOP/s in 16 and 8 bits; by default matmuls are timed")
    parser.add_argument("--small", action="store_true", help="tiny sizes on a CPU, by Triton's interpreter")
    parser.add_argument("--json", type=Path, help="file to write the results to, after each case")
    return parser


def find_device(*, small: bool) -> torch.device:
    """The first GPU. With `small`, a CPU that has a number, so that the engine chooses the kernels of a GPU, which the
    interpreter runs."""
    return torch.device("cpu" if small else "cuda", 0)


def machine_name(device: torch.device) -> str:
    """The device as results name it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    return f"{device} ({name})"


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = make_parser(__doc__, "draw the shapes of known models")
    parser.add_argument("--neighbours", nargs="+", choices=Space().models, metavar="MODEL")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    """Draw, measure, print, and write the JSON."""
    options = parse()
    run = SweepRun(options.limit)
    torch.manual_seed(options.seed)
    device = find_device(small=options.small)
    space = SMALL if options.small else Space()
    if options.neighbours:
        space = evolve(space, models=tuple(options.neighbours))
    space = evolve(space, control=options.control)
    cases = [case for case in draw(options.seed, options.cases, space) if case.kind in options.only]
    limits = find_limits(device, options.bandwidth, options.matmul)
    print(f"ceilings: {limits}", flush=True)
    settings = {
        "seed": options.seed,
        "cases": options.cases,
        "ceilings": str(limits),
        "models": list(space.models),
        "control": options.control,
    }
    sweep = Sweep(device, space, limits)
    for kind in dict.fromkeys(case.kind for case in cases):
        mine = [case for case in cases if case.kind == kind]
        if run.is_over(f"{kind}: {len(mine)} cases are"):
            continue
        opened = run.prepare(kind, partial(sweep.open, kind, mine))
        if opened is None:
            continue
        print(f"{kind}: ready at {run.seconds:.1f} s", flush=True)
        for case in mine:
            is_new = run.measure(case.name, partial(sweep.measure, case, opened), Result.line)
            if is_new and options.json is not None:
                write_json(options.json, machine_name(device), run.results, settings)
        del opened
        if device.type == "cuda":
            torch.cuda.empty_cache()
    show(run.results)
    print(f"{run.seconds:.0f} s", flush=True)
    run.end()


if __name__ == "__main__":
    main()
