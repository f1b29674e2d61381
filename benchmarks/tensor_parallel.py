"""Times of decode and prefill with 1, 2, ... tensor-parallel ranks, and the fraction of a step spent in all-reduces.

    python benchmarks/tensor_parallel.py [--model llama-3.1-8b] [--ranks 1 2] [--json FILE]

Each rank is an engine in its own process that plans the same steps, so that the profiler sees a rank's kernels.
`engine bench latency --tp N` measures the same steps as served, with the ranks as workers. Random weights.

An all-reduce waits for the slowest rank, and under the profiler ranks drift apart. So the time that counts is that of
the rank that started it last, the shortest of all. An all-reduce fused with a norm counts as a whole.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, frozen
from models import MODELS, write_model
from rank_processes import add_rank_options, run_ranks

from engine.cli.bench.load import opened
from engine.cli.bench.report import Row, report, write
from engine.core.config import load_config
from engine.core.executors import Deployment
from engine.plugins.executors.uniproc import UniprocExecutor

SUMS = ("all_reduce", "AllReduce")
"""Substrings of the names of kernels that all-reduce."""
INPUTS = 128
"""Prompt tokens per decoding sequence."""


def rank_executor(rank: int, ranks: int, meet: str, *, exchanges: bool = True) -> type[UniprocExecutor]:
    """An executor in this process for one rank of the model. meet: path of a file that all ranks see. exchanges:
    whether large sums run next to computation."""
    from engine.core.distributed import Rendezvous, join

    class SingleRankExecutor(UniprocExecutor):
        def __init__(self, deployment: Deployment, options: Any) -> None:
            super().__init__(deployment, options)
            group: Any = join(Rendezvous(rank=rank, ranks=ranks, place=meet), self._device)
            if not exchanges:
                group.open_overlapped_sums = lambda *given: None
            self._runner = deployment.make_runner(group)

    return SingleRankExecutor


@frozen(kw_only=True)
class Sums:
    """Time that one rank spent in all-reduces, in steps of one batch size."""

    batch: int
    step: float
    """Microseconds per step, without the profiler."""
    a_step: float
    """All-reduces per step."""
    spent: list[float]
    """Microseconds of each all-reduce, in order of execution."""


def share_of_sums(ranks: Sequence[Sums]) -> float:
    """The fraction of a step spent in all-reduces, from the times of all ranks."""
    # Steps were in progress when the profiler started, but none when it ended.
    count = min(len(one.spent) for one in ranks)
    least = [min(same) for same in zip(*(one.spent[-count:] for one in ranks), strict=True)]
    return statistics.mean(least) * ranks[0].a_step / ranks[0].step


def measure_rank(arguments: argparse.Namespace) -> tuple[list[Row], list[Sums]]:
    """This rank's step times, and its time in all-reduces."""
    from engine.cli.bench import latency
    from engine.cli.bench.profile import profile_decode

    rank, ranks = arguments.rank
    with tempfile.TemporaryDirectory() as directory:
        on_gpu = arguments.device == "cuda"
        overrides: dict[str, Any] = {
            "model.path": str(write_model(Path(directory), arguments.model)),
            "model.load_format": "dummy",
            "model.max_len": 4096 if on_gpu else 512,
            "cache.prefix_caching": False,
            "executor.device": f"cuda:{rank}" if on_gpu else "cpu",
        } | ({} if on_gpu else {"cache.memory": "32MiB", "executor.threads": 1})
        config = load_config(overrides=overrides | dict(one.split("=", 1) for one in arguments.set)).config
        kind = rank_executor(rank, ranks, arguments.meet) if ranks > 1 else None
        prefill = (16, 2048) if on_gpu else (2, 64)
        with opened(config, executor=kind) as engine:
            measured = latency.measure(engine, arguments.batches, inputs=INPUTS, steps=arguments.steps, prefill=prefill)
            rows = [
                Row(metric="decode step", case=f"{ranks} x, batch {one.batch}", value=one.step * 1e3, unit="ms")
                for one in measured.decodes
            ]
            assert measured.prefill is not None
            case = f"{ranks} x, {measured.prefill.name}"
            rows.append(Row(metric="prefill", case=case, value=measured.prefill.rate, unit="tokens/s"))
            sums = []
            for batch in arguments.batches if on_gpu and ranks > 1 else ():
                profile = profile_decode(engine, batch, INPUTS, 20)
                ran = sorted(profile.ran, key=lambda one: one.end)
                spent = [one.own for one in ran if any(part in one.name for part in SUMS)]
                a_step = len(spent) / profile.steps
                sums.append(Sums(batch=batch, step=profile.wall, a_step=a_step, spent=spent))
    return rows, sums


def measure_ranks(ranks: int, arguments: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """Rank 0's step times in one run with that number of ranks, and the fraction spent in all-reduces."""
    options = ["--model", arguments.model, "--device", arguments.device, "--steps", str(arguments.steps)]
    options += ["--batches", *map(str, arguments.batches), *(f"--set={one}" for one in arguments.set)]
    found = run_ranks(__file__, ranks, options, directory)
    rows: list[dict[str, Any]] = found[0]["rows"]
    for same in zip(*([Sums(**one) for one in each["sums"]] for each in found), strict=True):
        case = f"{ranks} x, batch {same[0].batch}"
        share = Row(metric="sums over ranks, of a decode step", case=case, value=100 * share_of_sums(same), unit="%")
        rows.append(asdict(share))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="llama-3.1-8b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=64, help="decode steps to time")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    add_rank_options(parser)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rows, sums = measure_rank(arguments)
        arguments.json.write_text(json.dumps({"rows": list(map(asdict, rows)), "sums": list(map(asdict, sums))}))
        return
    with tempfile.TemporaryDirectory() as directory:
        found = [row for ranks in arguments.ranks for row in measure_ranks(ranks, arguments, Path(directory))]
    rows = [Row(**row) for row in found]
    for row in rows:
        print(f"{row.metric:<36}{row.case:<28}{row.value:12,.3f} {row.unit}")
    if arguments.json is not None:
        import torch

        machine = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
        settings = {"model": arguments.model, "inputs": INPUTS, "given": arguments.set}
        write(arguments.json, report("tensor_parallel", machine, rows, settings))


if __name__ == "__main__":
    main()
