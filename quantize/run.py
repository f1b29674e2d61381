"""A run: quantizes a checkpoint decoder layer by decoder layer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, frozen

from engine.core.device import find_device
from engine.core.errors import CheckpointError, ConfigError
from engine.core.text import Tokenizer
from engine.core.weights import Checkpoint
from engine.quantize.calibration import Calibration, no_calibration
from engine.quantize.calibration_model import CalibrationModel
from engine.quantize.formats import make_format
from engine.quantize.layer import LayerQuantizer
from engine.quantize.output import Output
from engine.quantize.perplexity import Perplexity, check_windows, perplexity
from engine.quantize.progress import Progress
from engine.quantize.report import LayerReport, Report
from engine.quantize.settings import Settings
from engine.quantize.source import DecoderLayer, Source, make_blueprint

SHARD_BYTES = 5 * 10**9


@frozen(kw_only=True)
class HeldOut:
    """The text whose perplexity is measured before and after."""

    text: str
    context: int = 1024
    """Tokens per window."""

    @property
    def stride(self) -> int:
        """Tokens from one window to the next: half a window."""
        return self.context // 2


def quantize(
    model: str | Path,
    output: str | Path,
    settings: Settings,
    *,
    calibration: Calibration | None = None,
    held_out: HeldOut | None = None,
    device: str = "auto",
    shard_bytes: int = SHARD_BYTES,
    restart: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Quantize the checkpoint `model` into the directory `output`, with a report.

    A run that was killed resumes after its last finished layer if called again with the same settings.
    Raises ConfigError, CheckpointError or PluginError, mostly before anything is written.
    """
    if settings.needs_calibration and calibration is None:
        raise no_calibration(settings)
    if shard_bytes < 1:
        raise ConfigError("--max-shard-size must be more than 0")
    began = time.perf_counter()
    progress = progress or Progress()
    found = find_device(device)
    source = Source(Checkpoint.open(model))
    blueprint = make_blueprint(source, settings, found)
    if calibration is not None and blueprint.has_expert_modules:
        raise CheckpointError(
            f"{source.checkpoint.path} has a module per expert, through which calibration text cannot be run; use fp8,"
            " int8 or rtn, without --calibration and --kv-cache"
        )
    if held_out is not None:
        check_windows(held_out.context, held_out.stride, blueprint.spec.max_len)
    samples = None
    if calibration is not None:
        samples = calibration.draw(Tokenizer.open(source.checkpoint.path), blueprint.spec.max_len)
    target = Output(Path(output))
    done = target.open(_identity(source, settings, calibration), restart=restart)
    try:
        total = len(blueprint.layers)
        if done:
            progress.resumed(done, total)
        torch_device = torch.device(found.torch_name)
        head_dim = blueprint.spec.head_dim
        decoder, hidden = None, []
        if samples is not None and done < total:
            decoder = CalibrationModel(source, torch_device)
            hidden = decoder.embed(samples)
        quantizer = LayerQuantizer(settings, make_format(settings, source.dtype), decoder, torch_device, head_dim)
        spent = 0.0
        reports: list[LayerReport] = []
        for layer in blueprint.layers:
            if layer.number < done:
                tensors, report = target.read_layer(layer.number)
                quantizer.skip(layer, tensors, hidden)
            else:
                report = _one(quantizer, source, layer, hidden, target)
                progress.layer(report, total)
            spent += report.seconds if layer.number < done else 0.0
            reports.append(report)
        del decoder, quantizer, hidden
        if torch_device.type == "cuda":
            torch.cuda.empty_cache()  # frees GPU memory for the engines that measure perplexity

        progress.phase("writing the checkpoint")
        config = {
            **source.checkpoint.config,
            "quantization_config": make_format(settings, source.dtype).config(
                (*blueprint.outside, *blueprint.unquantized), blueprint.unquantized_experts
            ),
        }
        others = {name: (source.stored(name).nbytes, partial(source.read, name)) for name in blueprint.others}
        size = target.finish(others, total, config, source.checkpoint.path, shard_bytes)
        before = after = None
        if held_out is not None:
            before = _perplexity(source.checkpoint.path, held_out, found.torch_name, progress)
            after = _perplexity(target.path, held_out, found.torch_name, progress)
        report_of_all = Report(
            model=str(source.checkpoint.path),
            settings=settings.as_dict(),
            calibration=None if calibration is None else _describe(calibration),
            layers=tuple(reports),
            unquantized=(*blueprint.unquantized, *blueprint.unquantized_experts),
            bytes_before=sum(source.file_sizes.values()),
            bytes_after=size,
            seconds=time.perf_counter() - began + spent,
            perplexity_before=before,
            perplexity_after=after,
        )
        report_of_all.write(target.path)
        target.done()
        return report_of_all
    finally:
        target.close()


def _one(
    quantizer: LayerQuantizer, source: Source, layer: DecoderLayer, hidden: list[torch.Tensor], target: Output
) -> LayerReport:
    """Quantize one layer and write it."""
    begin = time.perf_counter()
    stored = {name: source.read(f"{layer.prefix}.{name}") for name in layer.names}
    tensors, linears, scales = quantizer.quantize(layer, stored, hidden)
    seconds = time.perf_counter() - begin
    report = LayerReport(number=layer.number, seconds=seconds, linears=tuple(linears), kv_scales=scales)
    target.write_layer({f"{layer.prefix}.{name}": tensor for name, tensor in tensors.items()}, report)
    return report


def _perplexity(path: Path, held_out: HeldOut, device: str, progress: Progress) -> Perplexity:
    phase = f"perplexity of {path}"
    progress.phase(phase)
    return perplexity(
        path,
        held_out.text,
        context=held_out.context,
        stride=held_out.stride,
        on_progress=partial(progress.within, phase),
        executor__device=device,
    )


def _identity(source: Source, settings: Settings, calibration: Calibration | None) -> dict[str, Any]:
    """The properties that must be equal for a run to resume another."""
    text = {} if calibration is None else {"calibration": calibration.fingerprint()}
    return {"model": source.fingerprint(), **settings.as_dict(), **text}


def _describe(calibration: Calibration) -> Mapping[str, Any]:
    return {**asdict(calibration), "files": [str(file) for file in calibration.files]}
