"""gpt-oss: harmony, messages that each have a channel and perhaps a recipient.

openai-harmony, the reference, is not used: it downloads its vocabulary when it is first used, works on tokens, which
front ends have turned into text, and raises where a header is malformed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from engine.core.grammars import Grammar
from engine.core.parsers import (
    CallBegin,
    Content,
    Event,
    Found,
    Malformed,
    OutputRules,
    Parser,
    Parsing,
    Reasoning,
    SequentialParsing,
    Steps,
    Templates,
    any_text,
    call_arguments,
    const_string,
    content_format,
    either,
    optional,
    read_arguments,
    sequence,
    star,
    structural_tag,
    tag,
    tool_names,
)

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
ENDS = (END, RETURN, CALL, START)
"""Marks that end a message's text; a message may also begin without an end mark before it."""
FUNCTIONS = "functions."
"""Begins the recipient of a call."""
BEGINNINGS = (START, CHANNEL, MESSAGE, CONSTRAIN, "assistant", "to=")
"""A header begins with one of these."""
HEADER_CHARS = 512
"""Maximum length of a message's header."""
CHANNELS = ("analysis", "commentary", "final")
CONTENT_TYPES = ("json", "code")
"""Types of a message's text that a header may name."""
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
SEPARATOR = "\n"
"""Between the texts of two messages that become one, as two of reasoning."""


class GptOss(Parser[None]):
    """Reasoning in the channel analysis, calls to a recipient, everything else is content."""

    api = "1"
    special_tokens = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)
    describes_format = True

    @classmethod
    def recognizes(cls, templates: Templates) -> bool:
        return CHANNEL in templates.chat and MESSAGE in templates.chat

    def begin(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> Parsing:
        return _HarmonyParsing(tool_names(tools))

    def grammar(self, rules: OutputRules) -> Grammar | None:
        """Messages of reasoning, then one that ends the output: a call, or the answer.

        The mark that ends a call ends the output, so there is one call at most, whatever `rules` allow.
        """
        if not rules.restricts_calls and rules.content is None:
            return None
        free = any_text((START, CHANNEL, MESSAGE, END, RETURN, CALL))
        before = [tag(f"{CHANNEL}analysis{MESSAGE}", free, f"{END}{START}assistant")]
        content = content_format(rules)
        if content is None and not rules.choice.forced:
            before.append(tag(f"{CHANNEL}commentary{MESSAGE}", free, f"{END}{START}assistant"))
        as_json = [const_string(f" {CONSTRAIN}json"), const_string(" json")]
        last = [
            tag(
                f"{CHANNEL}commentary to={FUNCTIONS}{tool['function']['name']}",
                sequence(
                    optional(either(*as_json)),
                    const_string(MESSAGE),
                    call_arguments(rules, tool),
                ),
                CALL,
            )
            for tool in rules.callable_tools
        ]
        if not rules.choice.forced:
            last.append(sequence(const_string(f"{CHANNEL}final{MESSAGE}"), free if content is None else content))
        return structural_tag(sequence(star(either(*before)), either(*last)))

    def template_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Reasoning is called `thinking`. With calls, the template takes either that or content: they are joined."""
        changed = dict(message)
        reasoning = changed.pop("reasoning_content", None)
        if "tool_calls" in changed and reasoning and changed["content"]:
            reasoning, changed["content"] = f"{reasoning}\n\n{changed['content']}", ""
        return changed | {"thinking": reasoning} if reasoning else changed


@frozen
class _Header:
    """The header of a message."""

    channel: str
    recipient: str
    unknown: tuple[str, ...]
    """Words that mean nothing here, such as another role than the assistant's."""

    @classmethod
    def of(cls, text: str) -> _Header:
        """Read what stands before the text of a message; the recipient may stand before or after the channel."""
        before, _, after = text.partition(CHANNEL)
        recipient = RECIPIENT.search(text)
        role = before.replace(START, " ").replace(CONSTRAIN, " ").split()
        channel, *others = after.replace(CONSTRAIN, " ").split() or [""]
        known = {"assistant", *CONTENT_TYPES, f"to={recipient[1]}" if recipient else ""}
        unknown = tuple(word for word in (*role, *others) if word not in known)
        return cls(channel, recipient[1] if recipient else "", unknown)


class _HarmonyParsing(SequentialParsing):
    """One output in this format. The prompt ends within the header of its first message."""

    def __init__(self, tools: frozenset[str]) -> None:
        super().__init__()
        self._tools = tools
        self._reasoning = False
        self._kind: type[Reasoning | Content] = Content
        """What the text of this message is."""
        self._begun: set[type[Reasoning | Content]] = set()
        """Kinds of text that there have been."""
        self._separate = False
        """Whether the next text comes after that of another message."""
        self._ended = False
        """Whether a message has ended."""

    @property
    def reasoning(self) -> bool:
        return self._reasoning

    def read(self) -> Steps[None]:
        while (yield from self.source.character()):
            yield from self._message()

    def _message(self) -> Steps[None]:
        """Read a message up to its end mark."""
        begins = yield from self._begins()
        found = (yield from self.source.find((MESSAGE,), HEADER_CHARS)) if begins else None
        if found is None:
            if self._is_cut_header():
                self.source.take(len(self.source.unread))
                return
            if begins:
                yield Malformed("a message has no text mark; it is content")
            self._begin(Content)
            yield from self._rest()
            return
        header = _Header.of(self.source.unread[: found[0]])
        if header.recipient:
            name = header.recipient.removeprefix(FUNCTIONS)
            if self._tools and (name != header.recipient or name in self._tools):
                yield from self._call(CallBegin(name), found[0] + len(MESSAGE))
                return
            problem = f"a message is for {header.recipient[:64]!r}, which is none of the tools"
        elif header.channel not in CHANNELS:
            problem = f"a message has the channel {header.channel[:64]!r}, which is unknown"
        elif header.unknown:
            problem = f"the header of a message has {header.unknown[0][:64]!r}, which is unknown"
        else:
            problem = ""
        text = self.source.take(found[0] + len(MESSAGE))
        self._begin(Reasoning if header.channel == "analysis" else Content)
        if problem:
            yield Malformed(f"{problem}; the header is {'reasoning' if self._reasoning else 'content'}")
            yield from self._text(text)
        yield from self._rest()

    def _is_cut_header(self) -> bool:
        """Whether the output ends within what can only be a header."""
        rest = self.source.unread.lstrip()
        if not self.source.ended or len(rest) > HEADER_CHARS:
            return False
        if not (self._ended or rest.startswith((START, CHANNEL, CONSTRAIN))):
            return False
        recipients = [f"to={prefix}{name}" for name in self._tools for prefix in ("", FUNCTIONS)]
        parts = (START, CHANNEL, MESSAGE, CONSTRAIN, "assistant", *CHANNELS, *CONTENT_TYPES, *recipients)
        by_length = sorted(parts, key=len, reverse=True)
        while not any(part.startswith(rest) for part in parts):  # before a part is removed: "get" begins "get_weather"
            part = next(filter(rest.startswith, by_length), "")
            if not part:
                return False
            rest = rest.removeprefix(part).lstrip()
        return True

    def _call(self, begin: CallBegin, at: int) -> Steps[None]:
        """Read the arguments of a call, from position `at` on, and the end of its message."""
        self._reasoning = False
        found = yield from read_arguments(self.source, begin, at, ENDS)
        self._begin(Content)
        if found is Found.NOTHING:
            yield Malformed(f"the call of {begin.name[:64]!r} has no arguments in JSON; it is content")
            yield from self._text(self.source.take(at))
            yield from self._rest()
            return
        at = yield from self.source.skip_space()
        if (mark := (yield from self.source.starts_with_one(ENDS, at))) is not None:
            self.source.take(at + len(mark))
            self._ended = True
            return
        if found is Found.CALL and not (yield from self.source.character(at)):
            self.source.take(at)
            return
        if found is Found.CALL:
            yield Malformed("text follows the arguments of a tool call; it is content")
        yield from self._rest()

    def _begins(self) -> Steps[bool]:
        """Whether the text goes on with what may be a header."""
        at = yield from self.source.skip_space()
        return (yield from self.source.starts_with_one(BEGINNINGS, at)) is not None

    def _begin(self, kind: type[Reasoning | Content]) -> None:
        """Begin a message whose text is of a kind."""
        self._kind, self._reasoning = kind, kind is Reasoning
        self._separate = kind in self._begun

    def _rest(self) -> Steps[None]:
        """Read the text of a message and its end mark."""
        yield from self.source.text_until(ENDS, self._text)
        self._reasoning, self._ended = False, True

    def _text(self, text: str) -> list[Event]:
        if not text:
            return []
        self._begun.add(self._kind)
        if self._separate:
            self._separate = False
            text = SEPARATOR + text
        return [self._kind(text)]
