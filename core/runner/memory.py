"""The memory plan: the KV cache gets what weights and activations leave of a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from engine.core.config.limits import parse_bytes
from engine.core.config.tree import AUTO, EngineConfig
from engine.core.device import DeviceInfo
from engine.core.errors import CapacityError
from engine.core.host import Host
from engine.core.models.base import ModelSpec
from engine.core.quant.float8 import FLOAT8
from engine.core.schedulers.block_kinds import blocks_needed, longest_context
from engine.core.types import BlockKind

MEMORY_SHARE = {"cpu": 0.5, "cuda": 0.9}
"""Share of the free memory that an engine uses by default."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FLOAT8: 1}


def format_bytes(count: int) -> str:
    """Format a number of bytes for people: 1.50 GiB."""
    amount, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(amount) >= 1024 and len(units) > 1:
        amount /= 1024
        del units[0]
    return f"{amount:.{0 if units[0] == 'B' else 2}f} {units[0]}"


@frozen(kw_only=True)
class MemoryPlan:
    """How the memory is divided, in bytes, and the numbers of blocks."""

    budget: int
    weights: int
    activations: int
    penalties: int
    """Bytes of the token counts of all running sequences, if all have penalties."""
    kv: int
    num_blocks: int
    kernels: int = 0
    """Bytes of kernels compiled while serving."""
    states: int = 0
    """Bytes of the states of all running sequences."""
    blocks_per_context: int = 0
    """Maximum blocks of one context of full length."""


def free_memory(device: DeviceInfo) -> int:
    """Bytes free on the device now; for a CPU, the host memory that this process may still use."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device.index)[0]
    return Host().free_memory()


def memory_share(config: EngineConfig, device: DeviceInfo) -> float:
    """Share of the device's free memory that the engine may use."""
    return config.cache.memory_fraction or MEMORY_SHARE[device.type]


def max_sampling_rows(config: EngineConfig, *, speculates: bool) -> int:
    """Maximum rows of logits in one step: one per sequence, and one for each of its drafts."""
    drafts = config.speculator.max_drafts if speculates else 0
    return min(config.scheduler.max_running * (1 + drafts), config.scheduler.max_batch_tokens)


def estimate_activations(model: ModelSpec, config: EngineConfig, dtype: str, *, speculates: bool = False) -> int:
    """A generous estimate of the bytes of one full step's intermediate results, where they cannot be measured.

    Per token: about a dozen hidden-size rows (a merged gate-up projection is the largest). Per row that samples:
    logits.
    """
    tokens = config.scheduler.max_batch_tokens
    rows = max_sampling_rows(config, speculates=speculates)
    return tokens * 12 * model.hidden_size * DTYPE_BYTES[dtype] + logits_bytes(model, rows)


def logits_bytes(model: ModelSpec, rows: int) -> int:
    """Bytes to sample `rows` tokens: three rows of float32 logits each."""
    return rows * 3 * model.vocab_size * 4


def plan_memory(
    config: EngineConfig,
    max_len: int,
    kinds: Sequence[BlockKind],
    *,
    budget: int,
    weights: int,
    activations: int,
    bytes_per_block: int,
    penalties: int = 0,
    kernels: int = 0,
    states: int = 0,
) -> MemoryPlan:
    """Divide `budget` bytes; the KV cache gets at most as many blocks as all running sequences can fill.

    kinds: of the layers that have blocks. states: bytes of the states of `max_running` sequences and of padding.
    Raises CapacityError when the blocks do not hold one sequence of the longest context, or the states do not fit. Its
    message has a table of the budget, and the longest context and the number of states that fit.
    """
    block_size, max_chunk = config.cache.block_size, config.scheduler.max_batch_tokens
    needed = blocks_needed(kinds, -(-max_len // block_size), block_size, max_chunk)
    useful = needed * config.scheduler.max_running
    others = weights + activations + penalties + kernels + states
    if config.cache.memory == AUTO:
        available = budget - others
    else:
        available = parse_bytes(config.cache.memory)
        budget = others + available
    num_blocks = min(available // bytes_per_block, useful) if kinds else 0
    if num_blocks < needed or available < 0:
        used = {"weights": weights, "activations": activations, "penalties": penalties}
        used |= {"compiled kernels": kernels} if kernels else {}
        fewer = 0
        if states:
            used |= {"states": states}
            room = available + states - needed * bytes_per_block if config.cache.memory == AUTO else 0
            fewer = room // (states // (config.scheduler.max_running + 1)) - 1  # for the padding row
        if not kinds:
            raise CapacityError(_too_many_states(config.scheduler.max_running, budget, used, fewer))
        fits = 0
        if available > 0:
            fits = longest_context(kinds, available // bytes_per_block, block_size, max_chunk)
        raise CapacityError(_too_small(max_len, budget, used, available, needed * bytes_per_block, fits, fewer))
    return MemoryPlan(
        budget=budget,
        weights=weights,
        activations=activations,
        penalties=penalties,
        kv=num_blocks * bytes_per_block,
        num_blocks=num_blocks,
        kernels=kernels,
        states=states,
        blocks_per_context=needed,
    )


def _too_small(
    max_len: int, budget: int, used: Mapping[str, int], available: int, needed: int, fits: int, fewer: int
) -> str:
    """needed: bytes of one context of `max_len`. fits: tokens of the longest context that fits. fewer: sequences whose
    states leave room for one context of `max_len`, if above 0."""
    table = _table(
        {
            "memory budget": budget,
            **used,
            "left for the KV cache": available,
            f"one context of {max_len}": needed,
        }
    )
    advice = (
        f"the longest context that fits is {fits}: use --max-len {fits}, or give more memory with --kv-memory "
        "or --memory-fraction"
        if fits
        else "no context fits: give more memory with --kv-memory or --memory-fraction, or lower --max-batch-tokens"
    )
    if fewer > 0:
        advice = f"one context fits with --max-running {fewer}. Otherwise {advice}"
    return f"the KV cache does not hold one context of {max_len} tokens:\n{table}\n{advice}"


def _too_many_states(max_running: int, budget: int, used: Mapping[str, int], fewer: int) -> str:
    """The error of a model whose layers all keep a state. fewer: sequences whose states fit, if above 0."""
    advice = (
        f"the states of {fewer} sequences fit: use --max-running {fewer}, or give more memory with --memory-fraction"
        if fewer > 0
        else "not even those of one fit: give more memory with --memory-fraction, or lower --max-batch-tokens"
    )
    table = _table({"memory budget": budget, **used})
    return f"the memory does not hold the states of {max_running} running sequences:\n{table}\n{advice}"


def _table(sizes: Mapping[str, int]) -> str:
    return "\n".join(f"  {name:<26}{format_bytes(size):>12}" for name, size in sizes.items())
