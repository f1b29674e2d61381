"""The experts of one layer: microseconds for decode batches and prefill, with router, on one GPU.

    python benchmarks/experts.py [--models qwen3-30b-a3b gpt-oss-20b] [--formats bf16 fp8 ...] [--tokens 1 256 8192]
                                 [--no-tuning] [--json FILE]

Weights are random and rotate over COPIES layers, whose weights no cache holds; tokens choose experts at random. The
tiles are tuned first, as at an engine's start. The floor is the larger of two times: to read the weights of the experts
that are chosen at BANDWIDTH, and to multiply at RATE (of 8-bit activations twice that). A whole model's step takes its
layers times this, plus attention, projections and the output layer:

    engine bench --model DIR --load-format dummy    (DIR from benchmarks/models.py, models qwen3-30b-a3b, gpt-oss-20b)
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from attrs import evolve, frozen

from engine.cli.bench.report import Row, percent, report, write
from engine.core.autotune import AutotunedCall, GraphTimer, Operands, group_calls, measure, pick_fastest
from engine.core.layers import FusedExperts
from engine.core.quant import ExpertsSpec, Routing
from engine.ops.experts.pack import BLOCK_INPUTS, SPAN
from engine.ops.experts.route import route
from engine.ops.experts.tiles import row_class
from engine.ops.experts.weights import BLOCK, WeightFormat

DEVICE = torch.device("cuda", 0)
COPIES = 3
BANDWIDTH = 4.28e12
RATE = 814e12
TOKENS = (1, 8, 32, 64, 128, 256, 2048, 8192)
MODELS = {
    "qwen3-30b-a3b": ExpertsSpec(
        name="experts", num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768, dtype="bfloat16"
    ),
    "gpt-oss-20b": ExpertsSpec(
        name="experts",
        num_experts=32,
        top_k=4,
        hidden_size=2880,
        intermediate_size=2880,
        dtype="bfloat16",
        activation="swiglu_oai",
    ),
    "mixtral-8x7b": ExpertsSpec(
        name="experts", num_experts=8, top_k=2, hidden_size=4096, intermediate_size=14336, dtype="bfloat16"
    ),
}


@frozen(kw_only=True)
class Format:
    """A format of weights, and the dtype that activations of many rows are quantized to."""

    form: WeightFormat
    quantized: torch.dtype | None = None
    entry: int = 0
    """Of 4-bit weights: the value of each entry of their scales."""

    def matrices(self, experts: int, outputs: int, inputs: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Random values, and their scales and factors, by the ends of their names."""
        form = self.form
        if form.is_4bit:
            blocks = -(-inputs // BLOCK_INPUTS)
            shape = (experts, blocks, outputs, SPAN)
            yield "", torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=DEVICE)
            entries = blocks if form.kind == "fp4" else blocks * BLOCK_INPUTS // form.group
            yield "_scales", torch.full((experts, entries, outputs), self.entry, dtype=torch.int32, device=DEVICE)
            if form.kind == "fp4":
                yield "_factors", torch.ones(experts, device=DEVICE)
            return
        values = torch.randn(experts, outputs, inputs, device=DEVICE, dtype=torch.bfloat16).mul_(inputs**-0.5)
        if self.quantized is None:
            yield "", values
            return
        scale = 16.0 if self.quantized.is_floating_point else 127.0
        yield "", values.mul_(scale).to(self.quantized)
        shape = (outputs,) if form.kind == "channel" else (-(-outputs // form.scale_rows), -(-inputs // BLOCK))
        yield "_scales", torch.full((experts, *shape), 1 / scale, device=DEVICE)


FORMATS = {
    "bf16": Format(form=WeightFormat(kind="plain")),
    "fp8": Format(form=WeightFormat(kind="channel", dtype="float8_e4m3fn"), quantized=torch.float8_e4m3fn),
    "fp8-blocks": Format(
        form=WeightFormat(kind="block", dtype="float8_e4m3fn", scale_rows=BLOCK), quantized=torch.float8_e4m3fn
    ),
    "int8": Format(form=WeightFormat(kind="channel", dtype="int8"), quantized=torch.int8),
    "int4": Format(form=WeightFormat(kind="int4", group=128), entry=0x00083C00),
    "mxfp4": Format(form=WeightFormat(kind="fp4", group=SPAN), entry=-0x07070708),
}


def random_weights(spec: ExpertsSpec, form: Format) -> Mapping[str, torch.Tensor]:
    """The weights of one layer."""
    sizes = {"gate_up": (2 * spec.intermediate_size, spec.hidden_size)}
    sizes["down"] = (spec.hidden_size, spec.intermediate_size)
    return {
        f"{name}{end}": tensor for name, size in sizes.items() for end, tensor in form.matrices(spec.num_experts, *size)
    }


def tune(op: FusedExperts, layers: list[Mapping[str, torch.Tensor]], timer: GraphTimer, tokens: list[int]) -> None:
    """Choose the tiles of the row classes of these numbers of tokens."""
    wanted = {row_class(count) for count in tokens}
    tasks = group_calls(AutotunedCall(op=op, operands=Operands(weights=one)) for one in layers)
    tasks = [task for task in tasks if task.rows in wanted]
    for task, timings in zip(tasks, measure(tasks, timer), strict=True):
        best, result = pick_fastest(task, timings)
        task.choose(best)
        print(f"  {result}")


def rows_of(model: str, name: str, tokens: list[int], timer: GraphTimer, *, tunes: bool) -> Iterator[Row]:
    """Measure one model in one format."""
    spec, form = MODELS[model], FORMATS[name]
    op = FusedExperts(evolve(spec, device=str(DEVICE)), form.form, form.quantized)
    layers = [random_weights(spec, form) for _ in range(COPIES)]
    if tunes:
        tune(op, layers, timer, tokens)
    expert_bytes = sum(tensor.nbytes for tensor in layers[0].values()) / spec.num_experts
    for count in tokens:
        x = torch.randn(count, spec.hidden_size, device=DEVICE, dtype=torch.bfloat16)
        logits = [torch.randn(count, spec.num_experts, device=DEVICE) for _ in layers]

        def calls(x: torch.Tensor = x, logits: list[torch.Tensor] = logits) -> None:
            for one, weights in zip(logits, layers, strict=True):
                op(x, Routing(*route(one, spec.top_k, rank_experts=range(spec.num_experts))), weights, None)

        seconds = timer.replayed(calls) / COPIES
        touched = sum(len(one.topk(spec.top_k).indices.unique()) for one in logits) / COPIES
        operations = 2 * count * spec.top_k * 3 * spec.hidden_size * spec.intermediate_size
        floor = max(touched * expert_bytes / BANDWIDTH, operations / RATE / (2 if op.quantizes(count) else 1))
        row = Row(
            case=f"{model}, {name}, {count} tokens",
            metric="experts of a layer",
            value=seconds * 1e6,
            unit="us",
            share=floor / seconds,
        )
        print(f"{row.case:40} {row.value:9.1f} us  {percent(row.share)} of the floor's speed", flush=True)
        yield row


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["qwen3-30b-a3b", "gpt-oss-20b"])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--no-tuning", action="store_true", help="measure the default tiles")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args()
    timer = GraphTimer(DEVICE)
    rows = []
    with torch.inference_mode():
        for model in options.models:
            for name in options.formats:
                rows += rows_of(model, name, options.tokens, timer, tunes=not options.no_tuning)
                torch.cuda.empty_cache()
    if options.json:
        machine = f"{DEVICE} ({torch.cuda.get_device_name(DEVICE)})"
        write(options.json, report("experts", machine, rows, {"bandwidth": BANDWIDTH, "rate": RATE}))


if __name__ == "__main__":
    main()
