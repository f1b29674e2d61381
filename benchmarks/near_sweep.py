"""Compare random shapes with near round ones that a full search has tuned: where does the engine choose badly?

    python benchmarks/near_sweep.py [--seed 0] [--cases 30] [--only KIND ...] [--part 1/2] [--control]
        [--limit SECONDS] [--json FILE]

The cases are those of shape_sweep.py with the same seed, and the engine chooses their kernels as for a user: by a rule,
or by autotuning as at a first start. A case lies between two neighbours, whose sizes are rounded down and up to
multiples of an eighth of a power of two (sweep_near.py). The kernel of a neighbour is the fastest of every candidate
that the engine has (sweep_search.py), timed at the neighbour's very shape and number of rows. The time of the case is
predicted by its floor, on the line through the floors and times of both; a case passes at MAX_RATIO times the predicted
time. --control draws the nearest round shape instead of the random one and tunes it by the same search, so that a case
that does not pass shows the error of the prediction.

- Quantized layers of up to 8 rows are measured as the decoder block that they were drawn from: four linear layers and
  two norms in sequence (quant_chain.py). Alone they take longer or less than between other layers. A neighbour's block
  is tuned layer by layer, by the time of the whole block (sweep_blocks.py).
- Decode attention has one launch for all contexts, as in a captured graph. A neighbour's launch is the one with the
  least geometric mean of the times with short, medium and long contexts (sweep_search_attention.py). It is timed with
  the contexts of the case.

The regret of a case is its time divided by that of the fastest candidate for its own shape, by the same search. All
kernels are compiled at the beginning, in other processes.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from attrs import evolve
from shape_sweep import (
    Result,
    find_device,
    find_limits,
    machine_name,
    make_parser,
    show,
    summary,
    write_json,
)
from sweep_blocks import Block
from sweep_cases import KINDS, LINEAR_KINDS, SMALL, AttentionCase, Limits, LinearCase, Space, draw
from sweep_linears import LinearSweep
from sweep_near import BlockCase, NearCase, measured_case, near_neighbours, round_case
from sweep_run import SweepRun
from sweep_search import SearchedLinears, case_search, compile_row_classes
from sweep_search_attention import AttentionSearch
from sweep_timing import SweepTimer, make_timer

from engine.core.compilation import SHARED

ROUNDS = 5


class LinearKind:
    """The linear layers of one kind that are measured alone."""

    def __init__(
        self,
        kind: str,
        device: str,
        space: Space,
        timer: SweepTimer,
        cases: Sequence[LinearCase],
    ) -> None:
        near = [one for case in cases for one in near_neighbours(case) if isinstance(one, LinearCase)]
        made = SearchedLinears if space.control else LinearSweep
        self._cases = made(kind, device, space.dtype, timer, cases)
        self._near = SearchedLinears(kind, device, space.dtype, timer, near)
        self._timer = timer

    def begin(self) -> None:
        """Begin to compile."""
        if isinstance(self._cases, SearchedLinears):
            self._cases.begin()
        else:
            compile_row_classes(self._cases)
        self._near.begin()

    def tune(self) -> str:
        """Choose the kernels."""
        return "\n".join((self._cases.tune(), self._near.tune()))

    def seconds(self, case: LinearCase, *, near: bool) -> float:
        return (self._near if near else self._cases).seconds(case)

    def error(self, case: LinearCase, *, near: bool) -> float:
        return (self._near if near else self._cases).error(case)

    def choices(self, case: LinearCase) -> Mapping[str, float]:
        """Name of a candidate for the case's shape -> seconds, the one in use first."""
        search = case_search(self._cases, case)
        if search is None:
            return {}
        chosen = search.chosen
        times = search.search(self._timer.per_call)
        first = min(self._timer.per_call(search.calls_by(chosen)) for _ in range(2))
        rest = {search.op.name(one): seconds for one, seconds in times.items() if one != chosen}
        return {search.op.name(chosen): min(first, times.get(chosen, first)), **rest}


class NearSweep:
    """One run of the benchmark."""

    def __init__(
        self,
        device: torch.device,
        space: Space,
        limits: Limits,
        cases: Sequence[NearCase],
    ) -> None:
        self.device = device
        self._space = space
        self._limits = limits
        self._timer = make_timer(device)
        self._attention = AttentionSearch(device, space, self._timer)
        kinds = dict.fromkeys(case.kind for case in cases if isinstance(case, LinearCase))
        self._linears: dict[str, LinearKind] = {}
        for kind in kinds:
            mine = [case for case in cases if isinstance(case, LinearCase) and case.kind == kind]
            self._linears[kind] = LinearKind(kind, str(device), space, self._timer, mine)
        self._blocks: dict[BlockCase, Block] = {}

    def settings(self, options: argparse.Namespace) -> Mapping[str, object]:
        """What the JSON says of the run."""
        return {
            "seed": options.seed,
            "cases": options.cases,
            "part": "/".join(map(str, options.part)),
            "ceilings": str(self._limits),
            "control": options.control,
        }

    def compile(self, cases: Sequence[NearCase]) -> None:
        """Begin to compile all kernels in other processes."""
        if self.device.type == "cpu":
            return
        for linears in self._linears.values():
            linears.begin()
        attention = [one for case in cases if isinstance(case, AttentionCase) for one in (case, *near_neighbours(case))]
        self._attention.begin([one for one in attention if isinstance(one, AttentionCase)])
        for case in cases:
            if isinstance(case, BlockCase):
                for one in (case, *near_neighbours(case)):
                    self._block(one).compile()  # type: ignore[arg-type]

    def _block(self, case: BlockCase) -> Block:
        if case not in self._blocks:
            self._blocks[case] = Block(case, self.device, self._space.dtype, self._timer)
        return self._blocks[case]

    def tune(self, kind: str) -> str:
        """Choose the kernels of the linear layers of a kind."""
        return self._linears[kind].tune() if kind in self._linears else ""

    def measure(self, case: NearCase) -> Result:
        """Measure a case next to its neighbours."""
        near = near_neighbours(case)
        searched = [*near, *([case] if self._space.control else [])]
        for one in searched:
            if isinstance(one, AttentionCase):
                print(self._attention.search(one), flush=True)
            elif isinstance(one, BlockCase):
                print(f"    {one.near_name}: {self._block(one).search()}", flush=True)
        error = max(self._error(one, near=one is not case) for one in (case, *near))
        everything = (case, *near)
        rounds = [[self._seconds(one, near=one is not case) for one in everything] for _ in range(ROUNDS)]
        seconds, *near_seconds = (statistics.median(times) for times in zip(*rounds, strict=True))
        choices = self._choices(case)
        self._attention.forget()
        for one in everything:
            self._blocks.pop(one, None)  # type: ignore[call-overload]
        return Result(
            case=case,  # type: ignore[arg-type]
            neighbours=near,  # type: ignore[arg-type]
            limits=self._limits,
            seconds=seconds,
            near_seconds=near_seconds,
            error=error,
            choices=choices,
        )

    def _seconds(self, case: NearCase, *, near: bool) -> float:
        if isinstance(case, AttentionCase):
            return self._attention.seconds(case)
        if isinstance(case, BlockCase):
            return self._block(case).seconds()
        return self._linears[case.kind].seconds(case, near=near)

    def _error(self, case: NearCase, *, near: bool) -> float:
        if isinstance(case, AttentionCase):
            return self._attention.error(case)
        if isinstance(case, BlockCase):
            return 0.0
        return self._linears[case.kind].error(case, near=near)

    def _choices(self, case: NearCase) -> Mapping[str, float]:
        if isinstance(case, AttentionCase):
            return self._attention.choices(case)
        if isinstance(case, BlockCase):
            block = self._block(case)
            found = block.search()
            rounds = [(block.seconds(block.rule), block.seconds()) for _ in range(3)]
            rule, best = (statistics.median(times) for times in zip(*rounds, strict=True))
            return {"the rule": rule, found: best} if block.chosen != block.rule else {"the rule": rule}
        return self._linears[case.kind].choices(case)


def show_choices(result: Result) -> str:
    """The fastest candidates of a case's own shape."""
    times = sorted(result.choices.items(), key=lambda pair: pair[1])[:4]
    chosen = next(iter(result.choices), "")
    return f"      chosen: {chosen}; " + "; ".join(f"{seconds * 1e6:.2f} {name}" for name, seconds in times)


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = make_parser(__doc__, "round shapes, each next to other round ones")
    parser.add_argument(
        "--part", type=_part, default=(1, 1), metavar="I/N", help="of the drawn cases, every Nth from the Ith on"
    )
    return parser.parse_args()


def _part(text: str) -> tuple[int, int]:
    """I/N as two numbers. Raises argparse.ArgumentTypeError unless I is from 1 to N."""
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part; give I/N with I from 1 to N, like 1/2")
    return int(part), int(parts)


def measure_kind(
    sweep: NearSweep, kind: str, cases: Sequence[NearCase], run: SweepRun, options: argparse.Namespace
) -> None:
    """Choose the kernels of a kind and measure its cases."""
    chosen = run.prepare(kind, partial(sweep.tune, kind))
    if chosen is None:
        return
    print(f"{kind}: ready at {run.seconds:.1f} s\n{chosen}", flush=True)
    for case in cases:
        is_new = run.measure(
            case.name, partial(sweep.measure, case), lambda result: f"{result.line()}\n{show_choices(result)}"
        )
        if is_new and options.json is not None:
            write_json(
                options.json, machine_name(sweep.device), run.results, sweep.settings(options), benchmark="near_sweep"
            )


@torch.inference_mode()
def main() -> None:
    """Draw, compile, measure, print, and write the JSON."""
    options = parse()
    run = SweepRun(math.inf if options.small else options.limit)
    torch.manual_seed(options.seed)
    device = find_device(small=options.small)
    if not options.small:
        SHARED.begin()
    space = SMALL if options.small else Space()
    part, parts = options.part
    drawn = draw(options.seed, options.cases, space)[part - 1 :: parts]
    cases = [measured_case(case) for case in drawn if case.kind in options.only]
    if options.control:
        cases = [round_case(case) for case in cases]
    limits = find_limits(device, options.bandwidth, options.matmul)
    print(f"ceilings: {limits}", flush=True)
    sweep = NearSweep(device, evolve(space, control=options.control), limits, cases)
    print(f"made at {run.seconds:.1f} s", flush=True)
    sweep.compile(cases)
    print(f"compiling at {run.seconds:.1f} s", flush=True)
    for kind in dict.fromkeys((*LINEAR_KINDS, *KINDS)):
        mine = [case for case in cases if case.kind == kind]
        if mine:
            measure_kind(sweep, kind, mine, run, options)
    show(run.results)
    print(f"{summary(run.results)}; {run.seconds:.0f} s", flush=True)
    run.end()


if __name__ == "__main__":
    main()
