"""Peak GPU memory while weights are loaded and quantized, and what remains allocated afterwards.

    python benchmarks/load_memory.py [--model llama-3.1-8b] [--quant fp8] [--json FILE]

Weights are random bfloat16, made layer by layer as a checkpoint's are read.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from models import MODELS, write_model

from engine.cli.bench.report import Row, report, write
from engine.core.config import load_config
from engine.core.device import find_device
from engine.core.layers import LayerFactory
from engine.core.plugin_host import fused_kernels, load_plugins, resolve
from engine.core.weights import Checkpoint, DummySource, load_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="llama-3.1-8b")
    parser.add_argument("--quant", default="fp8")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = find_device("cuda")
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        path = write_model(Path(directory), arguments.model)
        config = load_config(
            overrides={"model.path": str(path), "model.load_format": "dummy", "quant.name": arguments.quant}
        ).config
        checkpoint = Checkpoint.open(str(path))
        parts = resolve(config, load_plugins(), device, checkpoint.config)
        quant = parts.quant.from_checkpoint(checkpoint.quantization, parts.options["quant"])
        layers = LayerFactory(
            dtype="bfloat16", device=device.torch_name, quant=quant, fused=fused_kernels(config, device)
        )
        model = parts.model(checkpoint.config, layers, parts.options["models"])
        load_weights(layers, DummySource())
    peak, final = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    print(
        f"{type(model).__name__}, {arguments.quant}: {final / 1e9:.3f} GB stay, {peak / 1e9:.3f} at the peak:"
        f" {peak / final:.3f} x"
    )
    rows = [
        Row(metric="memory that stays", value=final / 1e9, unit="GB"),
        Row(metric="memory at the peak", value=peak / 1e9, unit="GB"),
    ]
    if arguments.json is not None:
        settings = {"model": arguments.model, "quant": arguments.quant}
        write(arguments.json, report("load_memory", torch.cuda.get_device_name(), rows, settings))


if __name__ == "__main__":
    main()
