"""Built-in model architectures."""

from engine.core.hooks import Register, hookimpl, lazy


@hookimpl
def register_models(register: Register) -> None:
    """Register the built-in models."""
    for name, module, cls in (
        ("llama", "llama", "Llama"),
        ("mistral", "mistral", "Mistral"),
        ("qwen2", "qwen2", "Qwen2"),
        ("qwen3", "qwen3", "Qwen3"),
    ):
        register(
            name,
            lazy(f"engine.plugins.models.{module}:{cls}"),
            api="2",
            summary=f"native: {cls}ForCausalLM checkpoints",
            preference=10,
        )
    register(
        "transformers",
        lazy("engine.plugins.models.transformers:Transformers"),
        api="2",
        summary="any decoder of the transformers library, where no native model serves",
        preference=1,
        fallback=True,
    )
