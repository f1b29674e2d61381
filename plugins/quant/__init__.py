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
