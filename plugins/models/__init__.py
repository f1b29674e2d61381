"""Built-in model architectures."""

from engine.core.hooks import Register, hookimpl, lazy

CAUSAL = (
    *("Llama", "Mistral", "Ministral", "Ministral3", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Phi3"),
    *("Olmo2", "Olmo3", "Granite", "SmolLM3", "Glm4", "Starcoder2", "Cohere2"),
)
"""Classes of language models, each in a module of its name."""
ADDED = ("MiMo",)
"""The same, of language models that transformers lacks."""
SPARSE = (
    ("mixtral", "Mixtral"),
    ("qwen2_moe", "Qwen2Moe"),
    ("qwen3_moe", "Qwen3Moe"),
    ("gpt_oss", "GptOss"),
    ("deepseek_v2", "DeepseekV2"),
)
"""Name, also of the module, and class of language models with experts."""
TEXT_TOWERS = (
    ("gemma3-multimodal", "Gemma3Text", "Gemma3ForConditionalGeneration"),
    ("mistral3", "Mistral3Text", "Mistral3ForConditionalGeneration"),
    ("ministral3-multimodal", "Ministral3Text", "Mistral3ForConditionalGeneration"),
    ("qwen3-vl", "Qwen3VLText", "Qwen3VLForConditionalGeneration"),
)
"""Name, class and architecture of checkpoints whose language model is loaded alone."""


@hookimpl
def register_models(register: Register) -> None:
    """Register the built-in models."""
    for name, cls in (*((cls.lower(), cls) for cls in (*CAUSAL, *ADDED)), *SPARSE):
        loader = lazy(f"engine.plugins.models.{name}:{cls}")
        register(name, loader, api="2", summary=f"native: {cls}ForCausalLM checkpoints", preference=10)
    for name, cls, architecture in TEXT_TOWERS:
        loader = lazy(f"engine.plugins.models.text_tower:{cls}")
        register(name, loader, api="2", summary=f"native: {architecture} checkpoints, text only", preference=10)
    register(
        "transformers",
        lazy("engine.plugins.models.transformers:Transformers"),
        api="2",
        summary="any decoder of the transformers library, where no native model serves",
        preference=1,
        fallback=True,
    )
