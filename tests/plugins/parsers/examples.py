"""Outputs in each format, well formed and not, and the lines of a chat template that write the format."""

# ruff: noqa: E501  (an example is one line)

from __future__ import annotations

from typing import Any

from engine.core.parsers import Templates
from engine.testing.parsers import Example

ROME: dict[str, Any] = {"city": "Rome"}
NESTED: dict[str, Any] = {"q": 'a "b" \\ </tool_call> [1]', "n": [1, -2.5e3, {"x": None}], "yes": True, "s": "é\n🦀"}

HERMES = Templates(
    chat="{% if tools %}<tool_call>{% endif %}{{ '<think>\\n' + reasoning_content + '\\n</think>\\n\\n' }}"
)
HERMES_EXAMPLES = (
    Example("It is sunny.", content="It is sunny."),
    Example("  spaces stay \n", content="  spaces stay \n"),
    Example("<think>\nhmm, the weather\n</think>\n\nsunny", reasoning="hmm, the weather", content="sunny"),
    Example("hmm\n</think>\n\nsunny", prompt="<|im_start|>assistant\n<think>\n", reasoning="hmm", content="sunny"),
    Example("<think>\nhmm <think>\n</think>\n\nsunny", prompt="<|im_start|>assistant\n<think>\n", reasoning="hmm <think>", content="sunny"),
    Example("sunny </think>", prompt="<think>\n\n</think>\n\n", content="sunny </think>"),
    Example("<think>\n\n</think>\n\nsunny", content="sunny"),
    Example("<think>hmm", reasoning="hmm"),
    Example(
        '<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call>',
        calls=(("f", '{"city": "Rome"}'),),
    ),
    Example('<tool_call>{"name":"f","arguments":{}}</tool_call>', calls=(("f", "{}"),)),
    Example('<tool_call>{"name": "f"}</tool_call>', calls=(("f", {}),)),
    Example('<tool_call>{"arguments": {"city": "Rome"}, "name": "f"}</tool_call>', calls=(("f", ROME),)),
    Example('<tool_call>{"name": "f", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>', calls=(("f", ROME),)),
    Example('<tool_call>{"name": "f", "arguments": null}</tool_call>', calls=(("f", {}),)),
    Example('<tool_call>{"name": "f", "arguments": {"city": "Rome\nItaly"}}</tool_call>', calls=(("f", {"city": "Rome\nItaly"}),)),
    Example(
        '<think>hmm</think>Let me see.\n<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        reasoning="hmm",
        content="Let me see.",
        calls=(("f", ROME), ("g", {})),
    ),
    Example(
        '<think>hmm <tool_call>{"name": "f", "arguments": {"city": "Rome"}}</tool_call> weather</think>sunny',
        reasoning="hmm weather",
        content="sunny",
        calls=(("f", ROME),),
    ),
    Example("<think>hmm <tool_call> is a mark</think>sunny", reasoning="hmm <tool_call> is a mark", content="sunny"),
    Example('<tool_call>{"name": "f", "arguments": {}}', calls=(("f", {}),)),
    Example('<tool_call>{"name": "f", "arguments": {}} {"name": "g", "arguments": {}}</tool_call>', calls=(("f", {}), ("g", {}))),
    Example('<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g"}</tool_call>', calls=(("f", {}), ("g", {}))),
    Example('<tool_call>{"name": "f", "arguments": {}}}</tool_call>', content="}", calls=(("f", {}),)),
    Example(
        '<tool_call>{"name": "f", "arguments": {"city": Rome}}</tool_call> sunny',
        content='Rome}} sunny',
        calls=(("f", '{"city": '),),
        malformed=True,
    ),
    Example(
        r'''<tool_call>{"name": "f", "arguments": {"city": "Rome", "it\'s": [True, None,],},}</tool_call> sunny''',
        content=" sunny",
        calls=(("f", {"city": "Rome", "it's": [True, None]}),),
    ),
    Example(
        '<tool_call>{"name": "f", "arguments": {"city": "Ro', calls=(("f", '{"city": "Ro'),), malformed=True
    ),
    Example("The mark is <tool_call>, sunny", content="The mark is <tool_call>, sunny", malformed=True),
    Example("<tool_call>f(Rome)</tool_call>", content="<tool_call>f(Rome)</tool_call>", malformed=True),
    Example(
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        content='<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        tools=(),
    ),
    Example('{"name": "f", "arguments": {}}', content='{"name": "f", "arguments": {}}'),
    Example("a < b <too <tool", content="a < b <too <tool"),
)  # fmt: skip

LLAMA3 = Templates(chat='<|start_header_id|>{{ role }}<|end_header_id|>{"name": "...", "parameters": ...}')
LLAMA3_EXAMPLES = (
    Example("It is sunny.", content="It is sunny."),
    Example('{"name": "f", "parameters": {"city": "Rome"}}', calls=(("f", ROME),)),
    Example('<|python_tag|>{"name": "f", "parameters": {"city": "Rome"}}', calls=(("f", ROME),)),
    Example('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}', calls=(("f", {}), ("g", {"a": 1}))),
    Example('{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}', calls=(("f", {}), ("g", {}))),
    Example('{"name": "Rome", "parameters": {"a": 1}}', content='{"name": "Rome", "parameters": {"a": 1}}'),
    Example('{"name": "f", "weather": "sunny"}', content='{"name": "f", "weather": "sunny"}'),
    Example('{"weather": {"city": "Rome"}}', content='{"weather": {"city": "Rome"}}'),
    Example('<|python_tag|>search("Rome")', content='<|python_tag|>search("Rome")', malformed=True),
    Example('{"name": "f", "parameters": {"city": "Rome", }}', calls=(("f", ROME),)),
    Example('{"name": "f", "parameters": {"city": Rome}}', content='Rome}}', calls=(("f", '{"city": '),), malformed=True),
    Example('{"name": "f", "parameters": {}}; {"name": "zz", "parameters": {}}', content='; {"name": "zz", "parameters": {}}', calls=(("f", {}),), malformed=True),
    Example('{"name": "f", "parameters": {}}; sunny', content="; sunny", calls=(("f", {}),), malformed=True),
    Example('{"name": "f", "parameters": {}} ; ', calls=(("f", {}),)),
    Example('{"name": "f", "parameters": {}} sunny', content=" sunny", calls=(("f", {}),)),
    Example('{"name": "f", "parameters": {}}', content='{"name": "f", "parameters": {}}', tools=()),
    Example("{", content="{"),
)  # fmt: skip

MISTRAL = Templates(chat="[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS]{{ name }}[ARGS] [THINK] [/THINK]")
MISTRAL_EXAMPLES = (
    Example("It is sunny.", content="It is sunny."),
    Example("[THINK]hmm[/THINK]sunny", reasoning="hmm", content="sunny"),
    Example('[TOOL_CALLS] [{"name": "f", "arguments": {"city": "Rome"}}]', calls=(("f", ROME),)),
    Example('[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1}}]', calls=(("f", {}), ("g", {"a": 1}))),
    Example('[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcdefghi"}]', calls=(("f", {}),)),
    Example('[TOOL_CALLS]f[ARGS]{"city": "Rome"}', calls=(("f", ROME),)),
    Example('[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"city": "Rome"}', calls=(("f", ROME),)),
    Example('[TOOL_CALLS]f{"city": "Rome"}[TOOL_CALLS]g[ARGS]{}', calls=(("f", ROME), ("g", {}))),
    Example('Let me see.[TOOL_CALLS]f[ARGS]{"city": "Rome"}', content="Let me see.", calls=(("f", ROME),)),
    Example("[TOOL_CALLS]f[ARGS][TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS] [TOOL_CALLS]f[ARGS]{}", calls=(("f", {}), ("g", {}), ("f", {}))),
    Example("[TOOL_CALLS]f[ARGS]", content="[TOOL_CALLS]f[ARGS]", malformed=True),
    Example("[TOOL_CALLS] sunny in Rome", content="[TOOL_CALLS] sunny in Rome", malformed=True),
    Example('[TOOL_CALLS] [{"name": "f"', content='[TOOL_CALLS] [{"name": "f"', malformed=True),
    Example('[TOOL_CALLS]f[ARGS]sunny', content='[TOOL_CALLS]f[ARGS]sunny', malformed=True),
    Example('[TOOL_CALLS][{"name": "f", "arguments": {}},]', calls=(("f", {}),)),
    Example('[TOOL_CALLS] [{"name": "f", "arguments": {}} , {"name": "g", "arguments": {}} , ] sunny', content=" sunny", calls=(("f", {}), ("g", {}))),
    Example('[TOOL_CALLS][{"name": "f", "arguments": {}},', content=",", calls=(("f", {}),), malformed=True),
    Example('[TOOL_CALLS][{"name": "f", "arguments": {}},,]', content=",,]", calls=(("f", {}),), malformed=True),
    Example('[TOOL_CALLS][{"name": "f", "arguments": {}}, sunny]', content=", sunny]", calls=(("f", {}),), malformed=True),
)  # fmt: skip

BAR = "\uff5c"
BLANK = "\u2581"


def deepseek(text: str) -> str:
    """A text with DeepSeek's marks for <|tool calls begin|> and so on."""
    names = ("calls begin", "calls end", "call begin", "call end", "sep")
    for name in names:
        text = text.replace(f"<|tool {name}|>", f"<{BAR}tool{BLANK}{name.replace(' ', BLANK)}{BAR}>")
    return text


DEEPSEEK = Templates(chat=deepseek("<|tool calls begin|>{{ name }} <think></think>"))
_R1 = "<|tool call begin|>function<|tool sep|>{}\n```json\n{}\n```<|tool call end|>"
_V31 = "<|tool call begin|>{}<|tool sep|>{}<|tool call end|>"
DEEPSEEK_EXAMPLES = (
    Example("<think>\nhmm\n</think>\n\nsunny", reasoning="hmm", content="sunny"),
    Example("hmm</think>sunny", prompt="<think>\n", reasoning="hmm", content="sunny"),
    Example(
        deepseek("<|tool calls begin|>" + _R1.format("f", '{"city": "Rome"}') + "\n" + _R1.format("g", "{}") + "<|tool calls end|>"),
        calls=(("f", ROME), ("g", {})),
    ),
    Example(
        deepseek("Let me see.\n\n<|tool calls begin|>" + _V31.format("f", '{"city": "Rome"}') + _V31.format("g", "{}") + "<|tool calls end|>"),
        content="Let me see.",
        calls=(("f", ROME), ("g", {})),
    ),
    Example(deepseek("<|tool calls begin|><|tool call begin|>f<|tool sep|>{}"), calls=(("f", {}),)),
    Example(
        deepseek("<|tool calls begin|>" + _V31.format("f", "") + _V31.format("g", '{"city": "Rome"}') + "<|tool calls end|>sunny"),
        content="sunny",
        calls=(("f", {}), ("g", ROME)),
    ),
    Example(deepseek("<|tool calls begin|><|tool call begin|>f<|tool sep|>\n<|tool calls end|>"), calls=(("f", {}),)),
    Example(deepseek("<|tool calls begin|><|tool call begin|>f<|tool sep|><|tool call begin|>g<|tool sep|>{}"), calls=(("f", {}), ("g", {}))),
    Example(
        deepseek("<|tool calls begin|>" + _R1.format("f", "") + "\n" + _R1.format("g", "{}").replace("\n```<", "<") + "<|tool calls end|>"),
        calls=(("f", {}), ("g", {})),
    ),
    Example(
        deepseek("<|tool calls begin|>sunny<|tool calls end|>"),
        content=deepseek("<|tool calls begin|>sunny<|tool calls end|>"),
        malformed=True,
    ),
    Example(
        deepseek("<|tool calls begin|><|tool call begin|>f<|tool sep|>{Rome}<|tool call end|><|tool calls end|>"),
        content=deepseek("Rome}<|tool call end|>"),
        calls=(("f", "{"),),
        malformed=True,
    ),
)  # fmt: skip

GPT_OSS = Templates(chat="<|start|>assistant<|channel|>final<|message|>{{ content }}<|return|>")
GPT_OSS_EXAMPLES = (
    Example("<|channel|>final<|message|>It is sunny.", content="It is sunny."),
    Example("<|channel|>final<|message|>It is sunny.<|return|>", content="It is sunny."),
    Example(
        "<|channel|>analysis<|message|>hmm<|end|><|start|>assistant<|channel|>final<|message|>sunny",
        reasoning="hmm",
        content="sunny",
    ),
    Example(
        "<|channel|>analysis<|message|>hmm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"city": "Rome"}',
        reasoning="hmm",
        calls=(("f", ROME),),
    ),
    Example('<|channel|>commentary to=functions.f<|message|>{"city": "Rome"}<|call|>', calls=(("f", ROME),)),
    Example(' to=functions.f<|channel|>commentary json<|message|>{"city": "Rome"}', calls=(("f", ROME),)),
    Example('<|channel|>analysis to=functions.f code<|message|>{}<|call|>', calls=(("f", {}),)),
    Example(
        "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.f"
        "<|message|>{}<|call|><|start|>assistant<|channel|>commentary to=functions.g<|message|>{}",
        content="Let me see.",
        calls=(("f", {}), ("g", {})),
    ),
    Example(
        "<|channel|>analysis<|message|>hmm<|end|><|start|>assistant<|channel|>analysis<|message|>the weather",
        reasoning="hmm\nthe weather",
    ),
    Example("It is sunny.", content="It is sunny."),
    Example("<|channel|>final sunny", content="<|channel|>final sunny", malformed=True),
    Example("<|channel|>radio<|message|>sunny", content="<|channel|>radio<|message|>sunny", malformed=True),
    Example("<|start|>Rome<|channel|>final<|message|>sunny", content="<|start|>Rome<|channel|>final<|message|>sunny", malformed=True),
    Example("<|channel|>analysis weather<|message|>hmm", reasoning="<|channel|>analysis weather<|message|>hmm", malformed=True),
    Example(
        "<|channel|>analysis<|message|>hmm<|end|><|start|>assistant<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        reasoning="hmm\n<|start|>assistant<|channel|>analysis to=python code<|message|>print(1)",
        malformed=True,
    ),
    *(
        Example(f"<|channel|>analysis<|message|>hmm<|end|><|start|>{header}", reasoning="hmm")
        for header in ("", "assi", "assistant", "assistant<|ch", "assistant<|channel|>comm", "assistant<|channel|>commentary to=functions.f <|constrain|>js")
    ),
    Example("<|channel|>analysis<|message|>hmm<|end|><|start|>assistant to=functions.get_w", reasoning="hmm", tools=("f", "get", "get_wind")),
    Example("<|channel|>analysis<|message|>hmm<|end|><|start|>assistant to=functions.get json", reasoning="hmm", tools=("get", "get_wind")),
    Example(
        "<|channel|>analysis<|message|>hmm<|end|><|start|>assistant to=functions.get_x",
        reasoning="hmm",
        content="assistant to=functions.get_x",
        tools=("get", "get_wind"),
        malformed=True,
    ),
    *(
        Example(header)
        for header in ("<|channel|>", "<|channel|>analysis", " <|channel|>commentary to=functions.f", "<|start|>assistant", "<|constrain|>js")
    ),
    Example("assistant", content="assistant", malformed=True),
    Example("<|channel|>analysis<|message|>hmm<|end|><|start|>assistant sunny", reasoning="hmm", content="assistant sunny", malformed=True),
    Example("<|channel|>final<|message|>sunny<|end|><|start|>assistant to=functions.Rome", content="sunny\nassistant to=functions.Rome", malformed=True),
    Example(
        "<|channel|>commentary to=browser.search<|message|>Rome<|end|>",
        content="<|channel|>commentary to=browser.search<|message|>Rome",
        malformed=True,
    ),
    Example(
        "<|channel|>commentary to=functions.f<|message|>Rome<|call|>",
        content="<|channel|>commentary to=functions.f<|message|>Rome",
        malformed=True,
    ),
    Example("<|channel|>commentary to=functions.f <|constrain|>json<|message|><|call|>", calls=(("f", {}),)),
    Example(
        "<|channel|>commentary to=functions.f<|message|>\n<|end|><|start|>assistant<|channel|>commentary to=functions.g"
        "<|message|><|start|>assistant to=functions.f<|channel|>commentary<|message|>{}<|start|>assistant<|channel|>final<|message|>sunny",
        content="sunny",
        calls=(("f", {}), ("g", {}), ("f", {})),
    ),
    Example(" to=functions.f<|message|>", content=" to=functions.f<|message|>", malformed=True),
    Example("<|channel|><|message|>Rome<|end|>", content="<|channel|><|message|>Rome", malformed=True),
    Example('<|channel|>commentary to=functions.f<|message|>{"city": Rome}<|call|>', content="Rome}", calls=(("f", '{"city": '),), malformed=True),
    Example(
        "<|channel|>commentary to=functions.f<|message|>{}",
        content="<|channel|>commentary to=functions.f<|message|>{}",
        tools=(),
        malformed=True,
    ),
    Example("<|channel|>analysis<|message|>hmm<|channel|>final", reasoning="hmm<|channel|>final"),
)  # fmt: skip

RESPONSE = Templates(
    response={
        "start_anchor": "[assistant]",
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "content": {},
            "tool_calls": {
                "open": "<call>",
                "close": "</call>",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    }
)
RESPONSE_EXAMPLES = (
    Example("It is sunny.", content="It is sunny."),
    Example("<think> hmm </think>\n\nsunny", reasoning="hmm", content="sunny"),
    Example("hmm</think>sunny", prompt="[assistant]<think>", reasoning="hmm", content="sunny"),
    Example('Let me see. <call>{"name": "f", "arguments": {"city": "Rome"}}</call>', content="Let me see.", calls=(("f", ROME),)),
    Example('<call>{"name": "f", "arguments": {}}</call><call>{"name": "g", "arguments": {}}</call>', calls=(("f", {}), ("g", {}))),
    Example("<call>f(Rome)</call> sunny", content="<call>f(Rome)</call>sunny", malformed=True),
    Example('<call>{"name": "f"}</call>', content='<call>{"name": "f"}</call>', malformed=True),
    Example('<call>{"name": "f", "argum', content='<call>{"name": "f", "argum', malformed=True),
    Example('<call>{"name": "f", "arguments": {}}</call>', content='<call>{"name": "f", "arguments": {}}</call>', tools=()),
)  # fmt: skip

THINK = Templates(chat="{{ '<think>' + reasoning + '</think>' + content }}")
THINK_EXAMPLES = (
    Example("It is sunny.", content="It is sunny."),
    Example("<think>hmm</think>\n\nsunny", reasoning="hmm", content="sunny"),
    Example("\n<think>hmm", reasoning="hmm"),
    Example("use <think> sunny", content="use <think> sunny"),
    Example('hmm</think><tool_call>{"name": "f"}', prompt="<think>", reasoning="hmm", content='<tool_call>{"name": "f"}'),
)  # fmt: skip

NONE_EXAMPLES = (Example("<think>hmm</think> sunny", content="<think>hmm</think> sunny"), Example(""))
