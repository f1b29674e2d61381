"""Built-in output parsers."""

from engine.core.hooks import Register, hookimpl, lazy


@hookimpl
def register_parsers(register: Register) -> None:
    """Register the built-in parsers."""
    register(
        "response_template",
        lazy("engine.plugins.parsers.response_template:ResponseTemplate"),
        api="1",
        summary="what the tokenizer's response template says, by transformers",
        preference=60,
    )
    register(
        "gpt_oss",
        lazy("engine.plugins.parsers.gpt_oss:GptOss"),
        api="1",
        summary="gpt-oss: harmony, messages in channels",
        preference=50,
    )
    register(
        "deepseek",
        lazy("engine.plugins.parsers.deepseek:DeepSeek"),
        api="1",
        summary="DeepSeek V3, R1 and V3.1: <think>, calls between special tokens",
        preference=40,
    )
    register(
        "mistral",
        lazy("engine.plugins.parsers.mistral:Mistral"),
        api="1",
        summary="Mistral: [THINK], [TOOL_CALLS], before and after version 11",
        preference=40,
    )
    register(
        "hermes",
        lazy("engine.plugins.parsers.hermes:Hermes"),
        api="1",
        summary="Hermes, Qwen 2.5 and 3: <think>, <tool_call>{...}</tool_call>",
        preference=40,
    )
    register(
        "llama3_json",
        lazy("engine.plugins.parsers.llama3:Llama3"),
        api="1",
        summary='Llama 3: the answer is {"name": ..., "parameters": ...}',
        preference=30,
    )
    register(
        "think",
        lazy("engine.plugins.parsers.tagged:ReasoningTags"),
        api="1",
        summary="reasoning in <think>...</think>, and no tool calls",
        preference=20,
    )
    register(
        "none",
        lazy("engine.plugins.parsers.none:NoParser"),
        api="1",
        summary="all of the text is content",
        preference=10,
    )
