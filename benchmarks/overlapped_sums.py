"""Prefill of two or four tensor-parallel ranks with sums next to computation and without, in turns.

    python benchmarks/overlapped_sums.py [--case llama-3.1-8b:none] [--ranks 2] [--json FILE]

"off" is one NCCL all-reduce per sum, "on" sums of two chunks next to computation. Each rank is a process with an engine
for each, which plan the same steps as those of the other ranks. Random weights, prompts of random tokens, one token
out; medians of runs in turns. Log-probabilities of a few tokens are compared; their digest is the same on all ranks.

--also-eager measures both ways with and without CUDA graphs of steps with prefill, whichever the start would choose.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from models import write_model
from rank_processes import add_rank_options, is_rank, rows_of_first_rank
from tensor_parallel import rank_executor

from engine.cli.bench.latency import measure_decode
from engine.cli.bench.load import Load, opened, run_load, say
from engine.cli.bench.profile import print_profile, profile_prefill
from engine.cli.bench.report import Row, report, write
from engine.core.config import load_config
from engine.core.engine import Engine
from engine.core.types import Request, SamplingParams

STEPS = {
    "1 x 2048": (2048,),
    "1 x 4096": (4096,),
    "2 x 4096": (4096,) * 2,
    "16 x 2048": (2048,) * 16,
}
MODES = ("on", "off")
SCORED = (2048, 3000)
"""Lengths of prompts whose log-probabilities are compared."""
DECODED = (1, 64)
"""Batches of decode steps."""


def scores(engine: Engine, lengths: tuple[int, ...]) -> list[Any]:
    """Tokens and log-probabilities of a few greedy tokens behind two prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=5)
    prompts = Load(name="", lengths=tuple((length, 4) for length in lengths), seed=7).prompts(engine.vocab_size)
    for number, prompt in enumerate(prompts):
        engine.add(Request(id=f"scored {number}", prompt=prompt, params=params, arrival=time.monotonic()))
    found: dict[str, list[Any]] = {}
    while engine.has_work:
        for output in engine.step():
            tops = [[list(one) for one in entry.top] for entry in output.logprobs]
            found.setdefault(output.request, []).append([list(output.tokens), tops])
    return sorted(found.items())


def largest_difference(one: list[Any], other: list[Any]) -> float:
    """Of log-probabilities of the same tokens at the first position of each prompt."""
    found = [0.0]
    for (_, ones), (_, others) in zip(one, other, strict=True):
        right = {entry[0]: entry[1] for entry in others[0][1][0]}
        found += [abs(entry[1] - right[entry[0]]) for entry in ones[0][1][0] if entry[0] in right]
    return max(found)


def graph_tokens(engine: Engine) -> int:
    """Tokens of the largest step that is replayed as CUDA graphs."""
    executor: Any = engine._executor
    graphs = executor._runner._launcher._piecewise_graphs
    return graphs.max_tokens if graphs is not None else 0


@contextmanager
def without_piecewise_graphs(engine: Engine, without: bool) -> Iterator[None]:
    """Launch the kernels of steps with prefill one by one, if `without`."""
    executor: Any = engine._executor
    launcher = executor._runner._launcher
    graphs = launcher._piecewise_graphs
    try:
        if without:
            launcher._piecewise_graphs = None
        yield
    finally:
        launcher._piecewise_graphs = graphs


def compare_scores(rank: int, engines: Mapping[str, Engine]) -> None:
    """Print how much the log-probabilities of both ways differ."""
    on, again, off = (scores(engines[mode], SCORED) for mode in ("on", "on", "off"))
    tokens = [[[each[0] for each in one] for _, one in given] for given in (off, on)]
    say(
        f"rank {rank}: log-probabilities equal: on twice {on == again}, on and off {on == off}, largest difference"
        f" {largest_difference(on, off):.4f}; tokens, on and off {tokens[0] == tokens[1]};"
        f" digest {crc32(str(on).encode()):x}"
    )


def measure_prefill(name: str, cases: Mapping[str, tuple[Engine, bool]], repeats: int) -> dict[str, list[float]]:
    """Medians of seconds per run and of seconds of launches, and the shortest run. cases: (engine, whether without
    piecewise graphs), which run in turns."""
    times: dict[str, list[float]] = {case: [] for case in cases}
    launches: dict[str, list[float]] = {case: [] for case in cases}
    load = Load(name="", lengths=tuple((length, 1) for length in STEPS[name]))
    for number in range(-1, repeats):
        for case in list(cases)[:: 1 if number % 2 else -1]:
            engine, eager = cases[case]
            with without_piecewise_graphs(engine, eager):
                run = run_load(engine, load, prefix=f"{name} {number} {case}-")
            if number >= 0:
                times[case].append(run.seconds)
                launches[case].append(run.phases.get("launch", 0.0))
    return {
        case: [statistics.median(times[case]), statistics.median(launches[case]), min(times[case])] for case in cases
    }


def prefill_rows(
    arguments: argparse.Namespace, rank: int, name: str, cases: Mapping[str, tuple[Engine, bool]]
) -> list[Row]:
    """The times of a load in all cases, which rank 0 prints."""
    rows: list[Row] = []
    lengths = STEPS[name]
    repeats = arguments.repeat if len(lengths) < 16 else max(arguments.repeat // 3, 2)
    for case, (value, launch, best) in measure_prefill(name, cases, repeats).items():
        rate = sum(lengths) / value
        rows.append(Row(metric=f"prefill, {case}", case=name, value=value * 1e3, unit="ms"))
        rows.append(Row(metric=f"prefill rate, {case}", case=name, value=rate, unit="tokens/s"))
        rows.append(Row(metric=f"launch, {case}", case=name, value=launch * 1e3, unit="ms"))
        if rank == 0:
            say(
                f"{arguments.case} {name:<10} {case:<10} {value * 1e3:8.2f} ms {rate:9,.0f}/s  best"
                f" {best * 1e3:.2f}  launch {launch * 1e3:.1f}"
            )
    return rows


def profile_kernels(rank: int, mode: str, engine: Engine) -> None:
    """Print the kernels of prefill, and those in the middle of it in their order."""
    profile = profile_prefill(engine, 16, 2048)
    if rank != 0:
        return
    say(mode)
    print_profile(profile)
    ran = sorted(profile.ran, key=lambda one: one.begin)
    middle = ran[len(ran) // 2 :][:130]
    for one in middle:
        begin = one.begin - middle[0].begin
        say(f"{one.lane:>6}{begin:10.1f}{one.end - one.begin:9.1f}  {one.name[:90]}")


def measure_rank(arguments: argparse.Namespace) -> list[Row]:
    """This rank's times."""
    rank, ranks = arguments.rank
    model, _, quant = arguments.case.partition(":")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        overrides: dict[str, Any] = {
            "model.path": str(write_model(Path(directory), model)),
            "model.load_format": "dummy",
            "model.max_len": 4352,
            "cache.prefix_caching": False,
            "cache.memory": "8GiB",
            "executor.device": f"cuda:{rank}",
        } | ({} if quant in ("", "none") else {"quant.name": quant})
        config = load_config(overrides=overrides | dict(one.split("=", 1) for one in arguments.set)).config
        engines: dict[str, Engine] = {}
        for mode in MODES:
            begun = time.perf_counter()
            executor = rank_executor(rank, ranks, f"{arguments.meet}-{mode}", exchanges=mode == "on")
            engines[mode] = stack.enter_context(opened(config, executor=executor))
            if rank == 0:
                say(f"{mode}: {time.perf_counter() - begun:.1f} s, graphs up to {graph_tokens(engines[mode])} tokens")
            rows.append(Row(metric="graphs up to", case=mode, value=graph_tokens(engines[mode]), unit="tokens"))
        compare_scores(rank, engines)
        cases = {mode: (engines[mode], False) for mode in MODES}
        if arguments.also_eager:
            cases |= {f"{mode}, eager": (engines[mode], True) for mode in MODES}
        for name in arguments.steps:
            rows += prefill_rows(arguments, rank, name, cases)
        for mode in MODES if arguments.profile else ():
            profile_kernels(rank, mode, engines[mode])
        for batch in DECODED if arguments.decode else ():
            for mode in MODES:
                step = measure_decode(engines[mode], batch, 128, 64, 2).step
                rows.append(Row(metric=f"decode step, {mode}", case=f"batch {batch}", value=step * 1e3, unit="ms"))
                if rank == 0:
                    say(f"{arguments.case} decode step, batch {batch:<3} {mode:<4} {step * 1e3:8.3f} ms")
    return rows


def main() -> None:
    """Run the ranks and write rank 0's times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="llama-3.1-8b:none", metavar="MODEL:QUANT")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="also print the kernels of a step")
    parser.add_argument("--repeat", type=int, default=6)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--no-decode", dest="decode", action="store_false", help="measure prefill alone")
    parser.add_argument("--also-eager", action="store_true", help="measure each way also without piecewise graphs")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    add_rank_options(parser)
    arguments = parser.parse_args()
    if is_rank(arguments, measure_rank):
        return
    options = ["--case", arguments.case, "--repeat", str(arguments.repeat)]
    options += [f"--set={one}" for one in arguments.set] + ["--profile"] * arguments.profile
    options += ["--steps", *arguments.steps]
    options += ["--no-decode"] * (not arguments.decode) + ["--also-eager"] * arguments.also_eager
    rows = rows_of_first_rank(__file__, arguments.ranks, options)
    if arguments.json is not None:
        settings = {"case": arguments.case, "ranks": arguments.ranks, "given": arguments.set}
        write(arguments.json, report("overlapped-sums", torch.cuda.get_device_name(), rows, settings))


if __name__ == "__main__":
    main()
