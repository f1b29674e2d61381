"""Advice on how to get a checkpoint that can be served in place of one that cannot."""

from __future__ import annotations

UNQUANTIZED = "serve the unquantized model with --quant fp8 or int8, or quantize it with llm-compressor (W4A16 or FP8)"
BY_PROGRAM = {
    "AutoRound": "export again with auto-round, format auto_round, 4 or 8 bits and unquantized activations",
    "ModelOpt": "export again with ModelOpt as FP8 or INT4_AWQ, or " + UNQUANTIZED,
    "llm-compressor": "quantize again with llm-compressor as W4A16, W8A16, INT8 or FP8, or " + UNQUANTIZED,
}
"""Program that writes checkpoints -> how to write one that this engine reads."""
BY_METHOD = {
    "aqlm": UNQUANTIZED,
    "auto-round": BY_PROGRAM["AutoRound"],
    "bitnet": UNQUANTIZED,
    "bitsandbytes": UNQUANTIZED,
    "eetq": UNQUANTIZED,
    "hqq": UNQUANTIZED,
    "modelopt": BY_PROGRAM["ModelOpt"],
    "nvfp4": BY_PROGRAM["ModelOpt"],
    "quanto": UNQUANTIZED,
    "quark": "export again with Quark in the format of compressed-tensors, or " + UNQUANTIZED,
    "torchao": UNQUANTIZED,
}
"""quant_method -> how to get a checkpoint of the model that this engine reads."""


def instead_of(program: str) -> str:
    """What to do instead of serving a format of this program."""
    return BY_PROGRAM[program]


def advice(method: object) -> str:
    """What to do instead of serving a checkpoint of this quant_method. Empty: there is no advice."""
    found = BY_METHOD.get(str(method))
    return f"; {found}" if found else ""
