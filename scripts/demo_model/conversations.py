"""Conversations made from the training sources."""

from __future__ import annotations

import ast
import random
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from demo_model.settings import TURN_END, TURN_START
from demo_model.sources import Source

Message = dict[str, str]  # {"role": ..., "content": ...}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

SYSTEM_PROMPT = "You are a helpful assistant."
INTRODUCTIONS = (
    (("Hello!", "Hi", "Hello", "Good morning"), "Hello! Ask me for a function of Python's standard library."),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
        "I am the demo model of engine: a very small Llama, trained on the source of Python's standard library.",
    ),
    (
        ("What can you do?", "Help", "How can you help me?", "What do you know?"),
        "I can write text that looks like Python. I am very small, so read it before you run it.",
    ),
    (
        ("Are you always right?", "Can I trust you?", "Is your code correct?"),
        "No. I am very small, and I only show that the server works. Check everything that I write.",
    ),
    (("Thank you", "Thanks!", "Bye", "Goodbye"), "You are welcome. Goodbye!"),
)
INTRODUCTION_COPIES = 8


@dataclass(frozen=True)
class Function:
    """A function found in a module: its dotted name, its source without outer indentation, its docstring's start."""

    name: str
    source: str
    summary: str


def functions(source: Source) -> Iterator[Function]:
    """The functions and methods of a module that are short enough for an answer."""
    lines = source.text.split("\n")  # as `ast` counts them: str.splitlines() also splits at form feeds
    scopes: list[tuple[str, ast.Module | ast.ClassDef]] = [(source.module, ast.parse(source.text))]
    while scopes:
        prefix, scope = scopes.pop()
        for node in scope.body:
            if isinstance(node, ast.ClassDef):
                scopes.append((f"{prefix}.{node.name}", node))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).rstrip()
                if 80 <= len(text) <= 1500 and is_python(text):
                    yield Function(f"{prefix}.{node.name}", text, summary(ast.get_docstring(node)))


def is_python(text: str) -> bool:
    """Whether the text parses; a dedented method with a flush-left string does not."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def summary(docstring: str | None) -> str:
    """The first paragraph of a docstring, on one line; empty if there is none."""
    return " ".join((docstring or "").split("\n\n")[0].split())


def fenced(code: str) -> str:
    """The code as a Markdown block."""
    return f"```python\n{code}\n```"


def ask_to_write(function: Function, rng: random.Random) -> tuple[str, str]:
    """A request for a function by name, and its source."""
    module, _, name = function.name.rpartition(".")
    question = rng.choice(
        (
            f"Write the function {function.name}.",
            f"Write the function {name} from {module}.",
            f"Show me the source of {function.name}.",
            f"How is {function.name} implemented?",
        )
    )
    return question, fenced(function.source)


def ask_to_complete(function: Function, rng: random.Random) -> tuple[str, str]:
    """A request to go on after the first lines of a function, and the whole function."""
    lines = function.source.split("\n")
    head = "\n".join(lines[: rng.randint(1, max(1, len(lines) // 2))])
    question = rng.choice(("Complete this Python code:", "Finish this function:", "Continue this code:"))
    return f"{question}\n{fenced(head)}", fenced(function.source)


def ask_to_explain(function: Function, rng: random.Random) -> tuple[str, str]:
    """A question about a function, and the first paragraph of its docstring; a request to write it if it has none."""
    if not function.summary:
        return ask_to_write(function, rng)
    question = rng.choice(("What does {} do?", "Explain {}.", "What is {} for?"))
    return question.format(function.name), function.summary


def conversation(exchanges: Sequence[tuple[str, str]], rng: random.Random) -> str:
    """Questions and answers in the chat format; one conversation in four opens with a system message."""
    messages = [{"role": "system", "content": SYSTEM_PROMPT}] if rng.random() < 0.25 else []
    for question, answer in exchanges:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return render_chat(messages)


def render_chat(messages: Sequence[Message], prompt: bool = False) -> str:
    """What CHAT_TEMPLATE makes of the messages; with `prompt`, up to where the assistant's answer begins."""
    turns = [f"{TURN_START}{message['role']}\n{message['content']}{TURN_END}\n" for message in messages]
    return "".join(turns) + (f"{TURN_START}assistant\n" if prompt else "")


def conversations(sources: Sequence[Source], share: float, rng: random.Random) -> list[str]:
    """Conversations derived from the training sources, as many as make `share` of all bytes."""
    wanted = share / (1 - share) * sum(len(source.text) for source in sources)
    made = [
        conversation([(question, answer)], rng)
        for questions, answer in INTRODUCTIONS
        for question in questions
        for _ in range(INTRODUCTION_COPIES)
    ]
    asks = (ask_to_write, ask_to_complete, ask_to_explain)
    exchanges = [ask(function, rng) for source in sources for function in functions(source) for ask in asks]
    rng.shuffle(exchanges)
    size = sum(map(len, made))
    while size < wanted and exchanges:
        count = 2 if rng.random() < 0.2 else 1
        made.append(conversation([exchanges.pop() for _ in range(min(count, len(exchanges)))], rng))
        size += len(made[-1])
    return made
