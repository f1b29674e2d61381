"""Sizes of batches and of steps that CUDA graphs are captured for; others are padded to the next size."""

from __future__ import annotations

from collections.abc import Sequence

ALL_RECORDED = 64
"""Up to this batch size, every size may have kernels of its own."""
MAX_TOKENS = 1024
"""Larger steps keep the device busy for longer than the host takes to launch their kernels one by one."""


def batch_sizes(max_running: int) -> list[int]:
    """Batch sizes to capture graphs for.

    A batch is padded by less than 8 sequences up to 64, by less than a quarter of its size up to 256, and by less than
    an eighth beyond, where the rows of a step cost more than its weights: of 1,578 sequences of Llama-3.1-8B in fp8, a
    quarter would be 6 % of the step.
    """
    sizes = [1, 2, 3, 4, 6, 8, *range(16, 65, 8)]
    while sizes[-1] < max_running:
        power = 1 << sizes[-1].bit_length() - 1
        sizes.append(sizes[-1] + power // (4 if power < 256 else 8))
    return [size for size in sizes if size < max_running] + [max_running]


def token_counts(max_batch_tokens: int) -> list[int]:
    """Numbers of tokens to capture steps for: a step is padded by less than 64 tokens up to 512, and by less than 128
    beyond."""
    counts = [*range(64, 513, 64), *range(640, MAX_TOKENS + 1, 128)]
    return [count for count in counts if count <= max_batch_tokens]


def recorded_sizes(sizes: Sequence[int]) -> list[int]:
    """Batch sizes whose kernels most likely include those of all: small ones, powers of two, and the largest."""
    return [size for size in sizes if size <= ALL_RECORDED or size & (size - 1) == 0 or size == sizes[-1]]
