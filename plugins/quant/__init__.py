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
        summary="float8 weights: fp8 and compressed-tensors checkpoints, or quantized while loading",
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
        lazy("engine.plugins.quant.pack_quantized:PackQuantized"),
        api="2",
        summary="weights of 4 or 8 bits: compressed-tensors checkpoints of format pack-quantized (W4A16, W8A16)",
        preference=6,
    )
