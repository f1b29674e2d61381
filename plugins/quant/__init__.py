"""Built-in quantization methods."""

from engine.core.hooks import Register, hookimpl, lazy


@hookimpl
def register_quant(register: Register) -> None:
    """Offer them."""
    register(
        "none",
        lazy("engine.plugins.quant.none:Unquantized"),
        api="1",
        summary="weights in the type of the checkpoint or of --dtype",
        preference=10,
    )
    register(
        "fp8",
        lazy("engine.plugins.quant.fp8:Fp8"),
        api="1",
        summary="float8 weights: fp8 and compressed-tensors checkpoints, or quantized while loading",
        preference=5,
    )
    register(
        "int8",
        lazy("engine.plugins.quant.int8:Int8"),
        api="1",
        summary="int8 weights and activations: compressed-tensors checkpoints, or quantized while loading",
        preference=4,
    )
