"""The engine next to transformers' `generate`: same machine, checkpoint, type, prompts and lengths, greedy, in one run.

    python benchmarks/compare_transformers.py [--model DIR] [--json benchmarks/results/cpu-transformers.json]

transformers gets all requests in one left-padded batch, which runs until the longest is done; with one request after
the other it is slower by far. Only the tokens that were asked for count.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers

import engine.demo
from engine.cli.bench.load import Load, make_load, run_load
from engine.cli.bench.report import Row, report, write
from engine.core import Engine

ALONE = make_load(1, (64, 64), (256, 256), seed=0)
SHORT = make_load(32, (16, 256), (16, 256), seed=0)
UNEVEN = make_load(32, (100, 1024), (100, 1024), seed=0)


class Baseline:
    """transformers with its default settings: dynamic cache, scaled_dot_product_attention."""

    def __init__(self, path: str, dtype: str) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
        self.model.generation_config.eos_token_id = None  # as ignore_eos: go on to the last token asked for
        self.pad = 0

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """Continue left-padded prompts by exactly `new_tokens` each."""
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=new_tokens,
                pad_token_id=self.pad,
            )
        return [row[width:] for row in out.tolist()]

    def one_batch(self, prompts: Sequence[Sequence[int]], outputs: Sequence[int]) -> None:
        """All prompts in one batch, which runs until the longest ends."""
        self.generate(prompts, max(outputs))


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def compare(served: Engine, baseline: Baseline, load: Load, repeat: int) -> dict[str, float]:
    """Median output tokens per second of each way to run the load, the ways taken in turn."""
    requests = list(load.requests(served.vocab_size))
    prompts = [request.prompt for request in requests]
    outputs = [wanted for _, wanted in load.lengths]
    ways: dict[str, Callable[[str], float]] = {
        "engine": lambda name: run_load(served, load, prefix=name).seconds,
        "transformers": lambda _: timed(lambda: baseline.one_batch(prompts, outputs)),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for round_number in range(repeat + 1):
        for way, run in ways.items():
            spent = run(f"{round_number}-")
            if round_number:
                seconds[way].append(spent)
    return {way: sum(outputs) / statistics.median(spent) for way, spent in seconds.items()}


def same_tokens(served: Engine, baseline: Baseline, load: Load) -> int:
    """Number of requests whose tokens in the engine's batches equal those that transformers gives for each alone."""
    requests = list(load.requests(served.vocab_size, "check-"))
    got: dict[str, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        served.add(request)
    while served.has_work:
        for output in served.step():
            got[output.request] += output.tokens
    return sum(
        got[request.id] == baseline.generate([request.prompt], outputs)[0]
        for request, (_, outputs) in zip(requests, load.lengths, strict=True)
    )


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(engine.demo.path()))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)

    baseline = Baseline(arguments.model, arguments.dtype)
    rows = []
    with Engine(model=arguments.model, model__dtype=arguments.dtype, executor__device="cpu") as served:
        equal = same_tokens(served, baseline, SHORT)
        for name, load in (
            ("1 request, 64 in / 256 out", ALONE),
            ("32 requests, 16-256 in / 16-256 out", SHORT),
            ("32 requests, 100-1024 in / 100-1024 out", UNEVEN),
        ):
            rates = compare(served, baseline, load, arguments.repeat)
            rows.append(
                Row(
                    metric=name,
                    value=rates["engine"],
                    unit="output tokens/s",
                    baseline=rates["transformers"],
                    baseline_name=f"transformers {transformers.__version__} generate",
                )
            )
        machine = f"{served.cache_info.device}, {torch.get_num_threads()} threads"
    rows.append(Row(metric="requests with the very tokens of transformers, of 32", value=equal, unit="requests"))
    for row in rows:
        against = f"  {row.baseline:9.1f} {row.baseline_name}: {row.value / row.baseline:.2f} x" if row.baseline else ""
        print(f"{row.metric:<55}{row.value:9.1f} {row.unit}{against}")
    if arguments.json is not None:
        settings = {"model": Path(arguments.model).name, "dtype": arguments.dtype, "repeat": arguments.repeat}
        write(arguments.json, report("cpu-transformers", machine, rows, settings))


if __name__ == "__main__":
    main()
