"""Output parsers: the contract, and what helps to write one."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.parsers.base import (
        API as API,
        CallArguments as CallArguments,
        CallBegin as CallBegin,
        CallEnd as CallEnd,
        Content as Content,
        Event as Event,
        Malformed as Malformed,
        OutputRules as OutputRules,
        Parser as Parser,
        Parsing as Parsing,
        Reasoning as Reasoning,
        Templates as Templates,
        ToolChoice as ToolChoice,
        tool_names as tool_names,
    )
    from engine.core.parsers.call_reader import (
        Found as Found,
        read_arguments as read_arguments,
        read_call as read_call,
    )
    from engine.core.parsers.chat_templates import (
        EFFORT as EFFORT,
        reasoning_switch as reasoning_switch,
        template_variables as template_variables,
    )
    from engine.core.parsers.custom_tools import CustomInput as CustomInput, custom_parameters as custom_parameters
    from engine.core.parsers.json_scanner import JsonScanner as JsonScanner
    from engine.core.parsers.output_formats import (
        CallFormat as CallFormat,
        Format as Format,
        answer_format as answer_format,
        any_text as any_text,
        call_arguments as call_arguments,
        const_string as const_string,
        content_format as content_format,
        either as either,
        json_string as json_string,
        optional as optional,
        regex as regex,
        sequence as sequence,
        star as star,
        structural_tag as structural_tag,
        tag as tag,
    )
    from engine.core.parsers.sequential import (
        SequentialParsing as SequentialParsing,
        Source as Source,
        Steps as Steps,
    )

__getattr__, __dir__, __all__ = exports(
    __name__,
    base=(
        "API",
        "CallArguments",
        "CallBegin",
        "CallEnd",
        "Content",
        "Event",
        "Malformed",
        "OutputRules",
        "Parser",
        "Parsing",
        "Reasoning",
        "Templates",
        "ToolChoice",
        "tool_names",
    ),
    call_reader=(
        "Found",
        "read_arguments",
        "read_call",
    ),
    custom_tools=("CustomInput", "custom_parameters"),
    json_scanner=("JsonScanner",),
    output_formats=(
        "CallFormat",
        "Format",
        "answer_format",
        "any_text",
        "call_arguments",
        "const_string",
        "content_format",
        "either",
        "json_string",
        "optional",
        "regex",
        "sequence",
        "star",
        "structural_tag",
        "tag",
    ),
    sequential=(
        "SequentialParsing",
        "Source",
        "Steps",
    ),
    chat_templates=("EFFORT", "reasoning_switch", "template_variables"),
)
