"""Built-in quantization methods."""

from engine.core.hooks import Register, hookimpl, lazy


@hookimpl
def register_quant(register: Register) -> None:
    """Register the built-in methods."""
    register(
        "none",
        lazy("engine.plugins.quant.none:Unquantized"),
        api="2",
        summary="weights in the type of the checkpoint or of --dtype",
        preference=10,
    )
    register(
        "fp8",
        lazy("engine.plugins.quant.fp8:Fp8"),
        api="2",
        summary="float8 weights: fp8, fbgemm_fp8 and compressed-tensors checkpoints, or quantized while loading",
        preference=5,
    )
    register(
        "int8",
        lazy("engine.plugins.quant.int8:Int8"),
        api="2",
        summary="int8 weights and activations: compressed-tensors checkpoints, or quantized while loading",
        preference=4,
    )
    register(
        "gptq",
        lazy("engine.plugins.quant.gptq:Gptq"),
        api="2",
        summary="weights of 4 or 8 bits: GPTQ checkpoints, with or without act-order",
        preference=8,
    )
    register(
        "awq",
        lazy("engine.plugins.quant.awq:Awq"),
        api="2",
        summary="weights of 4 bits: AWQ checkpoints (version gemm)",
        preference=7,
    )
    register(
        "compressed-tensors",
        lazy("engine.plugins.quant.compressed_tensors:CompressedTensors"),
        api="2",
        summary="weights of 4 or 8 bits: packed compressed-tensors checkpoints, also mixed with fp8 or int8",
        preference=6,
    )
    register(
        "mxfp4",
        lazy("engine.plugins.quant.mxfp4:Mxfp4"),
        api="2",
        summary="experts of 4-bit numbers with a scale per 32: gpt-oss checkpoints",
        preference=9,
    )
    register(
        "auto-round",
        lazy("engine.plugins.quant.auto_round:AutoRound"),
        api="2",
        summary="weights of 4 or 8 bits: checkpoints in AutoRound's own format",
        preference=3,
    )
    register(
        "modelopt",
        lazy("engine.plugins.quant.modelopt:ModelOpt"),
        api="2",
        summary="float8 weights, or of 4 bits (W4A16_AWQ): NVIDIA ModelOpt's checkpoints",
        preference=2,
    )
