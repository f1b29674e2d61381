"""Compare two ranks that quantize their shards at load with one rank: random models of each native architecture.

    python benchmarks/quant_ranks.py [ARCHITECTURE ...] [--json FILE]

Runs on a CPU in float32. Per architecture and method: the rms error of the log probabilities of a prompt on one rank
and on two, against the unquantized model; the rms difference of two ranks from one, and from one rank that has a scale
for each half of the inputs of row-parallel layers; and 1 if greedy tokens on two ranks differ from those on one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cli.bench.report import Row, report, write
from engine.core import Engine, SamplingParams
from engine.plugins.quant.w8_cpu import DequantizeAtLoadKernel, IntegerKernel
from engine.testing.checkpoints import make_checkpoint
from engine.testing.ranks import threaded_ranks

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.plugins.models.families import FAMILIES
from tests.plugins.quant.test_ranks import quantize_by_halves

PROMPT = [(37 * place) % 500 for place in range(60)]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
METHODS: dict[str, dict[str, Any]] = {
    "int8": {"quant__name": "int8"},
    "int8, activations=none": {"quant__name": "int8", "quant__options": {"activations": "none"}},
    "fp8": {"quant__name": "fp8"},
}
ARCHITECTURES = {
    name: family
    for name, family in FAMILIES.items()
    if not family.reads_images and not family.reference and family.form == "gptq"
}
"""The architectures whose weights the methods quantize at load."""


def compute(path: Path, ranks: int = 1, **settings: Any) -> tuple[Any, torch.Tensor]:
    """Greedy tokens, and the log probabilities of the prompt's tokens."""
    if ranks > 1:
        settings["executor"] = threaded_ranks(ranks)
    common = {"executor__device": "cpu", "model__dtype": "float32", "cache__memory": "4MiB"}
    with Engine(model=str(path), **common, **settings) as engine:
        [done] = engine.generate([PROMPT], PARAMS)
        return done.token_ids, torch.tensor([one.logprob for one in done.prompt_logprobs])


def rms(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the differences."""
    return float((found - expected).pow(2).mean().sqrt())


def measure(name: str) -> list[Row]:
    """Measure one architecture with each method, and print its errors."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        family = ARCHITECTURES[name]
        path = make_checkpoint(directory, name, tokenizer=True, seed=family.seed, **family.config)
        _, exact = compute(path)
        for method, settings in METHODS.items():
            tokens, one = compute(path, **settings)
            tokens_of_two, two = compute(path, 2, **settings)
            with pytest.MonkeyPatch.context() as patch:
                quantize_by_halves(IntegerKernel, patch)
                quantize_by_halves(DequantizeAtLoadKernel, patch)
                _, by_halves = compute(path, **settings)
            values = {
                "error of one rank": rms(one, exact),
                "error of two ranks": rms(two, exact),
                "two ranks from one": rms(two, one),
                "two ranks from one with two scales": rms(two, by_halves),
                "other tokens": float(tokens != tokens_of_two),
            }
            case = f"{name}, {method}"
            unit = "rms of log probabilities"
            rows += [
                Row(metric=metric, case=case, value=value, unit="models" if metric == "other tokens" else unit)
                for metric, value in values.items()
            ]
            print(f"{case:<40}" + "".join(f"{value:10.1e}" for value in values.values()), flush=True)
    return rows


def print_summary(rows: list[Row]) -> None:
    """Print, per method, the median and the maximum over architectures."""
    for method in METHODS:
        of = {
            metric: [row.value for row in rows if row.metric == metric and row.case.partition(", ")[2] == method]
            for metric in dict.fromkeys(row.metric for row in rows)
        }
        pairs = zip(of["error of two ranks"], of["error of one rank"], strict=True)
        ratio = statistics.median(two / one for two, one in pairs)
        print(f"{method}: errors of two ranks are {ratio:.2f} (median) times those of one; other tokens in", end=" ")
        print(f"{sum(of['other tokens']):.0f} of {len(of['other tokens'])} models; difference from one rank", end=" ")
        print(f"with two scales at most {max(of['two ranks from one with two scales']):.1e}")


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help="default: all")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [row for name in arguments.architectures or ARCHITECTURES for row in measure(name)]
    print_summary(rows)
    if arguments.json is not None:
        settings = {"prompt": len(PROMPT), "tokens": PARAMS.max_tokens, "arithmetic": "float32"}
        write(arguments.json, report("quant-ranks", "cpu", rows, settings))


if __name__ == "__main__":
    main()
