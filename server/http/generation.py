"""Runs the choices of one HTTP request: turns the engine's outputs into text and events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType

import msgspec
from attrs import define

from engine.core.parsers import Content, Event, Reasoning
from engine.core.protocols import Delta, Template, Usage
from engine.core.text import Detokenizer, Tokenizer
from engine.core.types import FINISH_ERROR, FINISH_STOP, Output, Request
from engine.server.front_end.engine_client import EngineClient
from engine.server.front_end.errors import ApiError
from engine.server.front_end.request_group import OutputEvent, RequestGroup
from engine.server.front_end.request_trace import GenerationTrace
from engine.server.http.parsed_output import OutputFormat, ParsedOutput
from engine.server.http.parser_faults import parser_faults

SLICE_SECONDS = 0.005
"""Seconds of work on one request after which other streams get their turns."""

_json = msgspec.json.Encoder().encode


BuildEvents = Callable[[Delta], Iterator[bytes]]
"""Builds the events of a delta, one at a time."""


class Templates(dict[int, Template]):
    """The template of each choice, made when the choice has its first event."""

    def __init__(self, text_event: Callable[[int, str], bytes]) -> None:
        """text_event: builds the event of a choice for a text."""
        self._text_event = text_event

    def __missing__(self, choice: int) -> Template:
        template = self[choice] = Template.of(partial(self._text_event, choice))
        return template


class Generation:
    """Runs requests and detokenizes their outputs. Leaving the `with` block aborts the choices still running.

    When a client disconnects, `CancellableResponse` (responses.py) cancels the task that is in the block: the front end
    sends an Abort message, and in the engine process `Scheduler.abort` frees the blocks.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        requests: Sequence[Request],
        choices_per_prompt: int,
        output_format: OutputFormat | None = None,
        grammar_parameter: str | None = None,
    ) -> None:
        """requests: one per prompt, in order. output_format: how outputs are parsed; None: they are not.
        grammar_parameter: the parameter that asks for the grammar, for refusals.
        """
        self._grammar_parameter = grammar_parameter
        self._client = client
        self._format = output_format
        self._parsed: dict[int, ParsedOutput] = {}
        """The outputs that are parsed, of the choices that have outputs."""
        self._begun: set[tuple[int, type[Event]]] = set()
        """(choice, class of event) already streamed: further text of that class can use its template."""
        self._requests = requests
        self._tokenizer = tokenizer
        self._detokenizers: dict[int, Detokenizer] = {}
        """The detokenizers of the choices that have outputs."""
        self._unparsed: dict[int, Detokenizer] = {}
        """The detokenizers of the choices whose outputs are not parsed."""
        self._choices_per_prompt = choices_per_prompt
        self.running = set(range(len(requests) * choices_per_prompt))
        """Choices that have not finished."""
        self._group: RequestGroup | None = None
        self._backlog: list[OutputEvent] = []
        """Events taken from the group and not yet built."""
        self._unbuilt: Iterator[bytes] | None = None
        """The events of a delta that is being built."""
        self._failure: Exception | None = None
        """Raised by the next call of `events`, since an earlier one returned what was built before the failure."""
        self._prompt_tokens = sum(len(request.prompt) for request in requests)
        self._cached_tokens = 0
        predicted = any(request.prediction for request in requests)
        self._predictions = dict.fromkeys(self.running, (0, 0)) if predicted else None
        """Output.prediction_tokens of each choice; None: no output is predicted."""
        self.trace: GenerationTrace | None = None
        """Where times and counts are recorded; None: the request is not traced."""

    def __enter__(self) -> Generation:
        submit = self._client.phases.timed("route", self._client.submit)
        self._group = submit(self._requests, self._choices_per_prompt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._group is not None
        self._group.__exit__(kind, error, trace)
        if self.trace is not None:
            self.trace.end({choice: one.num_tokens for choice, one in self._detokenizers.items()})

    @property
    def finished(self) -> bool:
        """Whether all choices have finished and, of a stream, all events are built."""
        return not self.running and not self.behind

    @property
    def behind(self) -> bool:
        """Whether `events` stopped early, to let other streams go on or at a failure, and must be called again."""
        return self._unbuilt is not None or self._failure is not None

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        completion_tokens = sum(detokenizer.num_tokens for detokenizer in self._detokenizers.values())
        reasoning = None if self._format is None else sum(one.reasoning_tokens for one in self._parsed.values())
        prediction = None
        if self._predictions is not None:
            counts = self._predictions.values()
            prediction = (sum(accepted for accepted, _ in counts), sum(rejected for _, rejected in counts))
        return Usage(self._prompt_tokens, completion_tokens, self._cached_tokens, reasoning, prediction)

    async def next(self) -> list[Delta]:
        """Wait for outputs; at most one delta per choice. Raises ApiError when a choice failed."""
        assert self._group is not None
        events = await self._group.next()
        return self._client.phases.timed("detokenize", self._deltas)(events)

    def _deltas(self, events: Sequence[OutputEvent]) -> list[Delta]:
        """Detokenize events; at most one delta per choice."""
        deltas: dict[int, Delta] = {}
        for event in events:
            choice = event[0]
            if choice in self.running:
                self._feed(event, deltas.setdefault(choice, Delta(choice)))
        return list(deltas.values())

    def fail(self, error: ApiError) -> None:
        """End the choices still running with `error`."""
        if self._group is not None:
            self._client.fail(error, self._group)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener`, which must not raise, whenever there are outputs for `events`."""
        assert self._group is not None
        self._group.listen(listener)

    def write_later(self, write: Callable[[bytes], None], data: bytes) -> None:
        """Call `write(data)` after all listeners have been called; see EngineClient.write_later."""
        self._client.write_later(write, data)

    def events(
        self,
        templates: Mapping[int, Template] | None,
        build_events: BuildEvents,
        reasoning_templates: Mapping[int, Template] | None = None,
    ) -> bytes:
        """The new outputs as server-sent events, without waiting; stops after SLICE_SECONDS, see `behind`.

        templates: the event of each choice for plain text; None: `build_events` builds these too. build_events: builds
        the events of any other delta, such as the first or the last. reasoning_templates: as `templates`, for
        reasoning. Raises ApiError when a choice failed, after a call that has returned the events before the failure.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        data: list[bytes] = []
        try:
            self._append_events(data, templates, build_events, reasoning_templates)
        except Exception as error:
            if not data:
                raise
            self._failure = error
        return b"".join(data)

    def _append_events(
        self,
        data: list[bytes],
        templates: Mapping[int, Template] | None,
        build_events: BuildEvents,
        reasoning_templates: Mapping[int, Template] | None,
    ) -> None:
        """Append the new events to `data`; see `events`."""
        assert self._group is not None
        deadline = 0.0
        if self._unbuilt is not None:
            deadline = time.monotonic() + SLICE_SECONDS
            if not self._build(data, deadline):
                return
        taken = self._group.take()  # all: the group reports only the first event after a take
        events = iter([*self._backlog, *taken] if self._backlog else taken)
        self._backlog = []
        for event in events:
            choice, tokens, output = event
            if choice not in self.running:
                continue
            if output is None and templates is not None and choice in self._unparsed:
                detokenizer = self._unparsed[choice]
                text = detokenizer.push(tokens)
                if detokenizer.stop_string is not None:
                    last = Delta(choice, text, finish_reason=self._stop(choice), stop_string=detokenizer.stop_string)
                    data += build_events(last)
                elif text:
                    template = templates[choice]
                    data += (template.before, _json(text), template.after)
            else:
                delta = Delta(choice)
                self._feed(event, delta)
                if output is None and (further := self._further_text(delta)) is not None:
                    kind, text = further
                    of_kind = templates if kind is Content else reasoning_templates
                    if of_kind is not None:
                        template = of_kind[choice]
                        data += (template.before, _json(text), template.after)
                        continue
                self._unbuilt = build_events(delta)
                deadline = deadline or time.monotonic() + SLICE_SECONDS
                if not self._build(data, deadline):
                    self._backlog = list(events)

    def _build(self, data: list[bytes], deadline: float) -> bool:
        """Append unbuilt events to `data` until `deadline`; return whether all are built."""
        assert self._unbuilt is not None
        for event in self._unbuilt:
            data.append(event)
            if time.monotonic() > deadline:
                return False
        self._unbuilt = None
        return True

    def _further_text(self, delta: Delta) -> tuple[type[Event], str] | None:
        """The class and text of a parsed delta that is nothing but further content, or reasoning; else None."""
        events = delta.events
        if not events:
            return None
        kinds = {(delta.choice, type(event)) for event in events}
        is_new = not kinds <= self._begun
        self._begun |= kinds
        if is_new or len(kinds) > 1 or delta.finish_reason is not None:
            return None
        texts = [event.text for event in events if isinstance(event, (Content, Reasoning))]
        return (type(events[0]), "".join(texts)) if texts else None

    def _feed(self, event: OutputEvent, delta: Delta) -> None:
        """Detokenize an output and add its text to `delta`, or the events of a choice that is parsed."""
        choice, tokens, output = event
        if output is not None:
            self._feed_full(choice, output, delta)
        elif choice in self._unparsed:
            detokenizer = self._unparsed[choice]
            delta.text += detokenizer.push(tokens)
            if detokenizer.stop_string is not None:
                delta.finish_reason, delta.stop_string = self._stop(choice), detokenizer.stop_string
        else:
            parsed, detokenizer = self._parsed[choice], self._detokenizers[choice]
            delta.events = delta.events or []
            for token in tokens:  # one by one, so that tokens of reasoning are counted alike however they come
                delta.events += parsed.feed(detokenizer.push((token,)), 1)
                if detokenizer.stop_string is not None:
                    delta.finish_reason, delta.stop_string = self._stop(choice), detokenizer.stop_string
                    delta.events += parsed.end()
                elif parsed.ended:
                    delta.finish_reason = self._stop(choice)
                if delta.finish_reason is not None:
                    return

    def _feed_full(self, choice: int, output: Output, delta: Delta) -> None:
        detokenizer = self._detokenizers.get(choice)
        if output.finish_reason == FINISH_ERROR:
            if self.trace is not None:
                self.trace.end_choice(choice, FINISH_ERROR, output)
            raise ApiError(
                400 if output.refused else 500,
                output.error or "the engine failed this request",
                param=self._grammar_parameter if output.parameter == "grammar" else output.parameter,
            )
        if detokenizer is None:
            request = self._requests[choice // self._choices_per_prompt]
            keep = self._begin_parsing(choice)
            detokenizer = Detokenizer(self._tokenizer, request.prompt, request.params, keep)
            self._detokenizers[choice] = detokenizer
            if choice not in self._parsed:
                self._unparsed[choice] = detokenizer
            first = choice % self._choices_per_prompt == 0
            if first:
                self._cached_tokens += output.cached_tokens
            if self.trace is not None:
                self.trace.begin_choice(choice, output.times, output.cached_tokens, first)
        assert self._group is not None
        if choice in self._group.prompt_logprobs:
            delta.prompt_logprobs = self._group.prompt_logprobs.pop(choice)
        kept = 0
        # One by one if they are parsed, as in `_feed`.
        for part in _by_token(output) if choice in self._parsed and len(output.tokens) > 1 else (output,):
            kept += self._feed_part(choice, part, delta, output)
            if delta.finish_reason is not None:
                break
        if output.prediction_tokens is not None and self._predictions is not None:
            self._count_prediction(choice, output.prediction_tokens, kept)

    def _feed_part(self, choice: int, part: Output, delta: Delta, output: Output) -> int:
        """Add a part of an output to `delta`; return the number of tokens that are in the answer."""
        piece = self._detokenizers[choice].feed(part)
        delta.text += piece.text
        delta.offsets += piece.offsets
        delta.logprobs += piece.logprobs
        delta.finish_reason, delta.stop_string = piece.finish_reason, piece.stop_string
        if piece.finish_reason is not None:
            self._end(choice, piece.finish_reason, output)
        if (parsed := self._parsed.get(choice)) is not None:
            delta.events = delta.events or []
            delta.spans.append((len(delta.events), list(piece.logprobs)))
            delta.events += parsed.feed(piece.text, len(piece.tokens))
            if delta.finish_reason is not None:
                delta.events += parsed.end(by_model=delta.finish_reason == FINISH_STOP and delta.stop_string is None)
            elif parsed.ended:
                delta.finish_reason = FINISH_STOP
                self._end(choice, FINISH_STOP, output)
        return len(piece.tokens)

    def _count_prediction(self, choice: int, counts: tuple[int, int], kept: int) -> None:
        """Count the `prediction_tokens` of an output whose tokens after the first `kept` are behind a stop string.

        An output's accepted tokens come first; those behind the stop string count as rejected.
        """
        assert self._predictions is not None
        before = self._predictions[choice][0]
        accepted = before + min(counts[0] - before, kept)
        self._predictions[choice] = (accepted, sum(counts) - accepted)

    def _begin_parsing(self, choice: int) -> frozenset[int]:
        """Begin to parse a choice's output, if outputs are parsed; return the special tokens that stay in its text."""
        if self._format is None:
            return frozenset()
        with parser_faults(self._format.owner, "begin"):
            parsing = self._format.begin()
        if parsing is None:
            return frozenset()
        self._parsed[choice] = ParsedOutput(parsing, one_call=self._format.one_call, owner=self._format.owner)
        return self._format.keep

    def _end(self, choice: int, reason: str, output: Output) -> None:
        """End a choice with `output`, and abort it in the engine unless the engine has ended it."""
        if output.finish_reason is None:
            self._stop(choice)
            return
        self.running.discard(choice)
        if self.trace is not None:
            self.trace.end_choice(choice, reason, output)

    def _stop(self, choice: int) -> str:
        """End a choice at a stop string or after its only call, and abort it in the engine; the finish reason."""
        assert self._group is not None
        self.running.discard(choice)
        self._group.abort(choice, FINISH_STOP, self._detokenizers[choice].num_tokens)
        if self.trace is not None:
            self.trace.end_choice(choice, FINISH_STOP)
        return FINISH_STOP


def _by_token(output: Output) -> Iterator[Output]:
    """An output of several tokens as outputs of one token each; the last one has the rest of its fields."""
    for index in range(len(output.tokens) - 1):
        one = slice(index, index + 1)
        yield Output(request=output.request, tokens=output.tokens[one], logprobs=output.logprobs[one])
    yield msgspec.structs.replace(output, tokens=output.tokens[-1:], logprobs=output.logprobs[-1:])


@define
class EventStream:
    """A generation as server-sent events."""

    generation: Generation
    templates: Mapping[int, Template] | None
    """The event of each choice for plain text; None: all events are built."""
    build_events: BuildEvents
    """Builds the events of any other delta."""
    end_events: Callable[[Usage], bytes]
    """Builds the events after all choices have finished; may be empty."""
    reasoning_templates: Mapping[int, Template] | None = None
    """As `templates`, for reasoning."""

    def take(self) -> bytes:
        """The events of all new outputs, without waiting. Raises ApiError when a choice failed."""
        generation = self.generation
        data = generation.events(self.templates, self.build_events, self.reasoning_templates)
        return data + self.end_events(generation.usage) if generation.finished else data
