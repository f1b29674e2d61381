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
        ("mixtral", "mixtral", "Mixtral"),
        ("qwen2_moe", "qwen2_moe", "Qwen2Moe"),
        ("qwen3_moe", "qwen3_moe", "Qwen3Moe"),
        ("gpt_oss", "gpt_oss", "GptOss"),
    ):
        register(
            name,
            lazy(f"engine.plugins.models.{module}:{cls}"),
            api="2",
            summary=f"{cls}ForCausalLM checkpoints",
            preference=10,
        )
