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
        Parser as Parser,
        Parsing as Parsing,
        Reasoning as Reasoning,
        Templates as Templates,
        tool_names as tool_names,
    )
    from engine.core.parsers.call_reader import (
        Found as Found,
        read_arguments as read_arguments,
        read_call as read_call,
    )
    from engine.core.parsers.json_scanner import JsonScanner as JsonScanner
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
        "Parser",
        "Parsing",
        "Reasoning",
        "Templates",
        "tool_names",
    ),
    call_reader=(
        "Found",
        "read_arguments",
        "read_call",
    ),
    json_scanner=("JsonScanner",),
    sequential=(
        "SequentialParsing",
        "Source",
        "Steps",
    ),
)
