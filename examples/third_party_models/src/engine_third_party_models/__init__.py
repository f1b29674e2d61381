"""Registers two model architectures. Importing this imports nothing heavy."""

from engine.core.hooks import Register, hookimpl, lazy


@hookimpl
def register_models(register: Register) -> None:
    """Register the architectures. Without a preference each is used only when named: the engine has its own of both."""
    register(
        "third-party-gemma2",
        lazy("engine_third_party_models.gemma2:Gemma2"),
        api="2",
        summary="Gemma2ForCausalLM: sliding windows, soft caps, norms before and after each block",
    )
    register(
        "third-party-qwen3-moe",
        lazy("engine_third_party_models.qwen3_moe:Qwen3Moe"),
        api="2",
        summary="Qwen3MoeForCausalLM: a mixture of experts, norms of queries and keys",
    )
