"""Perplexity of a model on held-out text under each quantization method, written by `engine quantize` and served here.

    python benchmarks/quant_perplexity.py [--device cpu] [--json benchmarks/results/cpu-quant-perplexity.json]

The held-out text is that of the demo model (modules of the standard library that it has not seen); GPTQ and AWQ are
calibrated by other modules. The text is the running Python's, so compare figures of one report only.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

import engine.demo
from engine.cli.bench.report import Row, report, write
from engine.core.device import find_device
from engine.core.errors import EngineError
from engine.quantize.calibration import Calibration
from engine.quantize.perplexity import perplexity
from engine.quantize.run import quantize
from engine.quantize.settings import Settings

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
from demo_model.sources import HELD_OUT, held_out_text, training_sources


@frozen(kw_only=True)
class Case:
    """One row of the table."""

    name: str
    method: str | None
    """None: the unquantized model."""
    options: Mapping[str, Any] = {}
    """Arguments of Settings.choose."""
    engine: Mapping[str, Any] = {}
    """Settings of the engine that serves it."""


CASES = (
    Case(name="bf16", method=None),
    Case(name="fp8 per tensor", method="fp8", options={"granularity": "tensor"}),
    Case(name="fp8 per channel", method="fp8", options={"granularity": "channel"}),
    Case(name="fp8 per 128 x 128 block", method="fp8", options={"granularity": "block"}),
    Case(name="fp8, static activations", method="fp8", options={"granularity": "tensor", "activations": "static"}),
    Case(name="int8", method="int8"),
    Case(name="RTN-4", method="rtn"),
    Case(name="RTN-4, asymmetric", method="rtn", options={"symmetric": False}),
    Case(name="GPTQ-4", method="gptq"),
    Case(name="GPTQ-4, desc_act", method="gptq", options={"act_order": "group"}),
    Case(name="AWQ-4", method="awq"),
    Case(name="fp8 KV cache", method=None, engine={"cache__dtype": "fp8"}),
    Case(name="fp8 KV cache, calibrated", method="none", options={"kv_cache": "fp8"}),
)  # fmt: skip


def calibration_text(length: int, seed: int = 0) -> str:
    """Whole modules that the demo model was trained on, in an order given by the seed, up to this many characters."""
    sources = training_sources()
    assert not {source.module for source in sources} & set(HELD_OUT)
    random.Random(seed).shuffle(sources)
    texts: list[str] = []
    for source in sources:
        if sum(map(len, texts)) >= length:
            break
        texts.append(source.text)
    return "\n".join(texts)


def measure(case: Case, model: Path, text: str, calibration: Calibration, folder: Path, device: str) -> list[Row]:
    """Quantize and serve: perplexity, bytes, and the seconds that quantizing took."""
    directory, seconds = model, 0.0
    if case.method is not None:
        directory = folder / case.name.replace(" ", "-")
        begin = time.perf_counter()
        settings = Settings.choose(case.method, **case.options)
        wanted = calibration if settings.needs_calibration else None
        quantize(model, directory, settings, calibration=wanted, device=device)
        seconds = time.perf_counter() - begin
    dtype = {} if device == "cpu" else {"model__dtype": "bfloat16"}
    found = perplexity(directory, text, executor__device=device, **dtype, **case.engine)
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return [
        Row(metric="perplexity", case=case.name, value=found.value, unit="perplexity"),
        Row(metric="size", case=case.name, value=size / 1e6, unit="MB"),
        Row(metric="time to quantize", case=case.name, value=seconds, unit="s"),
    ]


def chosen(names: str | None) -> Sequence[Case]:
    """Cases by name, separated by semicolons, or all. The unquantized model is always included."""
    if names is None:
        return CASES
    wanted = [name.strip() for name in names.split(";")]
    known = [case.name for case in CASES]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(f"error: there is no case {'; '.join(unknown)}; use some of {'; '.join(known)}")
    return [case for case in CASES if case is CASES[0] or case.name in wanted]


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=engine.demo.path())
    parser.add_argument("--device", default="auto")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--sample-length", type=int, default=512)
    parser.add_argument("--characters", type=int, default=0, help="of the held-out text; 0: all")
    names = "; ".join(case.name for case in CASES)
    parser.add_argument("--cases", help=f"some of them, with semicolons between: {names}")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    cases = chosen(arguments.cases)
    device = find_device(arguments.device)
    text = held_out_text()[: arguments.characters or None]
    rows: list[Row] = []
    refused: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "calibration.txt"
        file.write_text(calibration_text(8 * arguments.samples * arguments.sample_length), encoding="utf-8")
        calibration = Calibration(files=(file,), samples=arguments.samples, length=arguments.sample_length)
        for case in cases:
            try:
                some = measure(case, arguments.model, text, calibration, folder, device.torch_name)
            except EngineError as error:  # this device or this version has no such thing
                refused[case.name] = str(error)
                print(f"{case.name:<36}refused: {error}", flush=True)
                continue
            first = rows[0].value if rows else some[0].value
            print(
                f"{case.name:<36}{some[0].value:9.4f} {some[0].value / first - 1:+8.2%} {some[1].value:8.1f} MB",
                flush=True,
            )
            rows += some
    if arguments.json is not None:
        settings = {
            "model": arguments.model.name,
            "held_out": f"modules {', '.join(HELD_OUT)} of the running Python",
            "characters": len(text),
            "calibration": f"{arguments.samples} x {arguments.sample_length} tokens of other modules",
            "refused": refused,
            "arithmetic": "float32" if device.type == "cpu" else "bfloat16",
        }
        threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
        write(
            arguments.json, report("quant-perplexity", f"{device.torch_name} ({device.name}){threads}", rows, settings)
        )


if __name__ == "__main__":
    main()
