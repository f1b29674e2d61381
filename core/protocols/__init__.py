"""Conversation protocols of the HTTP server: what a plugin that adds one builds on.

A protocol, such as /v1/responses, is three things:

1. It decodes its own body, a msgspec.Struct, and refuses what it cannot honour with an ApiError.
2. It builds a `Conversation`: messages as chat templates expect them, functions, sampling parameters by the engine's
   names, and `ParameterNames`, so that refusals name the parameters of the protocol.
3. It writes the answer with an `AnswerWriter` of its own, which receives `Delta`s. `delta.said` are the parser's events
   of a choice (engine.core.parsers): Reasoning, Content, CallBegin, CallArguments, CallEnd and Malformed;
   `delta.logprobs` the log probabilities of its tokens; `delta.finish_reason` is set with the last one. `Usage` has
   the token counts.

The hook `register_routes` gives the plugin `Routes`, whose `respond` does everything in between: checks, the chat
template, tokens, grammar and parser, generation, and sending the answer.
"""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.protocols.answer import (
        DONE as DONE,
        KEEP_ALIVE as KEEP_ALIVE,
        AnswerWriter as AnswerWriter,
        Delta as Delta,
        Template as Template,
        Usage as Usage,
        error_event as error_event,
        sse_event as sse_event,
    )
    from engine.core.protocols.broken_calls import (
        breaks_call as breaks_call,
        broken_call as broken_call,
        call_text as call_text,
    )
    from engine.core.protocols.conversation import (
        Conversation as Conversation,
        FunctionTool as FunctionTool,
        ParameterNames as ParameterNames,
        ToolChoice as ToolChoice,
        complete_arguments as complete_arguments,
        template_arguments as template_arguments,
    )
    from engine.core.protocols.decode import (
        convert as convert,
        explain as explain,
        has_unknown_field as has_unknown_field,
        invalid as invalid,
        without_unknown_nulls as without_unknown_nulls,
    )
    from engine.core.protocols.errors import (
        ECHO_CHARS as ECHO_CHARS,
        MAX_MESSAGE as MAX_MESSAGE,
        ApiError as ApiError,
        excerpt as excerpt,
    )
    from engine.core.protocols.json_values import (
        NUMBERS_PER_VALUE as NUMBERS_PER_VALUE,
        have_more_values as have_more_values,
        json_size as json_size,
        surely_fits as surely_fits,
        value_counts as value_counts,
    )
    from engine.core.protocols.partial_json import completing as completing
    from engine.core.protocols.routes import API as API, Call as Call, Reply as Reply, Routes as Routes

__getattr__, __dir__, __all__ = exports(
    __name__,
    answer=("DONE", "KEEP_ALIVE", "AnswerWriter", "Delta", "Template", "Usage", "error_event", "sse_event"),
    broken_calls=("breaks_call", "broken_call", "call_text"),
    conversation=(
        "Conversation",
        "FunctionTool",
        "ParameterNames",
        "ToolChoice",
        "complete_arguments",
        "template_arguments",
    ),
    decode=("convert", "explain", "has_unknown_field", "invalid", "without_unknown_nulls"),
    errors=("ECHO_CHARS", "MAX_MESSAGE", "ApiError", "excerpt"),
    json_values=("NUMBERS_PER_VALUE", "have_more_values", "json_size", "surely_fits", "value_counts"),
    partial_json=("completing",),
    routes=("API", "Call", "Reply", "Routes"),
)
