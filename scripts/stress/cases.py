"""A hostile request, and what a server may answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from wire import POLITE, Answer, Manners, Part, Target

MAX_ERROR = 4096
"""Maximum bytes of an error's body: a sentence and a line of what was sent, not all of it."""


@dataclass(frozen=True)
class Case:
    """One request and its expected answer."""

    name: str
    parts: tuple[Part, ...]
    expect: str = "refused"
    """refused: 4xx; ok: 200; any: 2xx, 3xx or 4xx; nothing: the client does not look."""
    closes: bool = False
    """Whether the server may also close the connection without an answer."""
    waits: bool = False
    """Whether the server may also wait for more than was sent."""
    manners: Manners = field(default=POLITE)
    timeout: float = 30.0
    head_only: bool = False

    def fault(self, answer: Answer) -> str:
        """What is wrong with the answer; empty when nothing is."""
        if self.expect == "nothing":
            return ""
        if answer.status <= 0:
            return "" if (self.closes if answer.status == 0 else self.waits) else str(answer)
        if answer.status == 503 and b'"code"' in answer.body and b'"engine_failed"' not in answer.body:
            return ""  # deliberate: overloaded, or shutting down
        wanted = {"refused": range(400, 500), "ok": range(200, 201), "any": range(200, 500)}[self.expect]
        if answer.status not in wanted:
            return f"expected {self.expect}: {answer}"
        if answer.status >= 400 and not self.head_only:
            return _error_fault(answer)
        return ""


def _error_fault(answer: Answer) -> str:
    """What is wrong with the body of an error; empty when nothing is."""
    if len(answer.body) > MAX_ERROR:
        return f"an error of {len(answer.body)} bytes echoes what was sent: {answer}"
    try:
        error = answer.json()["error"]
        message, kind = error["message"], error["type"]
    except (ValueError, KeyError, TypeError):
        return f"the error is not in OpenAI's shape: {answer}"
    return "" if isinstance(message, str) and message and isinstance(kind, str) else f"an error without words: {answer}"


Maker = Callable[[Target, random.Random], Case]


def cases(makers: Sequence[Maker], target: Target, count: int, seed: int) -> Iterator[Case]:
    """That many cases: each maker in turn, with random details that follow from the seed."""
    draw = random.Random(seed)
    for maker, _ in zip(cycle(makers), range(count), strict=False):
        yield maker(target, draw)
