"""Built-in attention backends."""

from engine.core.hooks import Register, hookimpl, lazy


@hookimpl
def register_attention(register: Register) -> None:
    """Offer them."""
    register(
        "torch",
        lazy("engine.plugins.attention.torch:TorchAttention"),
        api="1",
        summary="PyTorch operations only; runs anywhere, the reference for the others",
        preference=10,
    )
