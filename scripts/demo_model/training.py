"""The training loop, within its time limit, and its learning curve."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo_model.evaluation import sliding_loss
from demo_model.model import MODEL_CONFIG, make_optimizer
from demo_model.settings import Settings
from demo_model.tokenizer import Corpus

PROBE = range(8, 24)  # the steps whose speed decides how many fit: whole rounds of the four-step length pattern
RESERVE = 30.0  # seconds kept for the final evaluation, the samples and the files


@dataclass(frozen=True)
class CurvePoint:
    """One evaluation: losses in nats per token, `loss` the mean of the training loss since the last point."""

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
    """Train until the steps are done or the deadline (of time.monotonic) has passed; prints a line per evaluation."""
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
