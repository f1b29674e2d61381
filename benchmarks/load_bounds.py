"""Maximum output tokens per second of a load of equal requests, from the cost of a token and the rates of a device.

In the steady state each output token takes its part of a prompt, the linear layers of a decode step, and reading the
keys and values of its context. Serial: one after the other. Overlap: tensor cores and memory work side by side, and the
busier of the two is never idle. Norms, sampling, and the start and end of a load count nothing.
"""

from __future__ import annotations

from attrs import frozen

from engine.core.profiling import ModelCost, StepShape

MAX_BATCH = 4096
"""Maximum sequences per step that the bound assumes; more would gain nothing, since weights are then no limit."""
EFFICIENT = 0.85
"""Share of the copy bandwidth at which attention is expected to read keys and values."""
BEST = 0.97
"""The same at the most."""
PROMPT_SHARE = 0.85
"""Share of the matmul rate that the linear layers of a prompt reach if the time of attention, norms and activations
counts too: 85,000 tokens/s where an 8B model's 14 GFLOP per token could run at 1,400 TFLOP/s, prompts of 2,048 tokens.
Prompts of 5,000 tokens and more reach less, since attention grows with their length."""


@frozen(kw_only=True)
class TokenCost:
    """What one output token costs in a decode step, and one prompt token."""

    flops: float
    """FLOPs of the linear layers and the LM head, per output token."""
    weight_bytes: float
    """Bytes of weights read per decode step."""
    kv_bytes: float
    """Bytes of keys and values read per output token."""
    prompt_flops: float
    """FLOPs of the linear layers per prompt token."""


@frozen(kw_only=True)
class Rates:
    """What a device does per second."""

    bandwidth: float
    """Bytes read or written by a copy."""
    flops: float
    """FLOPs of a large matmul."""
    prompt_tokens: float | None = None
    """Prompt tokens; None: as many as the matmul rate allows at PROMPT_SHARE."""


@frozen(kw_only=True)
class Bound:
    """Maximum output tokens per second."""

    serial: float
    """One part after the other, attention at EFFICIENT of the bandwidth."""
    serial_best: float
    """The same, attention at BEST of the bandwidth."""
    overlap: float
    """Tensor cores or memory never idle, attention at EFFICIENT of the bandwidth."""


def mean_context(inputs: int, outputs: int) -> float:
    """Tokens of a decoding sequence's context, on average over its output."""
    return inputs + outputs / 2


def steady_batch(inputs: int, outputs: int, cache_tokens: float) -> float:
    """Sequences whose contexts fill the cache in the steady state, MAX_BATCH at the most."""
    return min(cache_tokens / mean_context(inputs, outputs), MAX_BATCH)


def token_cost(cost: ModelCost, inputs: int, outputs: int, batch: float) -> TokenCost:
    """What a token costs in a step of `batch` sequences that have decoded half of their output."""
    context = round(mean_context(inputs, outputs))
    count = max(1, round(batch))
    step = cost.work(StepShape.of(decodes=[context] * count, windows=cost.windows))
    return TokenCost(
        flops=sum(module.flops_per_row for module in cost.modules),
        weight_bytes=step.weight_bytes,
        kv_bytes=step.kv_read / count,
        prompt_flops=sum(module.flops_per_row for module in cost.modules if module.rows == "tokens"),
    )


def find_bound(inputs: int, outputs: int, cost: TokenCost, rates: Rates, batch: float) -> Bound:
    """The bound of requests of `inputs` prompt and `outputs` output tokens, `batch` of which run at a time."""
    prompt_rate = rates.prompt_tokens or PROMPT_SHARE * rates.flops / cost.prompt_flops
    prompt = inputs / outputs / prompt_rate
    multiply = cost.flops / rates.flops
    weights = cost.weight_bytes / rates.bandwidth / batch
    attention = cost.kv_bytes / (EFFICIENT * rates.bandwidth)
    best_attention = cost.kv_bytes / (BEST * rates.bandwidth)
    linear = max(multiply, weights)
    return Bound(
        serial=1 / (prompt + linear + attention),
        serial_best=1 / (prompt + linear + best_attention),
        overlap=1 / max(prompt + multiply, attention + weights),
    )
