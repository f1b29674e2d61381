"""Registers one attention backend and one scheduling policy. Importing this imports nothing heavy."""

from engine.core.hooks import Register, hookimpl, lazy


@hookimpl
def register_attention(register: Register) -> None:
    """Register the backend. Without a preference it is used only when named."""
    register(
        "sample-sdpa",
        lazy("engine_sample_plugin.attention:SampleAttention"),
        api="2",
        summary="scaled_dot_product_attention, one sequence after the other",
    )


@hookimpl
def register_schedulers(register: Register) -> None:
    """Register the policy."""
    register(
        "shortest-first",
        lazy("engine_sample_plugin.policy:ShortestFirst"),
        api="1",
        summary="shortest prompt first; preempts the longest",
    )
