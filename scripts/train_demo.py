"""Train the demo checkpoint that the package ships: a 6 M parameter Llama that has read Python's standard library.

    python scripts/train_demo.py                     # train on the GPU, write demo/engine-demo
    python scripts/train_demo.py --smoke --out DIR   # the whole path in a few tiny steps, on the CPU
    python scripts/train_demo.py --evaluate DIR      # held-out perplexity of a checkpoint, as JSON

The data are the source files of the interpreter that runs this, so nothing is downloaded. The order of the file is the
order of the work: data, conversations, tokenizer, model, training, evaluation, checkpoint, model card.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import hashlib
import json
import math
import os
import pathlib
import platform
import random
import string
import sys
import sysconfig
import textwrap
import time
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matrix products need; read by CUDA

import safetensors.torch
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
CARD_TEMPLATE = REPOSITORY / "demo" / "MODEL_CARD.md.in"
SIZE_LIMIT = 13_000_000  # bytes of model.safetensors

END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
VOCABULARY = 4096

# Never trained on, nor shown to the tokenizer. Each of them exists, as one file, in Python 3.11 and later.
HELD_OUT = (
    "calendar", "cmd", "csv", "fnmatch", "fractions", "gettext", "graphlib", "heapq", "netrc", "plistlib", "pprint",
    "sched", "shlex", "textwrap", "timeit", "zipapp",
)  # fmt: skip
EXCLUDED_PACKAGES = {"encodings", "lib2to3", "pydoc_data", "turtledemo", "__phello__"}  # tables, and code for the eye
EXCLUDED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
EXCLUDED_FILES = {"html/entities.py", "__hello__.py", "this.py"}

EVALUATION_CONTEXT, EVALUATION_STRIDE = 1024, 512

MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GENERATION_CONFIG = {"eos_token_id": [0, 2], "pad_token_id": 0}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": MODEL_CONFIG["max_position_embeddings"],
    "eos_token": END_OF_TEXT,
    "pad_token": END_OF_TEXT,
    "clean_up_tokenization_spaces": False,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

PROMPTS = (
    "def fibonacci(n):\n",
    "import os\n\ndef walk_files(",
    "class Stack:\n    def __init__(self",
    "def read_lines(path):\n    with open(",
    "# Count the words of a text.\nfrom collections import ",
)
CHAT_PROMPTS = ("Write the function posixpath.basename.", "Who are you?")
SAMPLE_TOKENS = 96


def setting(default: Any, description: str) -> Any:
    """A field of Settings: its default, and the help text of its command-line option."""
    return field(default=default, metadata={"help": description})


@dataclass(frozen=True)
class Settings:
    """Everything that shapes a training run; each field is a command-line option."""

    seed: int = setting(0, "seed of the data order, the conversations and the weights")
    minutes: float = setting(8.0, "time limit of the whole run; steps are cut to fit once the speed is known")
    epochs: float = setting(32.0, "passes over the training tokens, unless --steps is given")
    steps: int = setting(0, "optimizer steps; 0: as many as --epochs asks for")
    batch: int = setting(16, "windows of --context tokens in a step")
    context: int = setting(1024, "tokens in a window; every fourth step has half as many windows of twice the length")
    learning_rate: float = setting(3e-3, "peak learning rate")
    weight_decay: float = setting(1.0, "weight decay of the matrices")
    dropout: float = setting(0.25, "dropout after the embedding and in front of each residual sum")
    warmup: float = setting(0.04, "share of the steps in which the learning rate rises")
    aligned: float = setting(0.25, "share of the windows that begin where a document begins")
    chat_share: float = setting(0.12, "share of the training bytes that are conversations")
    evaluations: int = setting(40, "held-out evaluations during training")
    evaluation_length: int = setting(0, "characters of the held-out text to evaluate on; 0: all")
    compile: bool = setting(False, "compile the model with torch.compile")


SMOKE = Settings(minutes=2.0, steps=8, batch=2, context=128, evaluations=2, evaluation_length=8000, learning_rate=1e-3)


# ---- data ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """One module of the standard library: its dotted name and its text."""

    module: str
    text: str


def standard_library() -> Iterator[Source]:
    """Every wanted module of this interpreter's standard library, held-out ones too, in order of path."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if is_wanted(relative):
            text = read_source(path)
            if text.strip():
                yield Source(module_name(relative), text)


def is_wanted(relative: pathlib.Path) -> bool:
    """Whether a path below the standard library's root is code of the library proper."""
    top = relative.parts[0].removesuffix(".py")
    return (
        top in sys.stdlib_module_names  # leaves out whatever a distributor or a build put beside the library
        and top not in EXCLUDED_PACKAGES
        and EXCLUDED_FOLDERS.isdisjoint(relative.parts)
        and not relative.name.startswith("test_")
        and relative.as_posix() not in EXCLUDED_FILES
    )


def read_source(path: pathlib.Path) -> str:
    """The text of a Python file, decoded as the file declares; empty if it cannot be."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""


def module_name(relative: pathlib.Path) -> str:
    """`xml/dom/minidom.py` -> `xml.dom.minidom`; a package's `__init__.py` bears the package's name."""
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def training_sources() -> list[Source]:
    """The modules to train on: all but the held-out ones, each text once."""
    seen: set[str] = set()
    kept = []
    for source in standard_library():
        if source.module not in HELD_OUT and source.text not in seen:
            seen.add(source.text)
            kept.append(source)
    return kept


def held_out_text() -> str:
    """The text of the held-out modules, in the order of their names.

    It is that of the running Python, so two releases give two texts. Raises FileNotFoundError if a module is missing.
    """
    found = {source.module: source.text for source in standard_library() if source.module in HELD_OUT}
    missing = sorted(set(HELD_OUT) - set(found))
    if missing:
        raise FileNotFoundError(f"this Python's standard library has no source file of {', '.join(missing)}")
    return "\n".join(found[name] for name in sorted(found))


def shared_passages(text: str, sources: Sequence[Source], lines: int = 5) -> float:
    """The share of `text`'s passages of so many non-blank lines that occur in the sources too: a check for leaks."""
    known = {passage for source in sources for passage in passages(source.text, lines)}
    found = [passage in known for passage in passages(text, lines)]
    return sum(found) / max(1, len(found))


def passages(text: str, lines: int) -> Iterator[str]:
    """Every run of so many successive non-blank lines, without their indentation."""
    kept = [line.strip() for line in text.split("\n") if line.strip()]
    for begin in range(len(kept) - lines + 1):
        yield "\n".join(kept[begin : begin + lines])


# ---- conversations ---------------------------------------------------------------------------------------------------

Message = dict[str, str]  # {"role": ..., "content": ...}

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


# ---- tokenizer -------------------------------------------------------------------------------------------------------

# Pieces within which byte pairs may merge. Indentation is a piece of its own, as is a run of line breaks, and no word
# takes a bracket or a dot along: so a prompt may end at a line break, after indentation or at an opening bracket, and
# is still cut up as the model has seen it.
PIECES = "|".join(
    (
        r"(?<![^\n])[ \t]+",  # indentation
        r" ?[\p{L}_]+",  # a word or an identifier
        r" ?\p{N}",  # one digit
        r" ?[^\s\p{L}\p{N}_]+",  # operators, brackets, quotes
        r"[\r\n]+",  # line breaks
        r"\s+(?!\S)",  # spaces, but for the one that belongs to the next piece
        r"\s+",
    )
)


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of VOCABULARY tokens; raises ValueError if the texts are too few for that many."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(f"the texts gave {tokenizer.get_vocab_size()} tokens, and {VOCABULARY} are wanted: add text")
    return tokenizer


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on, all documents one after the other (`tokens: [n]`), and where each begins (`starts`)."""

    tokens: Tensor
    starts: Tensor


def encode_documents(tokenizer: Tokenizer, documents: Sequence[str]) -> Corpus:
    """The documents in the order given, each closed by END_OF_TEXT."""
    tokens: list[int] = []
    starts = []
    for encoding in tokenizer.encode_batch(list(documents), add_special_tokens=False):
        starts.append(len(tokens))
        tokens += [*encoding.ids, SPECIAL_TOKENS.index(END_OF_TEXT)]
    return Corpus(torch.tensor(tokens), torch.tensor(starts))


# ---- model -----------------------------------------------------------------------------------------------------------


def build_model(dropout: float) -> LlamaForCausalLM:
    """A fresh model in float32, its residual branches scaled down with depth, with dropout while it trains."""
    config = LlamaConfig(**{**MODEL_CONFIG, "dtype": "float32"})  # its attention is SDPA unless one asks for another
    model = LlamaForCausalLM(config)
    branches = 2 * config.num_hidden_layers
    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            module.weight.data.mul_(branches**-0.5)
        if name.endswith(("o_proj", "down_proj", "embed_tokens")):
            module.register_forward_hook(functools.partial(drop_output, dropout))
    return model


def drop_output(probability: float, module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    """A forward hook: dropout on a module's output (Llama has none of its own but in attention)."""
    return F.dropout(output, probability, module.training)


def make_optimizer(model: nn.Module, settings: Settings, device: torch.device) -> torch.optim.Optimizer:
    """AdamW, with weight decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")


# ---- training --------------------------------------------------------------------------------------------------------

PROBE = range(8, 24)  # the steps whose speed decides how many fit: whole rounds of the four-step length pattern
RESERVE = 30.0  # seconds kept for the final evaluation, the samples and the files


@dataclass(frozen=True)
class CurvePoint:
    """One evaluation: losses in nats a token, `loss` the mean of the training loss since the last point."""

    step: int
    epoch: float
    loss: float
    held_out_loss: float
    learning_rate: float
    seconds: float


@dataclass(frozen=True)
class TrainingResult:
    """The weights of the curve's lowest held-out loss, the curve, and the steps and seconds spent."""

    weights: dict[str, Tensor]
    curve: list[CurvePoint]
    steps: int
    seconds: float


class WindowSampler:
    """Draws training windows at random offsets, on the device; a share of them begins with a document."""

    def __init__(self, corpus: Corpus, aligned: float, seed: int, device: torch.device) -> None:
        self.tokens = corpus.tokens.to(device)
        self.starts = corpus.starts.to(device)
        self.aligned = aligned
        self.generator = torch.Generator(device).manual_seed(seed)

    def draw(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each `[rows, length]`."""
        device, generator = self.tokens.device, self.generator
        limit = len(self.tokens) - length
        anywhere = torch.randint(limit, (rows,), device=device, generator=generator)
        documents = torch.randint(len(self.starts), (rows,), device=device, generator=generator)
        aligned = torch.rand(rows, device=device, generator=generator) < self.aligned
        offsets = torch.where(aligned, self.starts[documents].clamp(max=limit - 1), anywhere)
        windows = self.tokens[offsets[:, None] + torch.arange(length + 1, device=device)]
        return windows[:, :-1], windows[:, 1:]


class Pace:
    """Measures the speed of the first steps, and says how many can be made before the deadline."""

    def __init__(self, deadline: float, device: torch.device) -> None:
        self.deadline = deadline
        self.device = device
        self.probed = 0.0

    def fit(self, step: int, steps: int) -> int:
        """How many of `steps` to make, asked in front of each step; fewer only once the speed is known."""
        if step not in (PROBE.start, PROBE.stop):
            return steps
        synchronize(self.device)
        now = time.monotonic()
        if step == PROBE.start:
            self.probed = now
            return steps
        step_seconds = (now - self.probed) / len(PROBE)
        fitting = step + max(1, int(0.9 * (self.deadline - now) / step_seconds))  # a tenth for the evaluations
        if fitting < steps:
            print(f"{steps} steps do not fit the time limit: {fitting} will be made", flush=True)
        return min(steps, fitting)

    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline


class Recorder:
    """Evaluates the model on the held-out tokens, prints and keeps the curve, and keeps the best weights."""

    def __init__(self, model: nn.Module, held_out: Tensor, step_tokens: int, epoch_tokens: int) -> None:
        self.model = model
        self.held_out = held_out
        self.step_tokens = step_tokens
        self.epoch_tokens = epoch_tokens
        self.started = time.monotonic()
        self.losses = torch.zeros((), device=held_out.device)  # summed there: reading each would stall the GPU
        self.curve: list[CurvePoint] = []
        self.best: dict[str, Tensor] = {}

    def add(self, loss: Tensor) -> None:
        """Count a step's training loss."""
        self.losses += loss

    def record(self, step: int, steps: int, rate: float) -> None:
        """Evaluate after `step` steps; `rate` is the last one's learning rate."""
        since = step - (self.curve[-1].step if self.curve else 0)
        loss = self.losses.item() / since
        seconds = time.monotonic() - self.started
        held_out_loss = sliding_loss(self.model, self.held_out, autocast(self.held_out.device))
        if all(held_out_loss < point.held_out_loss for point in self.curve):
            self.best = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        tokens = step * self.step_tokens
        self.curve.append(CurvePoint(step, tokens / self.epoch_tokens, loss, held_out_loss, rate, seconds))
        self.losses.zero_()
        print(
            f"step {step}/{steps}  epoch {tokens / self.epoch_tokens:.1f}  loss {loss:.3f}  held-out loss "
            f"{held_out_loss:.3f} perplexity {math.exp(held_out_loss):.2f}  {tokens / seconds:,.0f} tokens/s",
            flush=True,
        )


def window_shape(step: int, settings: Settings) -> tuple[int, int]:
    """Rows and length of a step's batch: every fourth has windows of twice the length, for the later positions."""
    fits = settings.context * 2 <= MODEL_CONFIG["max_position_embeddings"]
    if step % 4 == 3 and settings.batch > 1 and fits:
        return settings.batch // 2, settings.context * 2
    return settings.batch, settings.context


def learning_rate(step: int, steps: int, settings: Settings) -> float:
    """Linear warm-up, then a cosine down to a hundredth of the peak."""
    warmup = max(1, round(settings.warmup * steps))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return settings.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 matrix products on a GPU, float32 on a CPU."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock reading means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def train(
    model: nn.Module, corpus: Corpus, held_out: Tensor, settings: Settings, device: torch.device, deadline: float
) -> TrainingResult:
    """Train until the steps are done or the deadline (of time.monotonic) has passed; prints a line an evaluation."""
    forward = torch.compile(model) if settings.compile else model
    optimizer = make_optimizer(model, settings, device)
    sampler = WindowSampler(corpus, settings.aligned, settings.seed, device)
    step_tokens = settings.batch * settings.context
    steps = settings.steps or math.ceil(settings.epochs * len(corpus.tokens) / step_tokens)
    pace = Pace(deadline, device)
    recorder = Recorder(model, held_out, step_tokens, len(corpus.tokens))
    step = 0
    while step < (steps := pace.fit(step, steps)) and not pace.is_over():
        rate = learning_rate(step, steps, settings)
        batch = sampler.draw(*window_shape(step, settings))
        recorder.add(training_step(model, forward, optimizer, batch, rate))
        step += 1
        if step % max(1, steps // settings.evaluations) == 0 or step == steps or pace.is_over():
            recorder.record(step, steps, rate)
    if step < steps:
        print(f"the time limit came after {step} of {steps} steps", flush=True)
    return TrainingResult(recorder.best, recorder.curve, step, time.monotonic() - recorder.started)


def training_step(
    model: nn.Module, forward: Any, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], rate: float
) -> Tensor:
    """One optimizer step at a learning rate; returns the loss, on the device."""
    inputs, targets = batch
    for group in optimizer.param_groups:
        group["lr"] = rate
    model.train()
    with autocast(inputs.device):
        logits = forward(input_ids=inputs, use_cache=False).logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


# ---- evaluation ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def sliding_loss(
    model: nn.Module,
    tokens: Tensor,
    precision: torch.autocast | None = None,
    context: int = EVALUATION_CONTEXT,
    stride: int = EVALUATION_STRIDE,
    rows: int = 16,
) -> float:
    """Mean loss in nats of all tokens but the first (`tokens: [n]`, on the model's device).

    Windows of `context` tokens move on by `stride`; each token counts once, in the first window that holds it, so that
    all but the first window's have at least `context - stride` tokens before them.
    """
    device = tokens.device
    overlap = context - stride
    count = len(range(0, max(1, len(tokens) - overlap), stride))
    positions = torch.arange(count, device=device)[:, None] * stride + torch.arange(context, device=device)
    windows = F.pad(tokens, (0, context + stride))[positions]  # [count, context]; the padding comes last, so is unseen
    scored = (positions < len(tokens)) & (torch.arange(context, device=device) >= overlap)
    scored[0] = (positions[0] > 0) & (positions[0] < len(tokens))
    model.eval()
    total = 0.0
    for window, mask in zip(torch.split(windows, rows), torch.split(scored, rows), strict=True):
        with precision or contextlib.nullcontext():
            logits = model(input_ids=window, use_cache=False).logits
        losses = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), window[:, 1:].flatten(), reduction="none")
        total += losses[mask[:, 1:].flatten()].double().sum().item()
    return total / int(scored.sum())


def load_checkpoint(directory: pathlib.Path, device: torch.device) -> tuple[Any, Any]:
    """The tokenizer, and the model in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(directory), model.to(device)


def evaluate_checkpoint(directory: pathlib.Path, text: str, device: torch.device) -> dict[str, Any]:
    """A checkpoint's perplexity on a text, in float32, with what is needed to compare it: text, context, stride."""
    tokenizer, model = load_checkpoint(directory, device)
    tokens = torch.tensor(tokenizer.encode(text, add_special_tokens=False, verbose=False), device=device)
    loss = sliding_loss(model, tokens)
    size = len(text.encode())
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": loss * (len(tokens) - 1) / math.log(2) / size,
        "tokens": len(tokens),
        "bytes": size,
        "context": EVALUATION_CONTEXT,
        "stride": EVALUATION_STRIDE,
        "python": platform.python_version(),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def greedy_samples(directory: pathlib.Path, device: torch.device) -> list[tuple[str, str]]:
    """Prompts and what the checkpoint writes after each, greedily."""
    tokenizer, model = load_checkpoint(directory, device)
    chats = [render_chat([{"role": "user", "content": content}], prompt=True) for content in CHAT_PROMPTS]
    samples = []
    for prompt in (*PROMPTS, *chats):
        tokens = tokenizer.encode(prompt, add_special_tokens=False)
        inputs = torch.tensor([tokens], device=device)
        output = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=SAMPLE_TOKENS, do_sample=False
        )
        samples.append((prompt, tokenizer.decode(output[0, len(tokens) :])))
    return samples


# ---- checkpoint ------------------------------------------------------------------------------------------------------


def save_checkpoint(out: pathlib.Path, weights: dict[str, Tensor], tokenizer: Tokenizer) -> None:
    """Write the weights in bfloat16, the shared embedding once, with the tokenizer and the configuration."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to("cpu", torch.bfloat16).contiguous()
        for name, tensor in weights.items()
        if name != "lm_head.weight"  # tied to model.embed_tokens.weight
    }
    (out / "model.safetensors").write_bytes(safetensors.torch.save(tensors, metadata={"format": "pt"}))
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(out / "config.json", MODEL_CONFIG)
    write_json(out / "generation_config.json", GENERATION_CONFIG)
    write_json(out / "tokenizer_config.json", TOKENIZER_CONFIG)
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def write_json(path: pathlib.Path, value: Any) -> None:
    """Write a value as indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_checkpoint(directory: pathlib.Path) -> None:
    """Raise ValueError unless the checkpoint is small, complete and tokenizes as intended."""
    size = (directory / "model.safetensors").stat().st_size
    if size > SIZE_LIMIT:
        raise ValueError(f"model.safetensors has {size:,} bytes, and at most {SIZE_LIMIT:,} are allowed")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "  Hi\n"}]
    for prompt in (False, True):
        template = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        if template != render_chat(messages, prompt):
            raise ValueError(f"the chat template gives {template!r}, not what the model was trained on")
    for text in (held_out_text(), render_chat(messages), " \t\r\n\n\n  é 漢字 😀 don't ( x ) , .\x00  "):
        if tokenizer.decode(tokenizer.encode(text, verbose=False)) != text:
            raise ValueError(f"a text that begins with {text[:20]!r} changes when it is encoded and decoded")
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    problems = loaded[1]
    if any(problems.values()):
        raise ValueError(f"the checkpoint does not fit the model: {problems}")


# ---- model card ------------------------------------------------------------------------------------------------------


def curve_table(curve: Sequence[CurvePoint], rows: int = 10) -> str:
    """The curve as a Markdown table of about so many rows, the last point and the best one included."""
    best = min(curve, key=lambda point: point.held_out_loss)
    spacing = math.ceil(len(curve) / rows)
    shown = [point for i, point in enumerate(curve) if i % spacing == 0 or point in (best, curve[-1])]
    lines = ["| step | epoch | training loss | held-out loss | held-out perplexity |", "| --- " * 5 + "|"]
    for point in shown:
        cells = (f"{point.epoch:.1f}", f"{point.loss:.3f}", f"{point.held_out_loss:.3f}")
        mark = " (kept)" if point is best else ""
        lines.append(f"| {point.step} | {' | '.join(cells)} | {math.exp(point.held_out_loss):.2f}{mark} |")
    return "\n".join(lines)


def sample_blocks(samples: Sequence[tuple[str, str]]) -> str:
    """The samples as Markdown; four backquotes, since a chat answer has blocks of three."""
    blocks = [f"Prompt:\n````text\n{prompt}\n````\nCompletion:\n````text\n{text}\n````" for prompt, text in samples]
    return "\n\n".join(blocks)


def model_card(report: dict[str, Any], samples: Sequence[tuple[str, str]], curve: Sequence[CurvePoint]) -> str:
    """README.md of the checkpoint, from the template beside the package."""
    settings, data, held_out = report["settings"], report["data"], report["held_out"]
    values = {
        "parameters": f"{report['parameters'] / 1e6:.1f} M",
        "train_minutes": f"{report['seconds'] / 60:.1f}",
        "device": report["versions"]["device"],
        "layers": MODEL_CONFIG["num_hidden_layers"],
        "hidden": MODEL_CONFIG["hidden_size"],
        "heads": MODEL_CONFIG["num_attention_heads"],
        "kv_heads": MODEL_CONFIG["num_key_value_heads"],
        "head_dim": MODEL_CONFIG["head_dim"],
        "ffn": MODEL_CONFIG["intermediate_size"],
        "vocabulary": f"{VOCABULARY:,}",
        "positions": f"{MODEL_CONFIG['max_position_embeddings']:,}",
        "megabytes": f"{report['bytes'] / 1e6:.1f}",
        "files": data["files"],
        "source_megabytes": f"{data['source_bytes'] / 1e6:.1f}",
        "python": report["versions"]["python"],
        "chat_percent": f"{100 * data['chat_bytes'] / (data['chat_bytes'] + data['source_bytes']):.0f}%",
        "tokens": f"{data['tokens']:,}",
        "held_out": ", ".join(f"`{name}`" for name in HELD_OUT),
        "shared_percent": f"{100 * data['shared_passages']:.2f}%",
        "context": held_out["context"],
        "stride": held_out["stride"],
        "held_tokens": f"{held_out['tokens']:,}",
        "perplexity": f"{held_out['perplexity']:.2f}",
        "bits_per_byte": f"{held_out['bits_per_byte']:.3f}",
        "held_sha": held_out["sha256"],
        "evaluations": len(curve),
        "steps": f"{report['steps']:,}",
        "batch_tokens": f"{settings['batch'] * settings['context']:,}",
        "epochs": f"{curve[-1].epoch:.1f}",
        "learning_rate": settings["learning_rate"],
        "weight_decay": settings["weight_decay"],
        "dropout": settings["dropout"],
        "arithmetic": "float32" if report["versions"]["device"] == "CPU" else "bfloat16 autocast",
        "seed": settings["seed"],
        "curve": curve_table(curve),
        "sample_tokens": SAMPLE_TOKENS,
        "samples": sample_blocks(samples),
        "command": report["command"],
    }
    return string.Template(CARD_TEMPLATE.read_text(encoding="utf-8")).substitute(values)


# ---- command line ----------------------------------------------------------------------------------------------------


def build_demo(settings: Settings, out: pathlib.Path, device: torch.device) -> None:
    """Everything from the standard library's files to a checked checkpoint with its card."""
    deadline = time.monotonic() + 60 * settings.minutes - RESERVE
    torch.manual_seed(settings.seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    rng = random.Random(settings.seed)

    sources = training_sources()
    chats = conversations(sources, settings.chat_share, rng)
    documents = [source.text for source in sources] + chats
    rng.shuffle(documents)
    tokenizer = train_tokenizer(documents)
    corpus = encode_documents(tokenizer, documents)
    text = held_out_text()[: settings.evaluation_length or None]
    held_out = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids, device=device)
    data = {
        "files": len(sources),
        "source_bytes": sum(len(source.text.encode()) for source in sources),
        "conversations": len(chats),
        "chat_bytes": sum(len(chat.encode()) for chat in chats),
        "tokens": len(corpus.tokens),
        "sha256": hashlib.sha256("".join(documents).encode()).hexdigest(),
        "held_out_modules": HELD_OUT,
        "shared_passages": shared_passages(text, sources),
    }
    print(json.dumps(data, indent=2), flush=True)

    model: Any = build_model(settings.dropout)
    model.to(device)
    result = train(model, corpus, held_out, settings, device, deadline)

    save_checkpoint(out, result.weights, tokenizer)
    check_checkpoint(out)
    report = {
        "command": command_line(settings, result.steps),
        "settings": asdict(settings),
        "versions": versions(device),
        "data": data,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": (out / "model.safetensors").stat().st_size,
        "steps": result.steps,
        "seconds": result.seconds,
        "held_out": evaluate_checkpoint(out, text, device),
        "curve": [asdict(point) for point in result.curve],
    }
    write_json(out / "training.json", report)
    samples = greedy_samples(out, device)
    (out / "README.md").write_text(model_card(report, samples, result.curve), encoding="utf-8")
    for prompt, text in samples:
        print(f"\n=== {prompt!r}\n{prompt}{text}", flush=True)
    print(json.dumps(report["held_out"], indent=2))


def versions(device: torch.device) -> dict[str, str]:
    """What the run was made with."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
    }


def command_line(settings: Settings, steps: int) -> str:
    """The command that repeats a run: its settings where they differ from the defaults, and the steps it made."""
    words = ["python scripts/train_demo.py"]
    repeated = replace(settings, steps=steps)
    for item in fields(repeated):
        value = getattr(repeated, item.name)
        if value != item.default:
            option = item.name.replace("_", "-")
            words.append(f"--{option}" if value is True else f"--{option} {value}")
    return " ".join(words)


def parse_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Settings]:
    """The command line: what to do, and the settings of a training run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--out", type=pathlib.Path, default=REPOSITORY / "demo" / "engine-demo", help="directory to write"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device")
    parser.add_argument("--smoke", action="store_true", help="tiny settings, for a test of the script on a CPU")
    parser.add_argument("--evaluate", type=pathlib.Path, metavar="DIR", help="evaluate a checkpoint, train none")
    for item in fields(Settings):
        option, description = "--" + item.name.replace("_", "-"), item.metadata["help"]
        if isinstance(item.default, bool):
            parser.add_argument(option, action="store_true", default=None, help=description)
        else:
            shown = f"{description} (default: {item.default})"
            parser.add_argument(option, type=type(item.default), default=None, help=shown)
    options = parser.parse_args(arguments)
    given = {item.name: value for item in fields(Settings) if (value := getattr(options, item.name)) is not None}
    return options, replace(SMOKE if options.smoke else Settings(), **given)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options, settings = parse_arguments(arguments)
    device = torch.device(options.device)
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    if options.evaluate:
        print(json.dumps(evaluate_checkpoint(options.evaluate, held_out_text(), device), indent=2))
    else:
        build_demo(settings, options.out, device)


if __name__ == "__main__":
    main()
